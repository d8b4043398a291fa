"""A taskset of the library as an environment: its tasks are rows, its config fields are options.

Evaluation has the tasks with the option `evaluation`, such as `{split: test}`, else every tenth task, or
every second one of an endless taskset. The library's default program would run commands in a sandbox. Here
an agent only talks and calls its task's tools, and a taskset that needs more is refused.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields

from environments.episode import Episode
from environments.fault import EnvironmentUnusable, one_line
from environments.row import Row, Split
from environments.taskset import Taskset
from environments.verifiers.installed import taskset_module
from environments.verifiers.plugins import GAMES, HARNESS

WITHOUT_END = 256  # rows of an endless taskset when all are requested
_TALKS = ("bash", "null")  # programs that ours replaces: the default one, and the plain conversation


class VerifiersTaskset(Taskset):
    """One taskset of the library."""

    player = "drzero.players.verifiers.player:play"

    def __init__(
        self,
        name: str,
        *,
        max_turns: int = 32,
        timeout_s: float = 120.0,
        solved_at: float = 1.0,
        evaluation: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        """`solved_at` is the least reward of a solved task. `config` has the taskset's own fields."""
        self.name = f"verifiers:{name}"
        if not isinstance(solved_at, int | float):
            raise EnvironmentUnusable(f"{self.name}: solved_at is a reward, a number, not {solved_at!r}")
        self.max_turns, self.timeout_s, self.solved_at = max_turns, timeout_s, solved_at
        self._id = _known_as(name, config)
        self._options: dict[Split, dict[str, Any]] = {
            "train": config,
            "eval": config if evaluation is None else {**config, **evaluation},
        }
        self._apart = evaluation is not None
        self.held_out = (
            "the tasks of the taskset's config for evaluation" if self._apart else "every tenth task"
        )
        self._tasksets = {split: self._loaded(split) for split in self._options}
        if not self._apart and not self._tasksets["train"].bounded:
            self.held_out = "every second task"

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """Tasks of the split, shuffled by the seed unless the taskset is endless."""
        try:
            return self._rows(split, n, seed)
        # Another project's loader may raise anything.
        except Exception as error:
            raise EnvironmentUnusable(f"{self.name} gives no tasks: {one_line(error)}") from error

    def episode(self, row: Row) -> Episode:
        """Never called, since the library plays."""
        raise NotImplementedError(f"{self.name} is played by {self.player}")

    def task(self, row: Row) -> Any:
        """The library's task of a row."""
        taskset = self._tasksets[row.data["split"]]
        kind = type(taskset).task_type()
        return kind(kind.data_type().model_validate(row.data["task"]), taskset.config.task)

    def environment(self, row: Row) -> Any:
        """A new environment of the library for the row's split, with our harness for every seat."""
        return vf.load_environment(self._environment_config(row.data["split"]))

    def _rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        taskset = self._tasksets[split]
        tasks = self._of_split(split, taskset)
        if not taskset.bounded:
            return [_row(split, task) for task in itertools.islice(tasks, n or WITHOUT_END)]
        shuffled = list(tasks)
        random.Random(seed).shuffle(shuffled)
        return [_row(split, task) for task in shuffled[:n]]

    def _loaded(self, split: Split) -> Any:
        taskset = vf.load_taskset(self._environment_config(split).taskset)
        if type(taskset).task_type().NEEDS_CONTAINER:
            raise EnvironmentUnusable(f"{self.name}: its tasks need a container, which nothing here starts")
        return taskset

    def _environment_config(self, split: Split) -> Any:
        ours = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": self.max_turns}
        options = {"id": self._id, **self._options[split]}
        try:
            seats = agent_config_fields(vf.env_config_type(self._id)(taskset=options))
            self._require_conversations(seats)
            return vf.resolve_env_config({"taskset": options, **dict.fromkeys(seats, ours)})
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise EnvironmentUnusable(
                f"{self.name} does not take these options: {' '.join(wrong.split())}"
            ) from error

    def _require_conversations(self, seats: Mapping[str, Any]) -> None:
        for seat, agent in seats.items():
            program = agent.harness.id if agent.harness is not None else vf.default_harness_id(self._id)
            if program not in _TALKS:
                raise EnvironmentUnusable(
                    f"{self.name}: its seat {seat!r} is played by {program!r}, which needs a sandbox: "
                    "here an agent talks and calls the tools of its task, and no more"
                )

    def _of_split(self, split: Split, taskset: Any) -> Iterator[Any]:
        every = 10 if taskset.bounded else 2
        for index, task in enumerate(taskset):
            if self._apart or (index % every == every - 1) == (split == "eval"):
                yield task


def _row(split: Split, task: Any) -> Row:
    data = task.data.model_dump(mode="json")
    return Row(f"{split}-{task.data.idx}", {"split": split, "task": data})


def _known_as(name: str, config: Mapping[str, Any]) -> str:
    """The id by which the library imports a taskset, or our one for a game it does not list."""
    module = taskset_module(name)
    if module.__name__ != "verifiers.v1.tasksets.textarena":
        return module.__name__.rpartition(".")[2]
    listed = vf.taskset_config_type("textarena").model_fields["game"].annotation
    return "textarena" if config.get("game") in (None, *get_args(listed)) else GAMES
