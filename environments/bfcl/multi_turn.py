"""`bfcl-multi-turn`: a user with several requests, and tools that change a file system, a car, an account.

A turn without calls brings the next request. The first wrong user's turn ends the episode. The reward is the
share of right ones, and `success` means all. The four categories tell the same 200 stories: training has 150
as `multi_turn_base`, evaluation the other 50 in all four, and 450 tasks are in neither.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from environments.bfcl.replay import CLASSES, Replay, documents, literal_call
from environments.bfcl.schema import to_tool
from environments.bfcl.source import BfclTaskset, Task, package_folder
from environments.call import Call, ToolSchema, badly_typed, tool_name
from environments.conversation import Message, Turn, tool_message, user_message
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score

TRAINED = ("multi_turn_base",)
HELD_OUT = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
HELD_OUT_STORIES = 4  # every fourth story is held out, since they are ordered by subject
MOST_STEPS = 20  # turns with calls for one user's turn, as in the package
NEW_TOOLS = "I have updated some more functions you can choose from. What about now?"
"""What the package's user says when a missing tool arrives."""


class MultiTurn(BfclTaskset):
    """Conversations."""

    max_turns = 8 * (MOST_STEPS + 1)
    trained, evaluated = TRAINED, HELD_OUT
    held_out = (
        "Every fourth of BFCL's 200 stories, in all four categories, three of which (miss_func, miss_param, "
        "long_context) training never sees."
    )

    def of_split(self, split: Split, found: list[Task]) -> list[Task]:
        """Every fourth story is held out."""
        return [task for task in found if _is_held_out(task) == (split == "eval")]

    def file_fault(self, task: Task) -> str | None:
        """The fault of classes, config and right calls, or None."""
        classes, config = task.get("involved_classes"), task.get("initial_config")
        late = task.get("missed_function", {})
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

    def row(self, task: Task) -> Row:
        """The story with its right calls."""
        fields = ("category", "question", "involved_classes", "initial_config", "ground_truth")
        late = task.get("missed_function", {})
        return Row(task["id"], {**{name: task[name] for name in fields}, "missed_function": late})

    def episode(self, row: Row) -> Episode:
        """The story from its beginning."""
        return MultiTurnEpisode(row.data)


def _is_held_out(task: Task) -> bool:
    return int(task["id"].rpartition("_")[2]) % HELD_OUT_STORIES == HELD_OUT_STORIES - 1


class MultiTurnEpisode(Episode):
    """One conversation, with separate objects."""

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
        """The methods of the task's classes, except late ones that have not arrived."""
        return list(self._tools.values())

    def respond(self, turn: Turn) -> Sequence[Message] | None:
        """The answers to the calls. Without calls, the user's next request or the end."""
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
        """Judge the ended turn, and continue if it was right."""
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
        """The share of right user's turns. A further part counts `badly_typed` calls."""
        share = self._right_turns / len(self._turns)
        solved = self._right_turns == len(self._turns)
        parts = {"right_turns": share, "solved": float(solved), "badly_typed": float(self._badly_typed)}
        return Score(share, solved, parts)

    def fault(self) -> str | None:
        """The fault of the turn that ended the episode, or None."""
        return self._fault


def load(categories: Sequence[str] | None = None, file: str | None = None) -> MultiTurn:
    """The taskset of BFCL's `categories` or the user's `file`. Raises EnvironmentUnusable."""
    package_folder()
    return MultiTurn(categories, file)
