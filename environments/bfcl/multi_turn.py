"""`bfcl-multi-turn`: a user with several requests, and tools that change a file system, a car, an account.

    taskset = load()
    taskset = load(categories=["multi_turn_miss_func"])

The model calls tools, reads their answers, and ends its part of a user's turn with a turn without calls; the
user then says what is next. The reward is the share of the user's turns that were right before the first
wrong one, at which the episode ends; `success` is what BFCL counts: all of them.

The four categories tell the same 200 stories: with all that is needed, with a tool or a value that comes
late, with long answers. Training has 150 of them as `multi_turn_base`; evaluation the other 50 in all four
categories, three of which training never sees. The remaining 450 tasks are in neither.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from environments.bfcl.replay import CLASSES, Replay, documents, literal_call
from environments.bfcl.schema import to_tool
from environments.bfcl.source import Task, chosen, package_folder, sample, tasks, tasks_of_file
from environments.call import Call, ToolSchema, badly_typed, tool_name
from environments.conversation import Message, Turn, tool_message, user_message
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score
from environments.taskset import Taskset

TRAINED = ("multi_turn_base",)
HELD_OUT = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
HELD_OUT_STORIES = 4
"""Every fourth story is held out: they are ordered by what they are about."""
MOST_STEPS = 20
"""Turns with calls within one of the user's, as in the package: a model that needs more has failed."""
NEW_TOOLS = "I have updated some more functions you can choose from. What about now?"
"""What the package's user says when a tool that was missing is there."""


class MultiTurn(Taskset):
    """Rows of the package's categories, or of a file."""

    max_turns = 8 * (MOST_STEPS + 1)
    filters_groups = True
    held_out = (
        "Every fourth of BFCL's 200 stories, in all four categories, three of which (miss_func, miss_param, "
        "long_context) training never sees."
    )

    def __init__(self, categories: Sequence[str] | None = None, file: str | None = None) -> None:
        self._categories, self._file = categories, file

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """Drawn evenly from the tasks of the split's categories."""
        return [_row(task) for task in sample(self._tasks(split), n, seed)]

    def _tasks(self, split: Split) -> list[Task]:
        if self._file is not None:
            return tasks_of_file(self._file, split, _file_fault)
        names = chosen(split, TRAINED, HELD_OUT, self._categories)
        return [task for name in names for task in tasks(name) if _is_held_out(task) == (split == "eval")]

    def episode(self, row: Row) -> Episode:
        """The story at its beginning, with objects of its own."""
        return MultiTurnEpisode(row.data)


def _file_fault(task: Task) -> str | None:
    """What is wrong with a task of the user's; None if nothing is."""
    classes, config, late = (
        task.get("involved_classes"),
        task.get("initial_config"),
        task.get("missed_function", {}),
    )
    if not (isinstance(classes, list) and classes and set(classes) <= set(CLASSES)):
        return f'"involved_classes" lists some of {", ".join(CLASSES)}'
    if not isinstance(config, dict) or not isinstance(late, dict):
        return '"initial_config" and "missed_function" are JSON objects'
    turns, truth = task["question"], task["ground_truth"]
    if len(turns) != len(truth) or not all(isinstance(calls, list) for calls in truth):
        return f'"ground_truth" has a list of calls for each of the {len(turns)} turns'
    if silent := [number for number, turn in enumerate(turns) if not turn and str(number) not in late]:
        return f"turn {silent[0]} has no message, and no function comes with it"
    try:
        for call in (call for calls in truth for call in calls):
            literal_call(call)
    except ValueError as error:
        return str(error)
    return None


def _is_held_out(task: Task) -> bool:
    return int(task["id"].rpartition("_")[2]) % HELD_OUT_STORIES == HELD_OUT_STORIES - 1


def _row(task: Task) -> Row:
    fields = ("category", "question", "involved_classes", "initial_config", "ground_truth")
    late = task.get("missed_function", {})
    return Row(task["id"], {**{name: task[name] for name in fields}, "missed_function": late})


class MultiTurnEpisode(Episode):
    """One conversation, on a set of objects that no other one has."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._turns: Sequence[Sequence[Message]] = data["question"]
        self._replay = Replay(
            data["involved_classes"],
            data["initial_config"],
            data["ground_truth"],
            long_context="long_context" in data["category"],
        )
        every = {one["name"]: to_tool(one) for one in documents(data["involved_classes"])}
        late = {int(turn): names for turn, names in data["missed_function"].items()}
        self._late = {
            turn: [every.pop(name) for name in names if name in every] for turn, names in late.items()
        }
        self._tools = every
        self._right_turns, self._steps, self._badly_typed = 0, 0, 0
        self._fault: str | None = None

    def messages(self) -> Sequence[Message]:
        """The user's first request."""
        return self._turns[0]

    def tools(self) -> Sequence[ToolSchema]:
        """The methods of the task's classes, without those that come later."""
        return list(self._tools.values())

    def respond(self, turn: Turn) -> Sequence[Message] | None:
        """The answers to the calls; without any, the user's next request, or the end."""
        if not turn.calls:
            return self._next_request()
        self._steps += 1
        if self._steps > MOST_STEPS:
            self._fault = f"turn {self._replay.turns_done + 1}: more than {MOST_STEPS} steps"
            return None
        return [tool_message(self._answer(call)) for call in turn.calls]

    def _answer(self, call: Call) -> str:
        if call.error is not None or call.name is None or call.arguments is None:
            return self._replay.refuse(f"Error: {call.error}")
        self._badly_typed += badly_typed(self._tools[call.name], call.arguments) is not None
        return self._replay.call(call.name, call.arguments)

    def _next_request(self) -> Sequence[Message] | None:
        """The turn has ended: judge it, and go on if it was right."""
        self._fault = self._replay.end_turn()
        if self._fault is not None:
            return None
        self._right_turns += 1
        self._steps = 0
        number = self._replay.turns_done
        if number == len(self._turns):
            return None
        if number not in self._late:
            return self._turns[number]
        new = self._late[number]
        self._tools.update({tool_name(tool): tool for tool in new})
        return [user_message(f"{json.dumps([tool['function'] for tool in new])}\n{NEW_TOOLS}")]

    def score(self) -> Score:
        """The share of the user's turns that were right; parts besides: how many calls were `badly_typed`."""
        share = self._right_turns / len(self._turns)
        solved = self._right_turns == len(self._turns)
        parts = {
            "right_turns": share,
            "solved": float(solved),
            "badly_typed": float(self._badly_typed),
        }
        return Score(share, solved, parts)

    def fault(self) -> str | None:
        """What was wrong with the turn that ended the episode, in words; None if none was."""
        return self._fault


def load(categories: Sequence[str] | None = None, file: str | None = None) -> MultiTurn:
    """The taskset; `categories` of BFCL (all by default), or a `file` of the user's own instead.

    Raises MissingPackage where bfcl-eval is not installed: the tools are its own.
    """
    package_folder()
    return MultiTurn(categories, file)
