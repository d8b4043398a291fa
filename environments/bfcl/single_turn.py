"""`bfcl-single-turn`: one question, some functions, and the calls that answer it, in one turn.

    taskset = load()                              # trains on the non-live tasks, evaluates on the live ones
    taskset = load(categories=["live_simple"])
    taskset = load(file="calls.jsonl")            # your own, in the same form

The reward is 1 where the calls are those of the answer (`match`), else 0: what BFCL counts. Its live
categories, asked by users, are held out whole: they are a test set, and what is trained on them cannot be
compared with anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from environments.bfcl.match import Answer, calls_fault, type_fault
from environments.bfcl.schema import language_of, to_tool
from environments.bfcl.source import Task, chosen, package_folder, question_key, sample, tasks, tasks_of_file
from environments.call import Call, ToolSchema, badly_typed, tool_name
from environments.conversation import Message, Turn
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score
from environments.taskset import Taskset

TRAINED = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
)
HELD_OUT = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)


class SingleTurn(Taskset):
    """Rows of the package's categories, or of a file."""

    max_turns = 1
    filters_groups = True
    held_out = (
        "BFCL's live categories: training sees none of their tasks, and no question of another category that "
        "one of them repeats."
    )

    def __init__(self, categories: Sequence[str] | None = None, file: str | None = None) -> None:
        self._categories, self._file = categories, file

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """Drawn evenly from the tasks of the split's categories."""
        return [_row(task) for task in sample(self._tasks(split), n, seed)]

    def _tasks(self, split: Split) -> list[Task]:
        if self._file is not None:
            return tasks_of_file(self._file, split, _file_fault)
        found = [task for name in chosen(split, TRAINED, HELD_OUT, self._categories) for task in tasks(name)]
        if split == "eval":
            return found
        held_out = {question_key(task) for name in HELD_OUT for task in tasks(name)}
        return [task for task in found if question_key(task) not in held_out]

    def episode(self, row: Row) -> Episode:
        """A question, not yet answered."""
        return SingleTurnEpisode(row.data)


def _file_fault(task: Task) -> str | None:
    """What is wrong with a task of the user's; None if nothing is."""
    functions, answers = task.get("function"), task["ground_truth"]
    if not (isinstance(functions, list) and functions and all(map(_is_document, functions))):
        return '"function" is a list of documents with "name", "description" and "parameters"'
    names = {function["name"] for function in functions}
    for answer in answers:
        if not (isinstance(answer, dict) and len(answer) == 1 and set(answer) <= names):
            return f'"ground_truth" calls a function of the task each, by name: {answer!r:.80} does not'
        (arguments,) = answer.values()
        if not (isinstance(arguments, dict) and all(isinstance(right, list) for right in arguments.values())):
            return f'"ground_truth" lists the right values of each argument: {answer!r:.80} does not'
    language = language_of(task["id"])
    if language != "Python":
        package_folder()  # it has the converters of the other languages
    declared = (one for function in functions for one in function["parameters"]["properties"].values())
    return next((fault for one in declared if (fault := type_fault(one, language)) is not None), None)


def _is_document(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and isinstance(document.get("name"), str)
        and isinstance(document.get("description"), str)
        and isinstance(document.get("parameters"), dict)
        and isinstance(properties := document["parameters"].get("properties"), dict)
        and all(isinstance(one, dict) and isinstance(one.get("type"), str) for one in properties.values())
    )


def _row(task: Task) -> Row:
    fields = ("category", "function", "ground_truth")
    return Row(task["id"], {"messages": task["question"][0], **{name: task[name] for name in fields}})


class SingleTurnEpisode(Episode):
    """One question; the first turn answers it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._category: str = data["category"]
        self._messages: Sequence[Message] = data["messages"]
        self._functions: Sequence[Mapping[str, Any]] = data["function"]
        self._answers: Sequence[Answer] | None = data["ground_truth"]
        self._language = language_of(self._category)
        self._tools = [to_tool(function, self._language) for function in self._functions]
        self._calls: tuple[Call, ...] = ()

    def messages(self) -> Sequence[Message]:
        """The user's question, with what was said before it."""
        return self._messages

    def tools(self) -> Sequence[ToolSchema]:
        """The functions that the question comes with."""
        return self._tools

    def respond(self, turn: Turn) -> None:
        """Nothing: the calls are compared, not made."""
        self._calls = turn.calls

    def score(self) -> Score:
        """1 for the right calls; parts besides: `right_tools`, `valid_calls` and the number `badly_typed`."""
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
        """Why the calls are not the right ones, in words; None if they are."""
        if self._answers is None and "irrelevance" in self._category:
            return None if not self._calls else "no function fits the question, and one is called"
        for call in self._calls:
            if call.error is not None:
                return call.error
        if self._answers is None:  # relevance: which calls are right is not known, but that some are
            return None if self._calls else "no function is called"
        made = [(call.name or "", call.arguments or {}) for call in self._calls]
        return calls_fault(self._functions, made, self._answers, self._language)

    def _right_tools(self) -> bool:
        """Whether the functions called are those of the answer, whatever their arguments."""
        if self._answers is None:
            return self.fault() is None
        wanted = sorted(name for answer in self._answers for name in answer)
        return sorted(call.name or "" for call in self._calls) == wanted


def load(categories: Sequence[str] | None = None, file: str | None = None) -> SingleTurn:
    """The taskset; `categories` of BFCL (all by default), or a `file` of the user's own instead.

    Raises MissingPackage where bfcl-eval is needed and not installed.
    """
    if file is None:
        package_folder()
    return SingleTurn(categories, file)
