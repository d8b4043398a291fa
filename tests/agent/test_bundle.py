"""A bundle of a loop's solver, on real services: moved, pushed and pulled, it answers as `evaluate` did."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from loopback_hub import NO_HUB, LoopbackHub

from data.demo_world import generate_world, write_world
from drzero.agent.bundle.manifest import MANIFEST, check_files, read_manifest
from drzero.agent.bundle.opening import check_index, opened
from drzero.agent.compose import compose_agent
from drzero.agent.running import running
from drzero.cli import main
from drzero.recipe.compose import resolve
from search.embedders import EmbedderSpec
from search.indexing.shards import build_index

TOKEN = "hf_of_the_test"


@pytest.fixture(scope="module")
def loop(tmp_path_factory, prepared, speaking_model):
    folder = tmp_path_factory.mktemp("loop")
    shutil.copytree(speaking_model, folder / "solver_iter1_hf")
    words = [word for word in prepared.overrides(folder, speaking_model) if not word.startswith("run.name")]
    assert main(["evaluate", *words, "iteration=1", "questions_per_benchmark=2"]) == 0
    return folder


@pytest.fixture(scope="module")
def make(loop, prepared):
    def bundle(out: Path, *words: str) -> int:
        places = ["hardware=cpu", f"paths.checkpoints={loop}", f"paths.corpus={prepared.corpus}"]
        return main(["bundle", *places, f"out={out}", *words])

    return bundle


@pytest.fixture(scope="module")
def moved(make, tmp_path_factory):
    made, elsewhere = tmp_path_factory.mktemp("here") / "agent", tmp_path_factory.mktemp("there") / "agent"
    assert make(made, "with_index=true") == 0
    return made.rename(elsewhere)


@pytest.fixture(scope="module")
def without_index(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without") / "agent"
    assert make(folder) == 0
    return folder


@pytest.fixture
def machine(tmp_path):
    return ["hardware=cpu", f"paths.corpus={tmp_path / 'corpus'}", f"paths.checkpoints={tmp_path / 'runs'}"]


@pytest.fixture
def hub_with(monkeypatch, fresh_hub):
    opened.cache_clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    yield lambda models, **more: LoopbackHub(models, port=NO_HUB, token=TOKEN, **more)
    opened.cache_clear()


def played(loop: Path) -> dict[str, dict]:
    lines = (loop / "evaluate_iter1" / "answers.jsonl").read_text().splitlines()[1:]
    return {record["question"]: record["trajectory"] for record in map(json.loads, lines)}


def asked(questions: list[str], words: list[str], name: str = "agent") -> dict[str, dict]:
    async def ask_all(agents):
        async with agents.opened() as (agent,):
            assert agent.name == name
            answers = await asyncio.gather(*map(agent.ask, questions))
        return {answer.question: answer.attempt.trajectory.to_dict() for answer in answers}

    with running(compose_agent("ask", words)) as agents:
        return asyncio.run(ask_all(agents))


def test_a_moved_bundle_answers_token_for_token_as_evaluate_did_and_stays_as_it_is(loop, moved, machine):
    expected = played(loop)
    assert len(expected) == 8 and any(turn["calls"] for one in expected.values() for turn in one["turns"])
    assert asked(list(expected), [f"bundle={moved}", *machine]) == expected
    check_files(moved, read_manifest(moved))


def test_a_pushed_bundle_is_private_and_one_that_was_pulled_answers_the_same(
    loop, make, machine, hub_with, tmp_path, capsys, monkeypatch
):
    expected = played(loop)
    with hub_with({}) as hub:
        assert make(tmp_path / "agent", "with_index=true", "push=me/agent") == 0
        assert "pushed to" in (out := capsys.readouterr().out) and "(private" in out
        assert hub.private == {"me/agent"}
        names = {*read_manifest(tmp_path / "agent").files, MANIFEST, "README.md", ".gitattributes"}
        assert hub.models["me/agent"].keys() == names
        assert b"drzero ask bundle=me/agent " in hub.models["me/agent"]["README.md"]
        shutil.rmtree(tmp_path / "agent")
        assert asked(list(expected), ["bundle=me/agent", *machine], "me/agent") == expected
        # What is no longer part of it does not stay there.
        assert make(tmp_path / "agent", "push=me/agent") == 0
        assert not [name for name in hub.models["me/agent"] if name.startswith("index/")]


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda folder: flip(folder / "model.safetensors"), "model.safetensors changed"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "lacks tokenizer.json: copy it again"),
        (lambda folder: (folder / MANIFEST).unlink(), f"is no bundle: it has no {MANIFEST}"),
        (lambda folder: (folder / MANIFEST).write_text("{"), f"{MANIFEST} is damaged"),
        (lambda folder: change(folder, form=2), "made by another version (form 2, not 1)"),
        (lambda folder: change(folder, places={"chroma.path": "../x"}), "'../x', which is not inside"),
        (lambda folder: change(folder, settings={"prompts.form": "${oc.env:HF_TOKEN}"}), "no plain text"),
        (lambda folder: change(folder, settings={"retrieval.url": "http://a.b"}), "sets retrieval.url"),
        (shutil.rmtree, "there is no bundle at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_spoiled_bundle_is_refused_before_anything_starts(moved, machine, tmp_path, capsys, spoil, said):
    folder = Path(shutil.copytree(moved, tmp_path / "agent"))
    spoil(folder)
    assert main(["ask", f"bundle={folder}", *machine, "Who?"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "runs").exists()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_card_may_be_edited(moved, machine, tmp_path):
    folder = Path(shutil.copytree(moved, tmp_path / "agent"))
    (folder / "README.md").write_text("Ours.")
    assert compose_agent("ask", [f"bundle={folder}", *machine]).solver.model_path == str(folder)


def test_an_index_of_other_documents_is_refused_with_both_identities(moved, machine, tmp_path, capsys):
    write_world(generate_world(1, passages=80), tmp_path / "world")
    spec = EmbedderSpec("packaged-minilm", "cpu")
    build_index(tmp_path / "world" / "corpus.jsonl", tmp_path / "chroma", "corpus", spec)
    assert main(["ask", f"bundle={moved}", f"chroma.path={tmp_path / 'chroma'}", *machine, "Who?"]) == 2
    said = capsys.readouterr().err
    assert f"this index is not the one of {moved}: it has 80 documents" in said
    assert said.count("@sha256:") == 2 and read_manifest(moved).index.fingerprint in said


def test_a_bundle_without_its_index_wants_a_copy_of_it_in_any_place(
    without_index, moved, prepared, machine, capsys, start_peer
):
    bundle = [f"bundle={without_index}", *machine]
    assert main(["ask", *bundle, "Who?"]) == 2
    assert "does not hold its index (60 documents embedded by packaged-minilm" in capsys.readouterr().err
    own = resolve(compose_agent("ask", [*bundle, f"chroma.path={prepared.corpus / 'chromadb'}"]))
    check_index(own, [own.bundle])
    identity = json.loads((moved / MANIFEST).read_text())["index"]
    service = start_peer("/search", lambda body: 500, {"/index": identity})
    there = resolve(compose_agent("ask", [*bundle, f"retrieval.url={service.url}"]))
    check_index(there, [there.bundle])


def test_a_faiss_index_goes_along_too(make, prepared, machine, tmp_path):
    words = [*prepared.overrides(tmp_path), "index=faiss", f"faiss.path={tmp_path / 'faiss'}", "rows=10"]
    source = f"source={prepared.corpus / 'corpus.jsonl'}"
    assert main(["prepare-data", *words, source, "heldout_rows=0", f"out_dir={tmp_path / 'data'}"]) == 0
    out = tmp_path / "agent"
    assert make(out, "with_index=true", "index=faiss", f"faiss.path={tmp_path / 'faiss'}") == 0
    shutil.rmtree(tmp_path / "faiss")
    config = resolve(compose_agent("ask", [f"bundle={out}", *machine]))
    assert config.index == "faiss" and Path(config.faiss.path).is_relative_to(out)
    check_index(config, [str(out)])


def test_a_bundles_settings_are_the_runs_and_what_is_typed_wins(moved, machine, loop):
    bundle = [f"bundle={moved}", *machine]
    config = compose_agent("ask", bundle)
    assert (config.prompts.form, config.retrieval.topk, config.iteration) == ("short", 2, 1)
    assert compose_agent("ask", [*bundle, "retrieval.topk=1"]).retrieval.topk == 1
    other = compose_agent("ask", [*bundle, "model=qwen2.5-3b"])
    assert other.prompts.form == "full" and other.retrieval.embedder == "packaged-minilm"
    assert compose_agent("ask", [*bundle, "iteration=1"]).solver.model_path == str(moved)


def test_an_iteration_that_a_bundle_does_not_hold_is_refused(moved, machine, capsys):
    assert main(["ask", f"bundle={moved}", "iteration=2", *machine, "Who?"]) == 2
    assert "holds the solver of iteration 1 alone" in capsys.readouterr().err


def test_only_a_bundle_is_replaced_and_a_refused_one_leaves_nothing(make, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert make(tmp_path / "mine") == 2
    assert f"exists and is no bundle (it has no {MANIFEST})" in capsys.readouterr().err
    out = tmp_path / "agent"
    assert make(out) == make(out, "licence=mit") == 0
    assert "license: mit" in (out / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "mine"]


def test_a_chroma_folder_with_other_collections_stays_at_home(make, prepared, tmp_path, capsys):
    chroma = shutil.copytree(prepared.corpus / "chromadb", tmp_path / "chroma")
    private = tmp_path / "private.jsonl"
    private.write_text(json.dumps({"title": "Salaries", "text": "Nobody may read this."}))
    build_index(private, chroma, "salaries", EmbedderSpec("packaged-minilm", "cpu"))
    assert make(tmp_path / "agent", f"chroma.path={chroma}", "with_index=true") == 2
    assert "also holds salaries, which the bundle would carry along" in capsys.readouterr().err
    assert not (tmp_path / "agent").exists()


def test_a_bundle_that_does_not_fit_the_disk_is_refused(make, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=10**6))
    assert make(tmp_path / "agent") == 2
    assert "has 0.00 GB free and the bundle takes 0.0" in capsys.readouterr().err


OTHERS = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.mark.parametrize(
    "token, models, said",
    [
        (TOKEN, None, "does not answer"),
        ("", {}, "set HF_TOKEN to a token that may write there"),
        ("hf_wrong", {}, "Invalid user token"),
        (TOKEN, {"me/agent": OTHERS}, "it holds another model, which is not replaced"),
    ],
)
def test_a_push_that_cannot_be_is_one_line(
    make, hub_with, tmp_path, capsys, monkeypatch, token, models, said
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    if models is None:
        assert make(tmp_path / "agent", "push=me/agent") == 2
    else:
        with hub_with(models) as hub:
            assert make(tmp_path / "agent", "push=me/agent") == 2
            assert hub.models.keys() == models.keys()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("drzero bundle: push=me/agent: ") and said in line and "hf_wrong" not in line


@pytest.mark.parametrize(
    "models, said",
    [
        (None, "does not answer"),
        ({}, "set HF_TOKEN if it is private"),
        ({"me/agent": OTHERS}, "no bundle in it"),
    ],
)
def test_a_pull_that_cannot_be_is_one_line(hub_with, machine, capsys, models, said):
    words = ["ask", "bundle=me/agent", *machine, "Who?"]
    if models is None:
        assert main(words) == 2
    else:
        with hub_with(models) as hub:
            assert main(words) == 2
            assert hub.fetched == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("drzero ask: bundle=me/agent: ") and said in line
