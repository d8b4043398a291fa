"""Parsing search calls out of whatever a model writes."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.search_tool_schema import MAX_QUERIES_PER_CALL, MAX_QUERY_CHARS, SEARCH_TOOL_SCHEMA
from verl_ext.method.tool_calls import invalid_call_response, parse_tool_calls, render_tool_call

queries_lists = st.lists(
    st.text(min_size=1).filter(lambda text: text.strip() != ""), min_size=1, max_size=10
).filter(lambda queries: not re.search("</?(think|tool_call|answer|question)>", "".join(queries)))
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "search"',
    ', "arguments": {"query_list": ["',
    '"]}}',
    "[" * 9999,
]


def wrap(call: Any) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@given(queries_lists)
def test_a_rendered_call_parses_to_its_queries(queries: list[str]) -> None:
    (call,) = parse_tool_calls(f"Let me look.\n{render_tool_call(queries)}")
    assert call.queries == tuple(queries)


def test_the_text_protocol_is_exactly_this() -> None:
    assert render_tool_call(["é"]) == (
        '<tool_call>\n{"name": "search", "arguments": {"query_list": ["é"]}}\n</tool_call>'
    )


@given(st.text() | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5)).map("".join))
def test_parsing_never_raises_and_every_call_is_valid_or_has_an_error(text: str) -> None:
    for call in parse_tool_calls(text):
        assert call.valid == (call.error is None)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_json_that_is_no_search_call_is_not_valid(value: Any) -> None:
    assert not any(call.valid for call in parse_tool_calls(wrap(value)))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (["search"], "JSON object"),
        ({"name": "browse", "arguments": {"query_list": ["x"]}}, "no such tool"),
        ({"name": "search"}, "list of strings"),
        ({"name": "search", "arguments": '{"query_list": ["x"]}'}, "list of strings"),
        ({"name": "search", "arguments": {"query_list": "x"}}, "list of strings"),
        ({"name": "search", "arguments": {"query_list": ["x", 1]}}, "list of strings"),
        ({"name": "search", "arguments": {"query_list": []}}, "empty"),
        ({"name": "search", "arguments": {"query_list": [" "]}}, "empty"),
        ({"name": "search", "arguments": {"query_list": ["\ud800"]}}, "empty"),
        ({"name": "search", "arguments": {"query_list": ["x", "I will search x.</think>"]}}, "a tag"),
        (
            {"name": "search", "arguments": {"query_list": ["x"] * (MAX_QUERIES_PER_CALL + 1)}},
            "more than 10 queries",
        ),
        (
            {"name": "search", "arguments": {"query_list": ["x" * (MAX_QUERY_CHARS + 1)]}},
            "more than 1000 char",
        ),
    ],
)
def test_an_invalid_call_is_answered_with_its_error(call: Any, why: str) -> None:
    (parsed,) = parse_tool_calls(wrap(call))
    assert why in invalid_call_response(parsed)


def test_text_that_is_not_json_is_an_invalid_call() -> None:
    (parsed,) = parse_tool_calls("<tool_call>search for it</tool_call>")
    assert "not JSON" in invalid_call_response(parsed)


def test_calls_come_in_order_and_an_open_one_is_no_call() -> None:
    text = (
        render_tool_call(["one"]) + "<tool_call>bad</tool_call>" + render_tool_call(["two"]) + "<tool_call>{"
    )
    assert [call.queries for call in parse_tool_calls(text)] == [("one",), None, ("two",)]


def test_the_schema_is_what_verl_accepts() -> None:
    schemas = pytest.importorskip("verl.tools.schemas")
    assert schemas.OpenAIFunctionToolSchema.model_validate(SEARCH_TOOL_SCHEMA).function.name == "search"
