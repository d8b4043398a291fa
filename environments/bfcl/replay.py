"""A conversation of BFCL, run on the classes of `bfcl-eval` with new objects for each rollout.

The package's executor evaluates a model's text as Python, and rollouts share its objects. Only its
`state_checker` and `response_checker` are used, and `ast` parses the right calls.
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

# The package's other classes use the network or write files.
CLASSES: tuple[str, ...] = ("GorillaFileSystem", "MathAPI", "MessageAPI", "TicketAPI", "TradingBot")
CLASSES += ("TravelAPI", "TwitterAPI", "VehicleControlAPI")
_WRITES_TO_ITS_MODULE = ("MathAPI", "VehicleControlAPI")  # state of the process: mpmath's precision, weather
_LOCK = threading.Lock()
_MOST = {"base": 10**18, "exponent": 1000, "precision": 1000, "decimal_places": 1000}
"""The package would compute for hours with larger numbers."""


class Replay:
    """The model's objects, and a second set for the right calls, turn by turn."""

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
        self.turns_done = 0  # finished user turns, right or wrong

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The tool's answer, which may be an error. Takes any JSON object as arguments."""
        self._called = True
        answer = _refusal(arguments) or self._model.call(name, (), arguments)
        self._answers.append(answer)
        return answer

    def refuse(self, why: str) -> str:
        """Count an invalid call, as the package does."""
        self._called = True
        return why

    def end_turn(self) -> str | None:
        """Return the user turn's fault: other states than the right calls, or an answer the model lacks."""
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
        except RecursionError:  # the model made a folder contain itself
            return f"turn {turn + 1}: the state of the model's objects cannot be compared"
        if not state["valid"]:
            return f"turn {turn + 1}: {state['error_message']}"
        answers = response_checker(self._answers, wanted, turn)
        return None if answers["valid"] else f"turn {turn + 1}: not all that was asked for was looked up"


class _Objects:
    def __init__(self, classes: Sequence[str], config: Mapping[str, Any], long_context: bool) -> None:
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

        self.by_class: dict[str, Any] = {}
        self._methods: dict[str, tuple[str, Callable[..., Any]]] = {}
        for name in classes:
            thing = getattr(import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in STATELESS_CLASSES:
                thing._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long_context)
                # It may load constants of its module, such as long_context's credit cards.
                thing = copy.deepcopy(thing)
            self.by_class[name] = thing
            for method, bound in inspect.getmembers(thing, predicate=inspect.ismethod):
                if not method.startswith("_"):
                    self._methods[method] = (name, bound)

    def call(self, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> str:
        """A method's answer, in the text of the package's executor."""
        if name not in self._methods:
            return f"Error during execution: name '{name}' is not defined"
        owner, method = self._methods[name]
        try:
            with _own_precision(owner):
                return _as_text(method(*positional, **named))
        # A method may raise anything, and its caller is told, as in the package.
        except Exception as error:
            return f"Error during execution: {error}"


@contextlib.contextmanager
def _own_precision(owner: str) -> Iterator[None]:
    """Undo changes of a method to the process, one rollout at a time."""
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
    with contextlib.suppress(TypeError, ValueError):  # an object among its values
        return json.dumps(result) if isinstance(result, dict) else str(result)
    return str(result)


def _refusal(arguments: Mapping[str, Any]) -> str | None:
    for name, most in _MOST.items():
        value = arguments.get(name)
        if isinstance(value, int | float) and not abs(value) <= most:
            return f"Error during execution: {name} is {most} at most"
    return None


def literal_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse a call of the data, `cd('a')`. Raises ValueError unless all arguments are literals."""
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
    """The function documents of a task's classes, in the package's order. Raises EnvironmentUnusable."""
    folder = package_folder() / "data" / "multi_turn_func_doc"
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING as FILES

    return [document for name in classes for document in read_lines(folder / FILES[name])]
