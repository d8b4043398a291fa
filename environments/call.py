"""Tool calls in a model's text: parsed, and checked against the declared tools.

    <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call>

The model is told the error of an invalid call. `undeclared` marks invented tools.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One tool call as the model wrote it."""

    raw: str
    name: str | None = None
    arguments: Mapping[str, Any] | None = None  # by name, or None if they are no JSON object
    error: str | None = None  # why the call cannot be made
    undeclared: bool = False  # whether the episode has no such tool

    @property
    def valid(self) -> bool:
        """Whether the call can be made."""
        return self.error is None


def tool_name(tool: ToolSchema) -> str:
    """The name of a declared tool."""
    return str(tool["function"]["name"])


def tools_fault(tools: Any) -> str | None:
    """The fault of the tools an environment declares, or None."""
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        return f"tools are a list, not {tools!r:.80}"
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return f'a tool is {{"type": "function", "function": {{"name": …}}}}, not {tool!r:.80}'
    try:
        json.dumps(list(tools))
    except (TypeError, ValueError) as error:
        return f"tools are JSON: {error}"
    return None


def badly_typed(tool: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """One line about arguments that break the tool's schema, or None."""
    import jsonschema  # not installed on a client of the launcher, which imports this module

    validator = jsonschema.Draft202012Validator(tool["function"].get("parameters", {}))
    found = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    if found is None:
        return None
    place = ".".join(map(str, found.absolute_path))
    return f"{place}: {found.message:.200}" if place else f"{found.message:.200}"


def parse_calls(text: str, tools: Sequence[ToolSchema], form: str = "hermes") -> tuple[Call, ...]:
    """Every call of a turn in order, valid or not, written in a `form` of `FORMS`. Never raises."""
    names = [tool_name(tool) for tool in tools]
    return tuple(_checked(raw, call, names) for raw, call in FORMS[form].calls(text))


def outside_calls(text: str, form: str = "hermes") -> str:
    """A turn's text without its calls, valid or not."""
    return FORMS[form].outside(text)


def _checked(raw: str, call: Any, names: Sequence[str]) -> Call:
    if not isinstance(call, dict):
        return Call(raw, error="the call is not a JSON object")
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = _json(arguments)
    good = arguments if isinstance(arguments, dict) else None
    if not isinstance(name, str):
        return Call(raw, arguments=good, error="the call names no tool")
    if name not in names:
        error = f"there is no tool {name!r}; the tools are {', '.join(names) or 'none'}"
        return Call(raw, name, good, error, undeclared=True)
    if good is None:
        return Call(raw, name, error=f"the arguments of {name} are not a JSON object")
    return Call(raw, name, good)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: nested deeper than Python's stack
        return None


def _hermes(text: str) -> list[tuple[str, Any]]:
    return [(raw, _json(raw)) for raw in _HERMES.findall(text)]


def _xlam(text: str) -> list[tuple[str, Any]]:
    """A turn that is one JSON array of calls."""
    if not (raw := text.strip()).startswith("["):
        return []
    calls = _json(raw)
    return [(json.dumps(call), call) for call in calls] if isinstance(calls, list) else [(raw, None)]


@dataclass(frozen=True)
class Form:
    """A way to write calls."""

    opening: str  # the beginning of a call or a list of calls. Text before it can be streamed
    calls: Callable[[str], list[tuple[str, Any]]]  # each call's raw text and JSON value
    outside: Callable[[str], str]  # the text without its calls


FORMS = {
    "hermes": Form("<tool_call>", _hermes, lambda text: _HERMES.sub("", text)),
    "xlam": Form("[", _xlam, lambda text: "" if _xlam(text) else text),
}
