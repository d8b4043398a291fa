"""The command lines of the README, the docs and the run files, and of the guides that users come from."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
_COMMAND = re.compile(r"(?P<env>(?:[A-Z_]+=\S+ )*)(?:modal run (?:--detach )?modal_train\.py|drzero )")

GUIDES = """
modal run modal_train.py --action smoke
modal run modal_train.py --action prepare-data
modal run --detach modal_train.py --action challenger --iteration 1
modal run modal_train.py --action list-models
modal run modal_train.py::train --env demo --steps 200
modal run modal_train.py::train --env demo --steps 150 --gpu-count 1 --gpu-type A100-40GB
modal run modal_train.py::evaluate --env demo --model Qwen/Qwen2.5-0.5B-Instruct --num-examples 50
modal run modal_train.py::evaluate --env demo --model Qwen/Qwen2.5-0.5B-Instruct
modal run modal_train.py::train --config-path config/runs/challenger_a100.yaml
modal run modal_train.py::train --config-path config/runs/demo_t4.yaml --env demo
modal run modal_train.py::train_with_config --config-path config/runs/challenger_a100.yaml
modal run modal_train.py::train --config-path config/runs/challenger_a100.yaml --env demo
modal run modal_train.py::train --config-path config/runs/challenger_a100.yaml --steps 100
EXPERIMENTER=alice EXPERIMENT_NAME=v1 modal run modal_train.py::train --config-path config/runs/demo_t4.yaml
"""
"""Those of the two guides, with this project's file, environments and run files in place of theirs."""


@dataclass(frozen=True)
class Line:
    """One command line."""

    text: str
    words: tuple[str, ...]
    """From `modal` or `drzero` on."""
    env: dict[str, str] = field(default_factory=dict, hash=False)


def lines(program: str) -> list[Line]:
    """All different command lines of `modal` or of `drzero`; those with placeholders are left out."""
    texts = GUIDES.splitlines()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        parts = path.read_text(encoding="utf-8").split("```")
        for block in parts[1::2]:
            texts += [line.removeprefix("$ ") for line in block.splitlines()]
        for prose in parts[::2]:
            spans = re.findall(r"`([^`]+)`", " ".join(prose.split()))
            texts += [f"modal run modal_train.py{span}" if span.startswith("::") else span for span in spans]
    for path in (ROOT / "config" / "runs").glob("*.yaml"):
        texts += [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = (_line(text) for text in dict.fromkeys(texts))
    return [line for line in found if line is not None and line.words[0] == program]


def _line(text: str) -> Line | None:
    command = _COMMAND.search(text)
    if command is None or (command.start() and not text.startswith("DRZERO_STOP_AT=")):
        return None
    words = shlex.split(text[command.end("env") :], comments=True)
    is_template = any(word == "…" or (word.isalpha() and word.isupper()) or word[0] == "[" for word in words)
    is_output = words[1].endswith(":")
    if is_template or is_output:
        return None
    settings = (setting.partition("=") for setting in command["env"].split())
    return Line(" ".join(words), tuple(words), {name: value for name, _, value in settings})
