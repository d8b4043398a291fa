"""`bfcl-single-turn`: one question, some functions, and the calls that answer it, for a reward of 1 or 0."""

from collections.abc import Mapping, Sequence
from typing import Any

from environments.bfcl.match import Answer, calls_fault, type_fault
from environments.bfcl.schema import language_of, to_tool
from environments.bfcl.source import BfclTaskset, Task, package_folder, question_key, tasks
from environments.call import Call, ToolSchema, badly_typed, tool_name
from environments.conversation import Message, Turn
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score

TRAINED: tuple[str, ...] = ("simple_python", "simple_java", "simple_javascript")
TRAINED += ("multiple", "parallel", "parallel_multiple", "irrelevance")
HELD_OUT: tuple[str, ...] = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
HELD_OUT += ("live_irrelevance", "live_relevance")


class SingleTurn(BfclTaskset):
    """Questions for one turn."""

    max_turns = 1
    trained, evaluated = TRAINED, HELD_OUT
    held_out = (
        "BFCL's live categories: training sees none of their tasks, and no question of another category that "
        "one of them repeats."
    )

    def of_split(self, split: Split, found: list[Task]) -> list[Task]:
        """Without training questions that a held-out task repeats."""
        if split == "eval":
            return found
        held_out = {question_key(task) for name in HELD_OUT for task in tasks(name)}
        return [task for task in found if question_key(task) not in held_out]

    def file_fault(self, task: Task) -> str | None:
        """The fault of functions and answers, or None."""
        functions, answers = task.get("function"), task["ground_truth"]
        if not (isinstance(functions, list) and functions and all(map(_is_document, functions))):
            return '"function" is a list of documents with "name", "description" and "parameters"'
        names = {function["name"] for function in functions}
        for answer in answers:
            if not (isinstance(answer, dict) and len(answer) == 1 and set(answer) <= names):
                return f'"ground_truth" calls a function of the task each, by name: {answer!r:.80} does not'
            (arguments,) = answer.values()
            if not (
                isinstance(arguments, dict) and all(isinstance(right, list) for right in arguments.values())
            ):
                return f'"ground_truth" lists the right values of each argument: {answer!r:.80} does not'
        language = language_of(task["id"])
        if language != "Python":
            package_folder()  # for the converters of the other languages
        declared = (one for function in functions for one in function["parameters"]["properties"].values())
        return next((fault for one in declared if (fault := type_fault(one, language)) is not None), None)

    def row(self, task: Task) -> Row:
        """The messages, functions and answers."""
        fields = ("category", "function", "ground_truth")
        return Row(task["id"], {"messages": task["question"][0], **{name: task[name] for name in fields}})

    def episode(self, row: Row) -> Episode:
        """A question without an answer yet."""
        return SingleTurnEpisode(row.data)


def _is_document(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("name"), str)
        and isinstance(document.get("description"), str)
        and isinstance(document.get("parameters"), dict)
        and isinstance(properties := document["parameters"].get("properties"), dict)
        and all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in properties.values())
    )


class SingleTurnEpisode(Episode):
    """One question, which the first turn answers."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._category: str = data["category"]
        self._messages: Sequence[Message] = data["messages"]
        self._functions: Sequence[Mapping[str, Any]] = data["function"]
        self._answers: Sequence[Answer] | None = data["ground_truth"]
        self._language = language_of(self._category)
        self._tools = [to_tool(function, self._language) for function in self._functions]
        self._calls: tuple[Call, ...] = ()

    def messages(self) -> Sequence[Message]:
        """The user's question with its context."""
        return self._messages

    def tools(self) -> Sequence[ToolSchema]:
        """The question's functions."""
        return self._tools

    def respond(self, turn: Turn) -> None:
        """End the episode: calls are compared, not made."""
        self._calls = turn.calls

    def score(self) -> Score:
        """1 for the right calls. Further parts: `right_tools`, `valid_calls` and the number `badly_typed`."""
        right = self.fault() is None
        by_name = {tool_name(tool): tool for tool in self._tools}
        typed = [
            badly_typed(by_name[call.name], call.arguments)
            for call in self._calls
            if call.valid and call.name is not None and call.arguments is not None
        ]
        parts = {
            "match": float(right),
            "right_tools": float(self._right_tools()),
            "valid_calls": float(all(call.valid for call in self._calls)),
            "badly_typed": float(sum(fault is not None for fault in typed)),
        }
        return Score(parts["match"], right, parts)

    def fault(self) -> str | None:
        """Why the calls are wrong, or None."""
        if self._answers is None and "irrelevance" in self._category:
            return None if not self._calls else "no function fits the question, and one is called"
        for call in self._calls:
            if call.error is not None:
                return call.error
        if self._answers is None:  # relevance: some call is right, but BFCL does not say which
            return None if self._calls else "no function is called"
        made = [(call.name or "", call.arguments or {}) for call in self._calls]
        return calls_fault(self._functions, made, self._answers, self._language)

    def _right_tools(self) -> bool:
        if self._answers is None:
            return self.fault() is None
        wanted = sorted(name for answer in self._answers for name in answer)
        return sorted(call.name or "" for call in self._calls) == wanted


def load(categories: Sequence[str] | None = None, file: str | None = None) -> SingleTurn:
    """The taskset of BFCL's `categories` or the user's `file`. Raises EnvironmentUnusable if needed."""
    if file is None:
        package_folder()
    return SingleTurn(categories, file)
