"""Bad input as a user brings it: one clear error, exit code 2, and nothing half-written."""

import json
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import Prepared, unused_port
from solver_rows import write_questions

from drzero.cli import main
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.errors import CheckError

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the CLI says on stderr when it refuses: one message with every error, no traceback."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert [line.startswith("drzero") for line in said.splitlines()].count(True) == 1
    return said[said.index("drzero") :]


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def prepare(folder: Path, corpus: Path, model: Path) -> list[str]:
    """A prepare-data command from a corpus file into an empty folder."""
    return [
        "prepare-data",
        *("hardware=cpu", "model=demo-policy", f"base_model={model}"),
        *(f"paths.corpus={folder}", f"source={corpus}", "rows=8", "heldout_rows=0"),
    ]


def challenger(prepared: Prepared, folder: Path, *overrides: str) -> list[str]:
    """A challenger command on free ports, so that only what is tested can be wrong."""
    ports = [f"retrieval.port={unused_port()}", f"solver.port={unused_port()}"]
    return ["challenger", *prepared.overrides(folder), "data.train_batch_size=4", *ports, *overrides]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no documents"),
        ('{"text": "one"}\n{"text": "two"}\nthree\n', "line 3: not JSON"),
        ('{"text": "one"}\n{"title": "two"}\n', "line 2: no text"),
    ],
    ids=["empty", "not JSON", "no text"],
)
def test_a_bad_corpus_is_refused_with_its_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path, text: str, expected: str
) -> None:
    corpus, target = tmp_path / "bad.jsonl", tmp_path / "corpus"
    corpus.write_text(text)
    message = refusal(capsys, *prepare(target, corpus, tiny_model))
    assert expected in message and str(corpus) in message
    assert not target.exists() or files_below(target) == []


def test_a_corpus_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path
) -> None:
    message = refusal(capsys, *prepare(tmp_path / "corpus", tmp_path / "none.jsonl", tiny_model))
    assert f"no corpus at {tmp_path / 'none.jsonl'}" in message


def test_a_collection_built_with_another_embedder_is_refused_with_the_right_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    wrong = "retrieval.embedder=intfloat/e5-large-v2"
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", wrong))
    assert "was built with packaged-minilm" in message
    assert "set retrieval.embedder=packaged-minilm" in message
    assert not (tmp_path / "ck").exists()


def test_serving_a_collection_built_with_another_embedder_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    message = refusal(
        capsys,
        *("serve-search", "hardware=cpu", f"paths.corpus={prepared.corpus}", f"paths.checkpoints={tmp_path}"),
        "retrieval.embedder=intfloat/e5-large-v2",
    )
    assert "was built with packaged-minilm" in message and files_below(tmp_path) == []


def test_an_index_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"chroma.path={tmp_path / 'none'}"))
    assert f"no Chroma folder at {tmp_path / 'none'}" in message
    assert not (tmp_path / "ck").exists()


def test_missing_prompts_are_refused_with_the_command_that_makes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    missing = tmp_path / "none.parquet"
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"data.train_files={missing}"))
    assert f"no prompts at {missing} (data.train_files)" in message and "`drzero prepare-data`" in message
    assert not (tmp_path / "ck").exists()


def test_prompts_longer_than_the_limit_are_refused_with_the_longest_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", "data.max_prompt_length=60"))
    assert "of 60 prompts in" in message and "longer than data.max_prompt_length=60 tokens (row " in message
    assert not (tmp_path / "ck").exists()


def test_fewer_prompts_than_a_batch_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", "data.train_batch_size=64"))
    assert "has 60 rows, less than one batch (data.train_batch_size=64)" in message
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("service", ["retrieval", "solver"])
def test_a_port_that_is_taken_is_refused_with_its_holder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared, service: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"{service}.port={port}"))
    assert f"port {port} on 127.0.0.1 is taken by pid " in message
    assert not (tmp_path / "ck").exists()


def test_a_batch_that_does_not_divide_is_refused_with_both_sides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    sizes = ["data.train_batch_size=6", f"{MICRO_BATCH}=4"]
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", *sizes))
    assert "data.train_batch_size × rollout.n = 6 is no multiple of" in message and "4 × 1 = 4" in message
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_an_asynchronous_challenger_is_refused_as_off_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared, mode: str
) -> None:
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"mode={mode}"))
    assert "HRPO is on-policy: use mode=sync, or set allow_off_policy=true" in message
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("key", ["base_model", "actor_rollout_ref.model.path", "solver.model_path"])
def test_a_model_folder_that_is_not_there_is_refused_with_its_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared, key: str
) -> None:
    missing = tmp_path / "no_model"
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"{key}={missing}"))
    assert f"{key}: there is no model at {missing}" in message
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token": "<|eot_id|>"}, "has no <|im_end|>"),
        ({"chat_template": "{{ messages[0].content }}"}, "does not render tools"),
        ({"chat_template": "{{ tools }}{{ raise_exception('no system role') }}"}, "no system role"),
        ({"chat_template": "{{ tools }}{{ messages[0].content }}"}, "does not render tool responses"),
        ({"chat_template": "{{ tools }}{{ messages | length }}"}, "rewrites earlier turns"),
        ({"chat_template": None}, "chat_template is not set"),
    ],
    ids=["other family", "no tools", "no system role", "no tool responses", "rewriting", "no template"],
)
def test_a_model_that_cannot_hold_our_conversations_is_refused(
    tmp_path: Path, tiny_model: Path, changes: dict[str, str | None], expected: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    if "chat_template" in changes:
        (model / "chat_template.jinja").unlink()
        if changes["chat_template"] is not None:
            (model / "chat_template.jinja").write_text(changes["chat_template"])
    if "token" in changes:
        for path in model.glob("*.json"):
            path.write_text(path.read_text().replace("<|im_end|>", changes["token"] or ""))
    with pytest.raises(CheckError, match=r"base_model: the model at .* cannot hold") as refused:
        load_chat_tokenizer(str(model), "base_model")
    assert expected in str(refused.value)


@pytest.mark.parametrize("key", ["base_model", "solver.model_path"])
def test_a_training_run_of_such_a_model_is_refused_with_its_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared, key: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(prepared.model, model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"{key}={model}"))
    assert f"{key}: the model at {model} cannot hold" in message
    assert not (tmp_path / "ck").exists()


def test_a_chat_models_tokenizer_is_taken(tiny_model: Path) -> None:
    assert load_chat_tokenizer(str(tiny_model), "base_model").name_or_path == str(tiny_model)


def test_prompts_that_are_no_training_rows_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"data.train_files={broken}"))
    assert str(broken) in message
    assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize(("typed", "meant"), [("challanger", "challenger"), ("prepare_data", "prepare-data")])
def test_an_unknown_command_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert main([typed]) == 2
    assert f"no command {typed!r} (did you mean {meant!r}?)" in capsys.readouterr().err


def test_an_index_of_other_content_is_left_alone_unless_it_is_to_be_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    shutil.copytree(prepared.corpus / "chromadb", tmp_path / "corpus" / "chromadb")
    before = files_below(tmp_path / "corpus")
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "other"}))
    message = refusal(capsys, *prepare(tmp_path / "corpus", tmp_path / "other.jsonl", prepared.model))
    assert "collection 'corpus'" in message and "exists already and is of other content" in message
    assert files_below(tmp_path / "corpus") == before


def test_one_port_for_both_services_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    port = unused_port()
    arguments = challenger(prepared, tmp_path, f"retrieval.port={port}", f"solver.port={port}")
    assert f"both {port}" in refusal(capsys, *arguments)


def test_several_updates_a_batch_are_refused_for_hrpo(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    message = refusal(capsys, *challenger(prepared, tmp_path, "actor_rollout_ref.actor.ppo_epochs=2"))
    assert "allow_off_policy" in message


def test_prompts_worded_for_another_kind_of_model_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    assert "prompts.form=full" in refusal(capsys, *challenger(prepared, tmp_path, "prompts.form=full"))


def test_a_folder_with_another_runs_checkpoint_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    (run / "resolved.yaml").write_text("base_model: elsewhere")
    message = refusal(capsys, *challenger(prepared, tmp_path, f"run.dir={run}"))
    assert "elsewhere" in message and "run.name" in message


def test_a_profile_that_needs_sglang_says_so_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    if find_spec("sglang") is not None:
        pytest.skip("SGLang is installed here")
    assert "SGLang" in refusal(capsys, *challenger(prepared, tmp_path, "solver.engine=sglang"))


@pytest.mark.parametrize("place", ["a file", "/proc"])
def test_a_run_folder_that_cannot_be_written_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared, place: str
) -> None:
    """A file where a folder should be, and a file system that takes no files from anyone."""
    (tmp_path / "a file").write_text("")
    message = refusal(capsys, *challenger(prepared, tmp_path / place / "ck"))
    assert f"run.dir: {tmp_path / place / 'ck' / 'tiny'} cannot be written" in message
    assert "paths.checkpoints=" in message
    assert files_below(tmp_path) == ["a file"]


def test_a_disk_without_room_is_refused_with_what_is_wanted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", "run.min_free_gb=1000000"))
    assert str(tmp_path / "ck" / "tiny") in message and "run.min_free_gb=1e+06 are required" in message
    assert files_below(tmp_path) == []


def solver(prepared: Prepared, folder: Path, *overrides: str) -> list[str]:
    """A solver command with four questions where synthesize puts them."""
    questions = folder / "synthesize_iter1"
    if not questions.exists():
        write_questions(folder, 4, 4)
    ports = [f"retrieval.port={unused_port()}"]
    return ["solver", *prepared.overrides(folder), "data.train_batch_size=4", *ports, *overrides]


def test_questions_that_are_not_there_are_refused_with_the_stage_that_makes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    arguments = solver(prepared, tmp_path)
    path = tmp_path / "synthesize_iter1" / "train.parquet"
    path.unlink()
    message = refusal(capsys, *arguments)
    assert f"no questions at {path} (data.train_files)" in message
    assert "`drzero synthesize iteration=1`" in message
    assert not (tmp_path / "tiny").exists()


def test_every_fault_is_reported_not_only_the_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    faults = [
        "data.train_batch_size=6",
        f"{MICRO_BATCH}=4",
        "run.min_free_gb=1000000",
        "chroma.collection=papers",
    ]
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", *faults))
    for part in ("3 errors", "is no multiple of", "run.min_free_gb", "papers"):
        assert part in message


def test_challenger_prompts_are_no_questions_for_a_solver(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    prompts = prepared.corpus / "data" / "zero_ratio4321.parquet"
    message = refusal(capsys, *solver(prepared, tmp_path, f"data.train_files={prompts}"))
    assert f"{prompts} (data.train_files): 60 of 60 rows have no answer" in message
    assert "challenger prompts?" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_size=8", "has 4 rows, less than one batch"),
        ("data.max_prompt_length=20", "4 of 4 prompts in"),
        ("prompts.form=full", "not worded for this run (prompts.form=full, 5 turns)"),
        ("mode=colocate_async", "no partial rollouts: use mode=sync"),
        ("iteration=2", "solver_iter1_hf, neither a folder nor on a reachable hub"),
        ("run.min_free_gb=1000000", "run.min_free_gb=1e+06 are required"),
    ],
    ids=["too few", "too long", "worded otherwise", "asynchronous", "no export", "no room"],
)
def test_a_solver_run_that_cannot_go_well_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared, override: str, expected: str
) -> None:
    files = [f"data.{name}_files={tmp_path}/synthesize_iter1/{name}.parquet" for name in ("train", "val")]
    message = refusal(capsys, *solver(prepared, tmp_path, *files, override))
    assert expected in message
    assert not (tmp_path / "tiny").exists()


def test_questions_without_a_column_are_refused_with_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, prepared: Prepared
) -> None:
    arguments = solver(prepared, tmp_path)
    path = tmp_path / "synthesize_iter1" / "train.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["reward_model"]), path)
    assert f"{path} lacks the columns reward_model" in refusal(capsys, *arguments)
