"""The command lines of the README, the docs and the run files, and of the guides that users come from."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_COMMAND = re.compile(r"(?P<env>(?:[A-Z_]+=\S+ )*)(?:modal run (?:--detach )?modal_train\.py|drzero )")

GUIDES = """
modal run modal_train.py --action smoke
modal run modal_train.py --action prepare-data
modal run --detach modal_train.py --action challenger --iteration 1
modal run modal_train.py --action list-models
modal run modal_train.py::train --env demo --steps 100
modal run modal_train.py::train --env demo --steps 50 --gpu-count 1 --gpu-type A100-40GB
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
            whole = re.sub(r" *\\\n *", " ", block)
            texts += [line.removeprefix("$ ") for line in whole.splitlines()]
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


def left_by_a_run() -> list[re.Pattern[str]]:
    """The paths in the trees of docs/files.md; a folder without entries there may hold anything."""
    found = []
    for block in (ROOT / "docs" / "files.md").read_text(encoding="utf-8").split("```")[1::2]:
        entries = [(len(line) - len(line.lstrip()), line.split()[0]) for line in block.splitlines() if line]
        above: dict[int, str] = {}
        for (indent, name), (following, _) in zip(entries, [*entries[1:], (0, "")], strict=True):
            above = {depth: part for depth, part in above.items() if depth < indent} | {indent: name}
            leaf = not name.endswith("/")
            anything = "" if leaf or following > indent else ".+"
            if leaf or anything:
                found.append(re.compile(_template("".join(above.values())) + anything))
    return found


def _template(path: str) -> str:
    """A path's expression: N stands for a number, NAME and other capital words for a name."""
    parts = re.split(r"([A-Z]+)", path)
    return "".join(
        re.escape(part) if not part.isupper() else r"\d+" if set(part) == {"N"} else r"[\w.-]+"
        for part in parts
    )
