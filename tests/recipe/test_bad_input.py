"""Bad input as users bring it: one clear error on stderr, exit code 2, and nothing half-written.

`tests/preflight/broken/` has the findings themselves. These go through the command line.
"""

import json
import shutil

import pytest
from conftest import unused_port

from drzero.cli import main
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.errors import CheckError

MICRO_BATCH = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"


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


@pytest.mark.parametrize(
    ("command", "typed", "expected"),
    [
        (
            "challenger",
            f"data.train_batch_size=6 {MICRO_BATCH}=4 run.min_free_gb=1e6 chroma.collection=papers",
            ["3 errors", "rollout.n = 6 is no multiple of", "4 × 1 = 4", "run.min_free_gb=1e+06", "papers"],
        ),
        ("solver", "data.train_batch_size=4", ["no questions at", "`drzero synthesize iteration=1`"]),
        ("serve-search", "retrieval.embedder=intfloat/e5-large-v2", ["was built with packaged-minilm"]),
    ],
)
def test_a_command_that_cannot_run_is_refused_with_all_errors_and_leaves_nothing(
    capsys, tmp_path, prepared, command, typed, expected
):
    ports = [f"retrieval.port={unused_port()}", f"solver.port={unused_port()}"]
    message = refusal(capsys, command, *prepared.overrides(tmp_path), *ports, *typed.split())
    assert [part for part in expected if part not in message] == []
    assert files_below(tmp_path) == []


SAID = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
EACH = "{% for message in messages %}"
BUT_TOOLS = EACH + "{% if message.role != 'tool' %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
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
