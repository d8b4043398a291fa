"""A tool call in a model's text: parsed, and held against the tools that the episode declares.

    <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call>

A call that cannot be made is kept, with its error: the model is told what is wrong, and it is counted. A call
of a tool that is not declared is `undeclared` besides: a model that invents tools is to be seen doing so.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ToolSchema = Mapping[str, Any]
"""A tool as OpenAI describes a function: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One tool call as the model wrote it."""

    raw: str
    name: str | None = None
    """The tool, None where the call names none."""
    arguments: Mapping[str, Any] | None = None
    """Its arguments by name, None where they are no JSON object."""
    error: str | None = None
    """Why it cannot be made; None for a call that can."""
    undeclared: bool = False
    """Whether it calls a tool that the episode does not have."""

    @property
    def valid(self) -> bool:
        """Whether the call can be made."""
        return self.error is None


def tool_name(tool: ToolSchema) -> str:
    """The name of a declared tool."""
    return str(tool["function"]["name"])


def tools_fault(tools: Any) -> str | None:
    """What is wrong with what an environment declares as its tools; None if nothing is."""
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
    """What of a call's arguments is not as the tool declares it, as one line; None if all is."""
    import jsonschema  # the launcher imports this module where nothing but its own packages is installed

    validator = jsonschema.Draft202012Validator(tool["function"].get("parameters", {}))
    found = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    if found is None:
        return None
    place = ".".join(map(str, found.absolute_path))
    return f"{place}: {found.message:.200}" if place else f"{found.message:.200}"


def parse_calls(text: str, tools: Sequence[ToolSchema], form: str = "hermes") -> tuple[Call, ...]:
    """Every call of one turn, in order, valid or not. Never raises for what a model may write.

    `form` is how the model writes calls, a key of `FORMS`.
    """
    names = [tool_name(tool) for tool in tools]
    return tuple(_checked(raw, call, names) for raw, call in FORMS[form].calls(text))


def outside_calls(text: str, form: str = "hermes") -> str:
    """A turn's text without its calls, of whatever kind they are."""
    return FORMS[form].outside(text)


def _checked(raw: str, call: Any, names: Sequence[str]) -> Call:
    if not isinstance(call, dict):
        return Call(raw, error="the call is not a JSON object")
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as text once more
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
    """The value that a text spells; None for none, which no call is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter from JSON nested deeper than Python's stack
        return None


def _hermes(text: str) -> list[tuple[str, Any]]:
    return [(raw, _json(raw)) for raw in _HERMES.findall(text)]


def _xlam(text: str) -> list[tuple[str, Any]]:
    """One JSON array of calls, and nothing else."""
    if not (raw := text.strip()).startswith("["):
        return []
    calls = _json(raw)
    return [(json.dumps(call), call) for call in calls] if isinstance(calls, list) else [(raw, None)]


@dataclass(frozen=True)
class Form:
    """How a model writes calls."""

    opening: str
    """What a call, or the list of them, begins with: text before it can be shown while the turn goes on."""
    calls: Callable[[str], list[tuple[str, Any]]]
    """From a turn's text to the raw text and the JSON value of each call."""
    outside: Callable[[str], str]
    """From a turn's text to what is left of it without the calls."""


FORMS = {
    "hermes": Form("<tool_call>", _hermes, lambda text: _HERMES.sub("", text)),
    "xlam": Form("[", _xlam, lambda text: "" if _xlam(text) else text),
}
"""The forms that there are."""
