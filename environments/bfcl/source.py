"""BFCL's tasks: as the package `bfcl-eval` has them, or from a file of the user's own in the same form.

    tasks("live_simple")                       # of the package, with their answers
    tasks_of_file("calls.jsonl", "train", check)   # one JSON object a line

The package carries all questions and answers, and is installed without what it depends on: it wants numpy
1.26.4.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from drzero.ops.errors import UserError
from drzero.ops.files import open_regular
from drzero.ops.versions import pinned
from environments.fault import EnvironmentUnusable
from environments.row import Split

Task: TypeAlias = Mapping[str, Any]
"""A question as BFCL has it (`id`, `question`, `function` or `involved_classes`, …), with its `category` and
its `ground_truth`, None where its category has none."""

_PREFIX = "BFCL_v4_"


class MissingPackage(EnvironmentUnusable):
    """The package `bfcl-eval` is not installed."""


def package_folder() -> Path:
    """Where the package is; raises MissingPackage, which says how it is installed."""
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise MissingPackage(
            "BFCL's data is in the package bfcl-eval, which is not installed: run `make setup`, or `uv pip "
            f"install --no-deps bfcl-eval=={pinned('bfcl-eval')}` (without --no-deps it replaces numpy)"
        )
    return Path(spec.origin).parent


def tasks(category: str) -> list[Task]:
    """The tasks of a category in the package's order; raises MissingPackage."""
    data = package_folder() / "data"
    name = f"{_PREFIX}{category}.json"
    questions, answers = read_lines(data / name), data / "possible_answer" / name
    known = {line["id"]: line["ground_truth"] for line in read_lines(answers)} if answers.is_file() else {}
    return [{**task, "category": category, "ground_truth": known.get(task["id"])} for task in questions]


def tasks_of_file(path: str | Path, split: Split, check: Callable[[Task], str | None]) -> list[Task]:
    """The tasks of the user's file that are of the split: those without a field `split` are for training.

    Every line has `id`, `question`, `ground_truth`, and what `check` wants, which says what is wrong.
    Raises EnvironmentUnusable with the line that is no task, or whose id another one has.
    """
    found: dict[str, Task] = {}
    for number, task in enumerate(read_lines(Path(path)), 1):
        wrong = _wrong(task) or check(task)
        if wrong is None and task["id"] in found:
            wrong = f"the id {task['id']!r} is that of an earlier task"
        if wrong is not None:
            raise EnvironmentUnusable(f"{path}, task {number}: {wrong} (docs/environments.md has the form)")
        found[task["id"]] = {**task, "category": task["id"].rpartition("_")[0]}
    return [task for task in found.values() if task.get("split", "train") == split]


def _wrong(task: Any) -> str | None:
    """What is wrong with a line of the user's file, whatever environment it is for; None if nothing is."""
    if not isinstance(task, dict):
        return "a task is a JSON object"
    for name in ("id", "question", "ground_truth"):
        if name not in task:
            return f"there is no {name!r}"
    if not isinstance(task["id"], str):
        return f"the id is a text, not {task['id']!r}"
    if task.get("split", "train") not in ("train", "eval"):
        return f'split is "train" or "eval", not {task["split"]!r}'
    turns = task["question"]
    if not (isinstance(turns, list) and turns and all(map(_is_turn, turns)) and turns[0]):
        return '"question" is a list of turns, each a list of messages with "role" and "content"'
    if not isinstance(task["ground_truth"], list):
        return '"ground_truth" is a list'
    return None


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in turn
    )


def read_lines(path: Path) -> list[Any]:
    """The JSON values of a file, one a line; raises EnvironmentUnusable with what cannot be read."""
    try:
        with open_regular(path) as file:
            return [_json(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise EnvironmentUnusable(f"{path} cannot be read: {error.strerror or error}") from error


def _json(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EnvironmentUnusable(f"{path}, line {number}: no JSON ({error})") from error


def chosen(
    split: Split, trained: Sequence[str], held_out: Sequence[str], wanted: Sequence[str] | None
) -> list[str]:
    """The categories of a split, only those `wanted` if any are named; raises UserError for any other name.

    It is a test set: none of what is held out is ever trained on, whatever is asked for.
    """
    every = trained if split == "train" else held_out
    if wanted is None:
        return list(every)
    if unknown := [name for name in wanted if name not in (*trained, *held_out)]:
        raise UserError(
            f"categories: BFCL has no {unknown[0]!r} here; trained on are {', '.join(trained)}; held out for "
            f"evaluation {', '.join(held_out)}"
        )
    mine = [name for name in every if name in wanted]
    if not mine:
        use = "training has" if split == "train" else "evaluation has"
        raise UserError(f"categories: none of {', '.join(wanted)} is for this: {use} {', '.join(every)}")
    return mine


def question_key(task: Task) -> str:
    """A task's questions without case, spaces and punctuation: equal for two tasks that ask the same."""
    said = " ".join(message["content"] for turn in task["question"] for message in turn)
    return re.sub(r"\W+", " ", said.lower()).strip()


def sample(found: Iterable[Task], n: int | None, seed: int) -> list[Task]:
    """`n` of them, or all, in an order that the seed decides."""
    shuffled = list(found)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:n]
