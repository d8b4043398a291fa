"""A conversation of BFCL, played on the classes of `bfcl-eval`: a fresh set of objects for each rollout.

    replay = Replay(classes=["GorillaFileSystem"], config={…}, truth=[["mkdir('a')"]], long_context=False)
    replay.call("mkdir", {"dir_name": "a"})     # what the tool answers
    replay.end_turn()                           # None: the state is that of the right calls

The package's own executor evaluates the model's text as Python, and keeps its objects for ever under a name
that all rollouts of a task share. Here a call is a method's name and JSON arguments, objects live as long as
their rollout, and nothing is evaluated: the right calls, which the data has as text, are taken apart by `ast`
and hold literals only. What the comparison of states and answers finds is the package's own (`state_checker`,
`response_checker`).
"""

import ast
import contextlib
import copy
import decimal
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import mpmath

from environments.bfcl.source import package_folder, read_lines

CLASSES = (
    "GorillaFileSystem",
    "MathAPI",
    "MessageAPI",
    "TicketAPI",
    "TradingBot",
    "TravelAPI",
    "TwitterAPI",
    "VehicleControlAPI",
)
"""What the conversations are about. The package's others reach the network, or write files of their own."""
_WRITES_TO_ITS_MODULE = ("MathAPI", "VehicleControlAPI")
"""Classes whose methods set what all of the process shares: mpmath's precision, a table of the weather."""
_LOCK = threading.Lock()
_MOST = {"base": 10**18, "exponent": 1000, "precision": 1000, "decimal_places": 1000}
"""Numbers that the package would compute with for hours, holding the whole process up."""


class Replay:
    """The model's objects, and those on which the right calls are made, turn by turn."""

    def __init__(
        self,
        classes: Sequence[str],
        config: Mapping[str, Any],
        truth: Sequence[Sequence[str]],
        long_context: bool,
    ) -> None:
        self._model, self._right = (_Objects(classes, config, long_context) for _ in range(2))
        self._truth = truth
        self._answers: list[str] = []
        self._called = False
        self.turns_done = 0
        """User turns that have ended, the right ones and a wrong one."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a tool answers; an error is an answer too. Any JSON object is taken for arguments."""
        self._called = True
        answer = _refusal(arguments) or self._model.call(name, (), arguments)
        self._answers.append(answer)
        return answer

    def refuse(self, why: str) -> str:
        """Note a call that cannot be made, which is a call all the same, as in the package."""
        self._called = True
        return why

    def end_turn(self) -> str | None:
        """Make the right calls of the user's turn, and compare: what is wrong, or None.

        The package's rules: the objects' states are the same, and the model's calls have had by now every
        answer that the right ones got. A turn without right calls (the task lacks a tool or a value as yet)
        is right whatever was called.
        """
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import response_checker, state_checker

        turn, called = self.turns_done, self._called
        self.turns_done, self._called = turn + 1, False
        wanted = [self._right.call(*literal_call(text)) for text in self._truth[turn]]
        if not wanted:
            return None
        if not called:
            return f"turn {turn + 1}: nothing was called"
        try:
            state = state_checker(self._model.by_class, self._right.by_class)
        except RecursionError:  # a folder of the model's that contains itself
            return f"turn {turn + 1}: the state of the model's objects cannot be compared"
        if not state["valid"]:
            return f"turn {turn + 1}: {state['error_message']}"
        answers = response_checker(self._answers, wanted, turn)
        return None if answers["valid"] else f"turn {turn + 1}: not all that was asked for was looked up"


class _Objects:
    """One fresh object of each class of a task."""

    def __init__(self, classes: Sequence[str], config: Mapping[str, Any], long_context: bool) -> None:
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

        self.by_class: dict[str, Any] = {}
        self._methods: dict[str, tuple[str, Callable[..., Any]]] = {}
        for name in classes:
            thing = getattr(import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                thing._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long_context)
                # What it loads of its module's constants, long_context's credit cards, is the process's.
                thing = copy.deepcopy(thing)
            self.by_class[name] = thing
            for method, bound in inspect.getmembers(thing, predicate=inspect.ismethod):
                if not method.startswith("_"):
                    self._methods[method] = (name, bound)

    def call(self, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> str:
        """A method's answer as text, the same as the package's executor has it."""
        if name not in self._methods:
            return f"Error during execution: name '{name}' is not defined"
        owner, method = self._methods[name]
        try:
            with _own_precision(owner):
                return _as_text(method(*positional, **named))
        # Whatever a method raises at the arguments it is given is what its caller is told, as in the package.
        except Exception as error:
            return f"Error during execution: {error}"


@contextlib.contextmanager
def _own_precision(owner: str) -> Iterator[None]:
    """Leave nothing behind in the process that a method sets there, nor let two rollouts set it at once."""
    if owner not in _WRITES_TO_ITS_MODULE:
        yield
        return
    with _LOCK, decimal.localcontext():
        before = mpmath.mp.prec
        try:
            yield
        finally:
            mpmath.mp.prec = before


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):  # an object among its values
            return str(result)
    return str(result)


def _refusal(arguments: Mapping[str, Any]) -> str | None:
    """Why arguments are not even tried; None if they are."""
    for name, most in _MOST.items():
        value = arguments.get(name)
        if isinstance(value, int | float) and not abs(value) <= most:
            return f"Error during execution: {name} is {most} at most"
    return None


def literal_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A call of the data, `cd('a')`, taken apart; raises ValueError for any but literal arguments."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("no call by name")
        named = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
        if len(named) != len(call.keywords):
            raise ValueError("** in a call")
        return call.func.id, [ast.literal_eval(one) for one in call.args], named
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"ground_truth: {text!r} is no call with literal arguments ({error})") from error


def documents(classes: Sequence[str]) -> list[Mapping[str, Any]]:
    """The function documents of a task's classes, in the package's order; raises MissingPackage."""
    folder = package_folder() / "data" / "multi_turn_func_doc"
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as FILES

    return [document for name in classes for document in read_lines(folder / FILES[name])]
