"""The search tool: its OpenAI function description, and its calls in the models' text, parsed and rendered.

<tool_call>
{"name": "search", "arguments": {"query_list": ["first query", "second query"]}}
</tool_call>
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drzero.ops.text import is_encodable
from environments.call import FORMS, Call
from environments.turn_text import read_json, turn_parts
from verl_ext.method.passages import defuse
from verl_ext.method.trajectory import SearchCall

SEARCH_TOOL_NAME = "search"
MAX_CALLS_PER_TURN = 5  # in rollouts (`max_parallel_calls`) and solver attempts alike
MAX_QUERIES_PER_CALL = 10  # the results of more would not fit into a response
MAX_QUERY_CHARS = 1000  # more than an embedder reads. The service refuses much longer queries

SEARCH_TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": SEARCH_TOOL_NAME,
        "description": "Search the corpus. Returns the passages that fit each query best.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Search queries, each a short question or phrase that stands on its own.",
                }
            },
            "required": ["query_list"],
        },
    },
}


_TAG = re.compile(r"</?(?:think|tool_call|answer|question)>")


def parse_tool_calls(text: str, form: str = "hermes") -> list[SearchCall]:
    """Every closed tool call of a turn outside its thinking, in a `form` of `environments.call.FORMS`.

    Invalid ones have `error` set. Never raises.
    """
    found = (one for _, said in turn_parts(text) for one in FORMS[form].read(said)[0])
    return [_parsed(raw, call) for raw, call in found]


def render_tool_call(queries: Sequence[str]) -> str:
    """The text of a valid search call with its tags."""
    call = {"name": SEARCH_TOOL_NAME, "arguments": {"query_list": list(queries)}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def invalid_call_response(call: SearchCall) -> str:
    """The tool's response to an invalid call."""
    expected = '{"name": "search", "arguments": {"query_list": ["..."]}}'
    return f"Error: {call.error}. A call looks like {expected}"


def refuse_call(call: SearchCall, reason: str) -> SearchCall:
    """The call marked invalid because the search service refuses its queries, with its response."""
    line = defuse(" ".join(reason.split()))[:200]
    invalid = replace(call, queries=None, error=f"the search service refuses these queries ({line})")
    return replace(invalid, response=invalid_call_response(invalid))


def parse_call(raw: str) -> SearchCall:
    """Parse the text between a call's tags by the rules of `parse_tool_calls`."""
    return _parsed(raw, read_json(raw))


def search_call(call: Call) -> SearchCall:
    """A call that an environment's player has read."""
    if call.name is None:  # not read as a call
        return parse_call(call.raw)
    return _parsed(call.raw, {"name": call.name, "arguments": call.arguments})


def _parsed(raw: str, call: Any) -> SearchCall:
    arguments = call.get("arguments") if isinstance(call, dict) else None
    queries = arguments.get("query_list") if isinstance(arguments, dict) else None
    if call is None:
        error = "the call is not JSON"
    elif not isinstance(call, dict):
        error = "the call is not a JSON object"
    elif call.get("name") != SEARCH_TOOL_NAME:
        error = "there is no such tool, the only one is search"
    elif not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        error = "query_list is not a list of strings"
    elif not queries or not all(query.strip() and is_encodable(query) for query in queries):
        error = "query_list is empty or has an empty query"
    elif len(queries) > MAX_QUERIES_PER_CALL:
        error = f"query_list has more than {MAX_QUERIES_PER_CALL} queries"
    elif any(len(query) > MAX_QUERY_CHARS for query in queries):
        error = f"a query has more than {MAX_QUERY_CHARS} characters"
    elif any(_TAG.search(query) for query in queries):
        error = "a query has a tag in it"
    else:
        return SearchCall(raw=raw, queries=tuple(queries))
    return SearchCall(raw=raw, queries=None, error=error)
