"""The first guide's commands in its order and with its flags, from documents to the challenger's first step.

A run file makes it small and takes a CPU. The hub's cache has a small model and a small embedder under the
names of the default ones. Two corpora: a folder of plain texts, and a Chroma that another tool wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import chromadb
import pyarrow.parquet as pq
import pytest
import yaml
from modal_checkout import make_checkout, run_action, stage_plane
from stage_run import RUN_LIMIT_S
from tiny_embedder import save_tiny_embedder

from data.demo_world import generate_world
from drzero.recipe.metrics import read_metrics
from search.embedders import Embedder, EmbedderSpec

pytestmark = [pytest.mark.timeout(4 * RUN_LIMIT_S), pytest.mark.slow("two starts of the trainer")]

FEW = ["rows=40", "heldout_rows=0", "min_document_tokens=0", "min_prose=0"]
SMALL = [
    *("data.train_batch_size=4", "solver.attempts=2", "trainer.total_training_steps=1"),
    *("data.max_response_length=256", "rollout.max_tokens_per_turn=48", "solver.max_tokens_per_turn=48"),
    *("process_env.OMP_NUM_THREADS=1", "retrieval.topk=2"),
]
HUB = {"models--Qwen--Qwen2.5-3B-Instruct": "model", "models--intfloat--e5-large-v2": "embedder"}


@pytest.fixture(scope="module")
def texts():
    passages = list(generate_world(0, "run", passages=60).passages.values())
    return {passage.title: passage.text for passage in passages}


@pytest.fixture(scope="module")
def models(tmp_path_factory, speaking_model):
    embedder = tmp_path_factory.mktemp("embedder") / "tiny"
    save_tiny_embedder(embedder)
    return {"model": speaking_model, "embedder": embedder}


@pytest.fixture
def plane(tmp_path, models):
    with stage_plane(tmp_path / "plane") as plane:
        hub = plane.volume("dr-zero-cache").committed() / "huggingface" / "hub"
        for name, kind in HUB.items():
            (hub / name / "refs").mkdir(parents=True)
            (hub / name / "refs" / "main").write_text("one")
            shutil.copytree(models[kind], hub / name / "snapshots" / "one")
        yield plane


def as_folder(place: Path, texts: dict[str, str], embedder: Path) -> Path:
    (place / "papers").mkdir()
    for number, (title, text) in enumerate(texts.items()):
        (place / "papers" / f"{number:02}.txt").write_text(f"{title}\n\n{text}\n")
    return place / "papers"


def as_chroma(place: Path, texts: dict[str, str], embedder: Path) -> Path:
    vectors = Embedder(EmbedderSpec(str(embedder), "cpu")).encode_passages(list(texts.values()))
    client = chromadb.PersistentClient(str(place / "chromadb"))
    client.create_collection("corpus").add(
        ids=[f"paper-{number}" for number in range(len(texts))],
        documents=list(texts.values()),
        metadatas=[{"title": title} for title in texts],
        embeddings=vectors,
    )
    return place / "chromadb"


@pytest.mark.parametrize(
    ("corpus", "source"),
    [(as_folder, ["source=${paths.corpus}/papers"]), (as_chroma, [])],
    ids=["texts", "chroma"],
)
def test_the_quick_start_leads_to_the_challengers_first_step(plane, tmp_path, texts, models, corpus, source):
    (tmp_path / "checkout").mkdir()
    checkout = make_checkout(tmp_path / "checkout", dotenv=False)
    for name, overrides in (("few.yaml", FEW), ("small.yaml", SMALL)):
        (checkout / name).write_text(yaml.safe_dump({"compute": "cpu", "overrides": overrides}))
    for words in (
        ["upload", str(corpus(tmp_path, texts, models["embedder"]))],
        ["prepare-data", *source, "--config-path", "few.yaml"],
        ["challenger", "--iteration", "1", "--config-path", "small.yaml"],
    ):
        run_action(plane, checkout, *words, seconds=RUN_LIMIT_S).succeeded()
    volume = plane.volume("dr-zero-corpus").committed()
    prompts = pq.read_table(volume / "data" / "zero_ratio4321.parquet")
    assert prompts.num_rows == 40
    run = plane.volume("dr-zero-checkpoints").committed() / "challenger_iter1"
    assert list(read_metrics(run)) == [1]
