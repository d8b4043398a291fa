"""Search calls parsed from whatever a model writes."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.search_calls import (
    MAX_QUERIES_PER_CALL,
    MAX_QUERY_CHARS,
    invalid_call_response,
    parse_tool_calls,
    render_tool_call,
)

TEXTS = st.text(min_size=1).filter(lambda text: text.strip() != "")
queries_lists = st.lists(TEXTS, min_size=1, max_size=10).filter(
    lambda queries: not re.search("</?(think|tool_call|answer|question)>", "".join(queries))
)
FRAGMENTS = ["<tool_call>", "</tool_call>", '{"name": "search"', ', "arguments": {"query_list": ["']
FRAGMENTS += ['"]}}', "[" * 9999]


def wrap(call):
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@given(queries_lists)
def test_a_rendered_call_parses_to_its_queries(queries):
    (call,) = parse_tool_calls(f"Let me look.\n{render_tool_call(queries)}")
    assert call.queries == tuple(queries)


def test_the_text_protocol_is_exactly_this():
    expected = '<tool_call>\n{"name": "search", "arguments": {"query_list": ["é"]}}\n</tool_call>'
    assert render_tool_call(["é"]) == expected


@given(st.text() | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5)).map("".join))
def test_every_parsed_call_is_valid_or_has_an_error(text):
    for call in parse_tool_calls(text):
        assert call.valid == (call.error is None)


LEAVES = st.none() | st.booleans() | st.floats() | st.text()


@given(st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_other_json_is_not_a_valid_call(value):
    assert not any(call.valid for call in parse_tool_calls(wrap(value)))


def asked(queries):
    return {"name": "search", "arguments": {"query_list": queries}}


INVALID = [(["search"], "JSON object")]
INVALID += [({"name": "browse", "arguments": {"query_list": ["x"]}}, "no such tool")]
INVALID += [({"name": "search"}, "list of strings")]
INVALID += [({"name": "search", "arguments": '{"query_list": ["x"]}'}, "list of strings")]
INVALID += [(asked("x"), "list of strings"), (asked(["x", 1]), "list of strings"), (asked([]), "empty")]
INVALID += [(asked([" "]), "empty"), (asked(["\ud800"]), "empty")]
INVALID += [(asked(["x", "I will search x.</think>"]), "a tag")]
INVALID += [(asked(["x"] * (MAX_QUERIES_PER_CALL + 1)), "more than 10 queries")]
INVALID += [(asked(["x" * (MAX_QUERY_CHARS + 1)]), "more than 1000 char")]


@pytest.mark.parametrize(("call", "why"), INVALID)
def test_an_invalid_call_is_answered_with_its_error(call, why):
    (parsed,) = parse_tool_calls(wrap(call))
    assert why in invalid_call_response(parsed)


def test_calls_come_in_order_and_need_their_end():
    one, two = render_tool_call(["one"]), render_tool_call(["two"])
    calls = parse_tool_calls(f"{one}<tool_call>bad</tool_call>{two}<tool_call>{{")
    assert [call.queries for call in calls] == [("one",), None, ("two",)]
    assert "not JSON" in invalid_call_response(calls[1])
