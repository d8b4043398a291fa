"""Tool calls in a model's text: parsed, and checked against the declared tools.

Calls inside the thinking are drafts. The model is told the error of an invalid call.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from drzero.ops.text import is_encodable
from environments.turn_text import CALL, read_json, tagged_calls, turn_parts

ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name": …, "parameters": …}}`."""


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
    found = (one for _, said in turn_parts(text) for one in FORMS[form].read(said)[0])
    return tuple(_checked(raw, call, names) for raw, call in found)


def outside_calls(text: str, form: str = "hermes") -> str:
    """A turn's text, thinking included, without its calls, valid or not."""
    return "".join(thought + FORMS[form].read(said)[1] for thought, said in turn_parts(text))


def _checked(raw: str, call: Any, names: Sequence[str]) -> Call:
    if not isinstance(call, dict):
        return Call(raw, error="the call is not a JSON object")
    name, good = call.get("name"), _arguments(call.get("arguments"))
    if not is_encodable([name, good]):
        return Call(raw, error="the call is nested too deeply, or has NaN or half of a surrogate pair")
    if not isinstance(name, str):
        return Call(raw, arguments=good, error="the call names no tool")
    if name not in names:
        error = f"there is no tool {name!r}; the tools are {', '.join(names) or 'none'}"
        return Call(raw, name, good, error, undeclared=True)
    if good is None:
        return Call(raw, name, error=f"the arguments of {name} are not a JSON object")
    return Call(raw, name, good)


def _arguments(given: Any) -> dict[str, Any] | None:
    """An object, empty where the call leaves it out, or None for anything else."""
    if isinstance(given, str):  # some models write the object as a text
        given = {} if given.strip() in ("", '""', "[]", "null", "None") else read_json(given)
    elif given is None or given == []:
        given = {}
    return given if isinstance(given, dict) else None


_Read = tuple[list[tuple[str, Any]], str]  # each call's raw text and JSON value, and the text around them


def _hermes(said: str) -> _Read:
    calls, around = tagged_calls(said)
    return [(raw, read_json(raw)) for raw in calls], around


def _xlam(said: str) -> _Read:
    """A part that is one JSON array of calls."""
    raw = said.strip()
    calls = read_json(raw) if raw.startswith("[") else []
    if calls == []:
        return [], said
    return [(raw, None)] if calls is None else [(json.dumps(call), call) for call in calls], ""


def _llama3(said: str) -> _Read:
    """A part that is objects with a name and parameters, with `;` between. A special token may come first."""
    before, mark, raw = said.rpartition(PYTHON_TAG)
    calls = _objects(raw.strip())
    if calls and all(isinstance(call, dict) and call.keys() >= {"name", "parameters"} for call in calls):
        named = [{"name": call["name"], "arguments": call["parameters"]} for call in calls]
        return [(json.dumps(call), one) for call, one in zip(calls, named, strict=True)], before
    return ([(raw, None)], before) if mark else ([], said)


def _objects(text: str) -> list[Any]:
    """The JSON values of a text, apart by semicolons. Empty if it has anything else."""
    found, decoder = [], json.JSONDecoder()
    try:
        while text:
            value, end = decoder.raw_decode(text)
            found.append(value)
            text = text[end:].strip().removeprefix(";").strip()
    except (ValueError, RecursionError):
        return []
    return found


def _mistral(said: str) -> _Read:
    """A JSON array of calls after a special token."""
    before, mark, raw = said.partition(TOOL_CALLS)
    if not mark:
        return [], said
    calls = read_json(raw)
    listed = [(json.dumps(call), call) for call in calls] if isinstance(calls, list) else []
    return listed or [(raw, None)], before


class Form(NamedTuple):
    """A way to write calls."""

    openings: tuple[str, ...]  # how a call or a list of calls may begin. Text before it can be streamed
    read: Callable[[str], _Read]


PYTHON_TAG, TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
"""Special tokens that mark a call. A turn's text keeps them."""
FORMS = {
    "hermes": Form((CALL,), _hermes),
    "xlam": Form(("[",), _xlam),
    "llama3": Form(("{", PYTHON_TAG), _llama3),
    "mistral": Form((TOOL_CALLS,), _mistral),
}
