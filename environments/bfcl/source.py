"""BFCL's tasks: from the package `bfcl-eval` without its dependencies, or from a file in the same format."""

import json
import random
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from drzero.ops.errors import UserError
from drzero.ops.files import open_regular
from drzero.ops.versions import pinned
from environments.fault import EnvironmentUnusable
from environments.row import Row, Split
from environments.taskset import Taskset

Task: TypeAlias = Mapping[str, Any]
"""A question in BFCL's form, with its `category` and `ground_truth` (None in categories without one)."""

_PREFIX = "BFCL_v4_"


def package_folder() -> Path:
    """The package's folder. Raises EnvironmentUnusable with the command that installs it."""
    spec = find_spec("bfcl_eval")
    if spec is None or spec.origin is None:
        raise EnvironmentUnusable(
            "BFCL's data is in the package bfcl-eval, which is not installed: run `make setup`, or `uv pip "
            f"install --no-deps bfcl-eval=={pinned('bfcl-eval')}` (without --no-deps it replaces numpy)"
        )
    return Path(spec.origin).parent


def tasks(category: str) -> list[Task]:
    """The tasks of a category in the package's order. Raises EnvironmentUnusable."""
    data = package_folder() / "data"
    name = f"{_PREFIX}{category}.json"
    questions, answers = read_lines(data / name), data / "possible_answer" / name
    known = {line["id"]: line["ground_truth"] for line in read_lines(answers)} if answers.is_file() else {}
    return [{**task, "category": category, "ground_truth": known.get(task["id"])} for task in questions]


def tasks_of_file(path: str | Path, split: Split, check: Callable[[Task], str | None]) -> list[Task]:
    """Read a split, by default train. `check` returns further faults. Raises EnvironmentUnusable."""
    found: dict[str, Task] = {}
    for number, task in enumerate(read_lines(Path(path)), 1):
        wrong = _wrong(task) or check(task)
        if wrong is None and task["id"] in found:
            wrong = f"an earlier task has the id {task['id']!r} too"
        if wrong is not None:
            raise EnvironmentUnusable(f"{path}, task {number}: {wrong} (docs/environments.md has the form)")
        found[task["id"]] = {**task, "category": task["id"].rpartition("_")[0]}
    return [task for task in found.values() if task.get("split", "train") == split]


def _wrong(task: Any) -> str | None:
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
    """The JSON values of a file, one a line. Raises EnvironmentUnusable for anything else."""
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


def question_key(task: Task) -> str:
    """A task's questions without case, spaces and punctuation, to find repeated ones."""
    said = " ".join(message["content"] for turn in task["question"] for message in turn)
    return re.sub(r"\W+", " ", said.lower()).strip()


class BfclTaskset(Taskset):
    """Rows of the package's categories, or of the user's file."""

    filters_groups = True
    trained: ClassVar[tuple[str, ...]]
    evaluated: ClassVar[tuple[str, ...]]  # categories. BFCL is a test set: these are never trained on

    def __init__(self, categories: Sequence[str] | None = None, file: str | None = None) -> None:
        """`categories` narrows the splits. `file` replaces them."""
        self._categories, self._file = categories, file

    @abstractmethod
    def file_fault(self, task: Task) -> str | None:
        """The fault of a task in the user's file, or None."""

    @abstractmethod
    def of_split(self, split: Split, found: list[Task]) -> list[Task]:
        """The package's tasks, except any of the other split."""

    @abstractmethod
    def row(self, task: Task) -> Row:
        """A task as a row."""

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """Tasks of the split, shuffled by the seed."""
        if self._file is not None:
            found = tasks_of_file(self._file, split, self.file_fault)
        else:
            found = self.of_split(split, [task for name in self._chosen(split) for task in tasks(name)])
        random.Random(seed).shuffle(found)
        return [self.row(task) for task in found[:n]]

    def _chosen(self, split: Split) -> list[str]:
        """The wanted categories of a split. Raises UserError for any other name."""
        every = self.trained if split == "train" else self.evaluated
        if self._categories is None:
            return list(every)
        if unknown := [name for name in self._categories if name not in (*self.trained, *self.evaluated)]:
            raise UserError(
                f"categories: BFCL has no {unknown[0]!r} here; trained on are {', '.join(self.trained)}; "
                f"held out for evaluation {', '.join(self.evaluated)}"
            )
        if mine := [name for name in every if name in self._categories]:
            return mine
        use = "training has" if split == "train" else "evaluation has"
        wanted = ", ".join(self._categories)
        raise UserError(f"categories: none of {wanted} is for this: {use} {', '.join(every)}")
