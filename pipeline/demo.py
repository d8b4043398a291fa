"""The demo: everything a fresh machine needs to rehearse the recipe, then a short real challenger run.

    drzero demo                                    # what `make train` runs
    drzero demo trainer.total_training_steps=24    # longer; resumes what is there

An invented world that no model has seen becomes a corpus, the corpus an index and prompts; the packaged small
model becomes the demo policy; then the challenger stage runs as it would on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.demo_world import World, generate_world, write_world
from data.errors import DataError
from data.parquet_io import read_parquet
from pipeline.challenger import run_challenger
from pipeline.compose import compose_stage, detect_hardware
from pipeline.demo_models import prepare_demo_models
from pipeline.prepare_data import run_prepare_data

WORLD_SEED = 0
PROMPTS, HELDOUT = 960, 64
"""Prompts: 120 steps of 8, each document asked about four times or so."""


def run_demo(overrides: Sequence[str]) -> None:
    """Prepare the demo world and its models, then run the challenger stage with `overrides`."""
    prepare_demo(overrides)
    run_challenger(compose_stage("challenger", [*_demo_choices(), "run.name=demo", *overrides]))


def prepare_demo(overrides: Sequence[str] = ()) -> None:
    """Build what is missing of the demo: corpus, models, index, prompts."""
    roots = [override for override in overrides if override.startswith("paths.")]
    config = compose_stage("prepare_data", [*_demo_choices(), *roots])
    corpus = Path(config.paths.corpus)
    world = generate_world(WORLD_SEED, "run")
    _spare_other_prompts(corpus / "data" / "zero_ratio4321.parquet", world)
    write_world(world, corpus)
    for folder in prepare_demo_models(corpus / "models"):
        print(f"model ready: {folder.name}")
    sizes = [f"rows={PROMPTS}", f"heldout_rows={HELDOUT}", f"source={corpus / 'corpus.jsonl'}"]
    run_prepare_data(compose_stage("prepare_data", [*_demo_choices(), *roots, *sizes]))


def _spare_other_prompts(path: Path, world: World) -> None:
    """Never overwrite prompts of the user's own corpus: raises DataError when they are not the demo's."""
    if path.exists():
        first = read_parquet(path, ["extra_info"]).column("extra_info")[0].as_py()
        if first["doc_id"] not in {passage.id for passage in world.passages.values()}:
            raise DataError(
                f"{path} holds prompts of another corpus: give the demo a place, paths.corpus=outputs/demo"
            )


def _demo_choices() -> list[str]:
    """The demo's own choices ahead of the user's: the demo policy and the packaged embedder everywhere."""
    return [f"hardware={detect_hardware()}", "model=demo-policy", "retrieval.embedder=packaged-minilm"]
