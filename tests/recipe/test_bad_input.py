"""Bad input as users bring it: one clear error on stderr, exit code 2, and nothing half-written.

`tests/preflight/broken/` has the findings themselves. These go through the command line.
"""

import json
import shutil
import socket
from importlib.util import find_spec

import pytest
from conftest import unused_port
from solver_rows import write_questions

from drzero.cli import main
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.errors import CheckError

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
needs_no_sglang = pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed here")


def refusal(capsys, *arguments):
    """The command line's refusal on stderr: one message with every error, no traceback."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert [line.startswith("drzero") for line in said.splitlines()].count(True) == 1
    return said[said.index("drzero") :]


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def prepare(folder, corpus, model):
    """A prepare-data command from a corpus file into an empty folder."""
    choices = ["hardware=cpu", "model=demo-policy", f"base_model={model}", "rows=8", "heldout_rows=0"]
    return ["prepare-data", *choices, f"paths.corpus={folder}", f"source={corpus}"]


def challenger(prepared, folder, *overrides):
    """A challenger command on free ports, so that only the tested part can be wrong."""
    ports = [f"retrieval.port={unused_port()}", f"solver.port={unused_port()}"]
    return ["challenger", *prepared.overrides(folder), "data.train_batch_size=4", *ports, *overrides]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no documents"),
        ('{"text": "one"}\n{"text": "two"}\nthree\n', "line 3: not JSON"),
        ('{"text": "one"}\n{"title": "two"}\n', "line 2: no text"),
        (None, "no corpus at"),
    ],
    ids=["empty", "not JSON", "no text", "missing"],
)
def test_a_bad_corpus_is_refused_with_its_line_and_leaves_nothing(
    capsys, tmp_path, tiny_model, text, expected
):
    corpus, target = tmp_path / "bad.jsonl", tmp_path / "corpus"
    if text is not None:
        corpus.write_text(text)
    message = refusal(capsys, *prepare(target, corpus, tiny_model))
    assert expected in message and str(corpus) in message
    assert not target.exists() or files_below(target) == []


def test_an_index_of_other_content_is_left_alone_unless_it_is_to_be_replaced(capsys, tmp_path, prepared):
    shutil.copytree(prepared.corpus / "chromadb", tmp_path / "corpus" / "chromadb")
    before = files_below(tmp_path / "corpus")
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "other"}))
    message = refusal(capsys, *prepare(tmp_path / "corpus", tmp_path / "other.jsonl", prepared.model))
    assert "collection 'corpus'" in message and "exists already and is of other content" in message
    assert files_below(tmp_path / "corpus") == before


CHALLENGER = {
    "another embedder": (
        ["retrieval.embedder=intfloat/e5-large-v2"],
        ["was built with packaged-minilm", "set retrieval.embedder=packaged-minilm"],
    ),
    "no index": (["chroma.path={tmp}/none"], ["no Chroma folder at {tmp}/none"]),
    "no prompts": (
        ["data.train_files={tmp}/none.parquet"],
        ["no prompts at {tmp}/none.parquet (data.train_files)", "`drzero prepare-data`"],
    ),
    "retrieval's port": (["retrieval.port={taken}"], ["port {taken} on 127.0.0.1 is taken by pid "]),
    "solver's port": (["solver.port={taken}"], ["port {taken} on 127.0.0.1 is taken by pid "]),
    "one port for both": (["retrieval.port={free}", "solver.port={free}"], ["both {free}"]),
    "indivisible batch": (
        ["data.train_batch_size=6", f"{MICRO_BATCH}=4"],
        ["data.train_batch_size × rollout.n = 6 is no multiple of", "4 × 1 = 4"],
    ),
    "an asynchronous mode": (["mode=colocate_async"], ["HRPO is on-policy: use mode=sync, or set allow_off"]),
    "every fault": (
        ["data.train_batch_size=6", f"{MICRO_BATCH}=4", "run.min_free_gb=1e6", "chroma.collection=papers"],
        ["3 errors", "is no multiple of", "run.min_free_gb=1e+06 are required", "papers"],
    ),
}


@pytest.mark.parametrize("name", [*CHALLENGER, pytest.param("no SGLang", marks=needs_no_sglang)])
def test_a_challenger_that_cannot_run_is_refused_and_leaves_nothing(capsys, tmp_path, prepared, name):
    overrides, expected = CHALLENGER.get(name, (["solver.engine=sglang"], ["SGLang"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        places = {"tmp": tmp_path, "taken": listener.getsockname()[1], "free": unused_port()}
        typed = [override.format(**places) for override in overrides]
        message = refusal(capsys, *challenger(prepared, tmp_path / "ck", *typed))
    assert [part for part in expected if part.format(**places) not in message] == []
    assert not (tmp_path / "ck").exists()


def test_serving_a_collection_built_with_another_embedder_is_refused(capsys, tmp_path, prepared):
    places = [f"paths.corpus={prepared.corpus}", f"paths.checkpoints={tmp_path}"]
    wrong = "retrieval.embedder=intfloat/e5-large-v2"
    message = refusal(capsys, "serve-search", "hardware=cpu", *places, wrong)
    assert "was built with packaged-minilm" in message and files_below(tmp_path) == []


@pytest.mark.parametrize("place", ["a file", "/proc"])
def test_a_run_folder_that_cannot_be_written_is_refused_before_anything_starts(
    capsys, tmp_path, prepared, place
):
    (tmp_path / "a file").write_text("")
    message = refusal(capsys, *challenger(prepared, tmp_path / place / "ck"))
    assert f"run.dir: {tmp_path / place / 'ck' / 'tiny'} cannot be written" in message
    assert "paths.checkpoints=" in message
    assert files_below(tmp_path) == ["a file"]


SAID = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
EACH = "{% for message in messages %}"
BUT_TOOLS = EACH + "{% if message.role != 'tool' %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "does not render tools"),
        ("{{ tools }}{{ raise_exception('no system role') }}", "no system role"),
        ("{{ tools }}{{ messages[0].content }}", "leaves out what an assistant says"),
        (f"{{{{ tools }}}}{BUT_TOOLS}{SAID}{{% endif %}}{{% endfor %}}", "does not render tool responses"),
        (
            f"{{{{ tools }}}}{{{{ messages | length }}}}{EACH}{SAID}{{% endfor %}}",
            "]4<|im_start|>system\\ntext<|im_end|>\\n<|im_start|>user\\nWho?' in place of '}}}]2<|im_start|>",
        ),
        (None, "chat_template is not set"),
        ("another family's", "writes '<|im_end|>\\n' after an assistant's text, which is no special token"),
    ],
)
def test_a_model_that_cannot_hold_our_conversations_is_refused(tmp_path, tiny_model, template, expected):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors"))
    if template is None:
        (model / "chat_template.jinja").unlink()
    elif template == "another family's":
        for path in model.glob("*.json"):
            path.write_text(path.read_text().replace("<|im_end|>", "<|eot_id|>"))
    else:
        (model / "chat_template.jinja").write_text(template)
    with pytest.raises(CheckError, match=r"base_model: the model at .* cannot hold") as refused:
        load_chat_tokenizer(str(model), "base_model")
    assert expected in str(refused.value)


def test_a_training_run_of_such_a_model_is_refused_with_its_key(capsys, tmp_path, prepared):
    model = tmp_path / "model"
    shutil.copytree(prepared.model, model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    message = refusal(capsys, *challenger(prepared, tmp_path / "ck", f"solver.model_path={model}"))
    assert f"solver.model_path: the model at {model} cannot hold" in message
    assert not (tmp_path / "ck").exists()


SOLVER = {
    "data.train_files={tmp}/none.parquet": [
        "no questions at {tmp}/none.parquet (data.train_files)",
        "`drzero synthesize iteration=1`",
    ],
    "data.train_files={prompts}": [
        "{prompts} (data.train_files): 60 of 60 rows have no answer",
        "challenger prompts?",
    ],
    "data.train_batch_size=8": ["has 4 rows, less than one batch"],
    "iteration=2": ["solver_iter1_hf, neither a folder nor on a reachable hub"],
}


@pytest.mark.parametrize("overrides", SOLVER)
def test_a_solver_run_that_cannot_go_well_is_refused(capsys, tmp_path, prepared, overrides):
    write_questions(tmp_path, 4, 4)
    train, val = (tmp_path / "synthesize_iter1" / f"{name}.parquet" for name in ("train", "val"))
    places = {"tmp": tmp_path, "prompts": prepared.corpus / "data" / "zero_ratio4321.parquet"}
    common = ["data.train_batch_size=4", f"retrieval.port={unused_port()}"]
    files = [f"data.train_files={train}", f"data.val_files={val}"]
    typed = overrides.format(**places).split()
    message = refusal(capsys, "solver", *prepared.overrides(tmp_path), *common, *files, *typed)
    assert [part for part in SOLVER[overrides] if part.format(**places) not in message] == []
    assert not (tmp_path / "tiny").exists()
