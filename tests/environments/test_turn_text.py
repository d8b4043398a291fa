"""Thinking, calls and the rest of a turn: told apart by one reader."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.call import FORMS, outside_calls, parse_calls
from environments.turn_text import after_thinking, tagged_calls, thinking, turn_parts

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("a", "b")]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", '{"x": 1}', " so "]


def tag(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


A, B, END_IN_CALL = tag("a"), tag("b"), tag("a", q="what </think> means")


TURNS = [(f"<think>maybe {A}</think>{B}", ["b"], B)]
TURNS += [(f"<think>maybe {A}</think>\n<answer>x</answer>", [], "\n<answer>x</answer>")]
TURNS += [(f"<think>maybe {A}", [], ""), (f"Sure. <think>maybe {A} <answer>x</answer>", [], "")]
TURNS += [(f"the template opened it: {A} hm</think>{B}", ["b"], B)]
TURNS += [(f"<think>one</think>{A}<think>two {A}</think>{B}", ["a", "b"], B)]
TURNS += [(f"<think>one <think>two</think> {A} three</think>{B}", ["b"], B)]
TURNS += [(f"<think>the tag <think> opens it {A}</think>{B}", ["b"], B)]
TURNS += [(f"I could write <tool_call> now.</think>{B}", ["b"], B)]
TURNS += [(f"I could write <tool_call> now. {A} No.</think>{B}", ["b"], B)]
TURNS += [(END_IN_CALL, ["a"], END_IN_CALL), (f"<think>so</think>{END_IN_CALL}", ["a"], END_IN_CALL)]
TURNS += [(f"<THINK>{A}", ["a"], f"<THINK>{A}"), ("", [], "")]


@pytest.mark.parametrize(("text", "calls", "said"), TURNS)
def test_a_call_or_an_answer_in_the_thinking_is_a_draft(text, calls, said):
    found = parse_calls(text, TOOLS)
    assert ([call.name for call in found], after_thinking(text)) == (calls, said)
    assert all(call.valid for call in found)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<think>[{"name": "a"}]</think>[{"name": "b"}]', ["b"]),
        ('<think>[{"name": "a"}]', []),
        ('[{"name": "a"}] hm</think>\n[{"name": "b"}, {"name": "a"}]', ["b", "a"]),
    ],
)
def test_drafts_of_calls_as_one_array_are_not_made_either(text, names):
    assert [call.name for call in parse_calls(text, TOOLS, "xlam")] == names


def test_the_text_without_calls_keeps_the_thinking_with_its_drafts():
    text = f"<think>maybe {A}</think>I call it. {A}"
    assert outside_calls(text) == f"<think>maybe {A}</think>I call it. "
    assert outside_calls('<think>[1]</think>[{"name": "a"}]', "xlam") == "<think>[1]</think>"


THOUGHTS = [("<think>\n one \n</think>x<think>two</think>y", "one\ntwo", True)]
THOUGHTS += [("it began before</think>x", "it began before", True)]
THOUGHTS += [("x<think>on and on", "on and on", False), ("x", "", True), ("<think>", "", False)]


@pytest.mark.parametrize(("text", "thought", "ended"), THOUGHTS)
def test_thinking_is_the_rest_of_the_turn(text, thought, ended):
    assert thinking(text) == (thought, ended)


@given(st.lists(st.sampled_from(TAGS) | st.text(max_size=3)).map("".join), st.sampled_from(list(FORMS)))
def test_every_text_is_cut_in_order_and_keeps_all_but_calls(text, form):
    parts = turn_parts(text)
    assert "".join(thought + said for thought, said in parts) == text
    assert not any("<think>" in said and not tagged_calls(said)[0] for _, said in parts)
    if not parse_calls(text, TOOLS, form):
        assert outside_calls(text, form) == text


def test_many_tags_without_an_end_are_read_in_time():
    text = "<tool_call>" * 20_000 + "</think>" + "<think>" * 20_000
    assert [said for _, said in turn_parts(text)] == ["", ""] and parse_calls(text, TOOLS) == ()
    assert outside_calls(f"{A}{'<tool_call>' * 20_000}") == "<tool_call>" * 20_000
