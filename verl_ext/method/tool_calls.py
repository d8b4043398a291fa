"""Search calls in the models' text: parse them, render them, and explain to the model what is wrong with one.

A call is a JSON object between Hermes tags:

    <tool_call>
    {"name": "search", "arguments": {"query_list": ["first query", "second query"]}}
    </tool_call>

veRL's agent loop and the solver's agent both parse with this module, so that they agree.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from verl_ext.method.passages import defuse
from verl_ext.method.search_tool_schema import MAX_QUERIES_PER_CALL, MAX_QUERY_CHARS, SEARCH_TOOL_NAME
from verl_ext.method.trajectory import SearchCall

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|tool_call|answer|question)>")


def parse_tool_calls(text: str) -> list[SearchCall]:
    """Every closed tool call of one turn, in order; invalid ones have `error` set. Never raises.

    A valid call is a JSON object that names `search` and whose `query_list` is a list of 1 to 10 non-blank
    strings of at most 1000 characters, without a tag of the conversation in them: a policy that thinks inside
    its query often still finds the passage, and learns to write nothing else.
    """
    return [parse_call(raw) for raw in _CALL.findall(text)]


def render_tool_call(queries: Sequence[str]) -> str:
    """The text of a valid search call, tags included: the inverse of `parse_tool_calls`."""
    call = {"name": SEARCH_TOOL_NAME, "arguments": {"query_list": list(queries)}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def invalid_call_response(call: SearchCall) -> str:
    """The response to an invalid call, shown to the model in place of passages."""
    expected = '{"name": "search", "arguments": {"query_list": ["..."]}}'
    return f"Error: {call.error}. A call looks like {expected}"


def refuse_call(call: SearchCall, reason: str) -> SearchCall:
    """The call as an invalid one, with the response shown to the model: the service refuses its queries."""
    line = defuse(" ".join(reason.split()))[:200]
    invalid = replace(call, queries=None, error=f"the search service refuses these queries ({line})")
    return replace(invalid, response=invalid_call_response(invalid))


def parse_call(raw: str) -> SearchCall:
    """One call from the text between its tags, by the rules of `parse_tool_calls`."""
    try:
        call = json.loads(raw)
    except (ValueError, RecursionError):  # the latter from JSON nested deeper than Python's stack
        return SearchCall(raw=raw, queries=None, error="the call is not JSON")
    arguments = call.get("arguments") if isinstance(call, dict) else None
    queries = arguments.get("query_list") if isinstance(arguments, dict) else None
    if not isinstance(call, dict):
        error = "the call is not a JSON object"
    elif call.get("name") != SEARCH_TOOL_NAME:
        error = "there is no such tool, the only one is search"
    elif not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        error = "query_list is not a list of strings"
    elif not queries or not all(_is_sendable(query) for query in queries):
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


def _is_sendable(query: str) -> bool:
    """Not blank, and no half of a surrogate pair: JSON can spell one, UTF-8 cannot carry it."""
    return bool(query.strip()) and not any("\ud800" <= char <= "\udfff" for char in query)
