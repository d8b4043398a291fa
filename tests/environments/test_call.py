"""Tool calls in a model's text, checked against the declared tools. No text raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.call import FORMS, Call, outside_calls, parse_calls
from environments.conversation import Conversation, Turn, tool_message, user_message

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "stop")]


def call(raw):
    (found,) = parse_calls(f"text <tool_call>{raw}</tool_call> more", TOOLS)
    return found


def test_a_call_of_a_declared_tool_is_valid():
    found = call('{"name": "add", "arguments": {"a": 1}}')
    assert (found.name, found.arguments, found.valid) == ("add", {"a": 1}, True)


@pytest.mark.parametrize(
    "absent", ["null", '""', '" "', '"null"', '"None"', '"{}"', "{}", "[]", '"[]"', r'"\"\""']
)
def test_arguments_may_be_left_out_in_any_spelling(absent):
    found = call(f'{{"name": "stop", "arguments": {absent}}}')
    assert (found.arguments, found.error) == ({}, None)
    assert call('{"name": "stop"}').arguments == {}


def test_arguments_may_be_written_as_text():
    assert call(json.dumps({"name": "add", "arguments": '{"a": 1}'})).arguments == {"a": 1}


@pytest.mark.parametrize(
    "raw",
    [
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "add", "arguments": {"a": ["\\ude00"]}}',
        '{"name": "add", "arguments": {"\\udfff": 1}}',
        json.dumps({"name": "add", "arguments": '{"a": "\\ud83d"}'}),
        '{"name": "add", "arguments": {"a": [NaN, -Infinity]}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": ' + "[" * 900 + "]" * 900 + "}}",
    ],
    ids=["name", "value", "key", "in a text", "no number", "too large", "too deep to be written"],
)
def test_a_call_that_no_record_can_hold_is_invalid(raw):
    found = call(raw)
    assert "surrogate" in str(found.error) and (found.name, found.arguments) == (None, None)
    (xlam,) = parse_calls(f"[{raw}]", TOOLS, "xlam")
    for written in (found, xlam):
        told = Conversation((), (Turn("", (written,)),)).to_dict()
        assert json.dumps(told, ensure_ascii=False).encode()
    pair = call('{"name": "add", "arguments": {"a": "\\ud83d\\ude00"}}')
    assert pair.arguments == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("raw", "error", "undeclared"),
    [
        ('{"name": "sub", "arguments": {}}', "there is no tool 'sub'; the tools are add, stop", True),
        ('{"arguments": {}}', "the call names no tool", False),
        ('{"name": "add", "arguments": [1]}', "the arguments of add are not a JSON object", False),
        ('{"name": "add", "arguments": "1 + 1"}', "the arguments of add are not a JSON object", False),
        ("add(1)", "the call is not a JSON object", False),
        ("[1]", "the call is not a JSON object", False),
    ],
)
def test_a_call_that_cannot_be_made_says_why(raw, error, undeclared):
    found = call(raw)
    assert (found.error, found.undeclared, found.valid) == (error, undeclared, False)


def test_without_tools_every_call_is_of_one_that_is_not_declared():
    (found,) = parse_calls('<tool_call>{"name": "add"}</tool_call>', [])
    assert found.undeclared and found.error == "there is no tool 'add'; the tools are none"


@given(
    st.text() | st.text(alphabet='{}[]"a:,').map("<tool_call>{}</tool_call>".format),
    st.sampled_from(list(FORMS)),
)
def test_no_text_of_a_model_raises(text, form):
    for found in parse_calls(text, TOOLS, form):
        assert found.valid == (found.error is None)


def test_deeply_nested_json_is_an_invalid_call():
    assert not call("[" * 100_000).valid


ADD = {"name": "add", "arguments": {"a": 1}}
AS_LLAMA = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "names"),
    [
        ("llama3", AS_LLAMA, ["add"]),
        ("llama3", f"<think>So.</think>\n\n{AS_LLAMA}; {AS_LLAMA}", ["add", "add"]),
        ("llama3", f"Let me see.<|python_tag|>{AS_LLAMA}", ["add"]),
        ("llama3", "<|python_tag|>add.call(a=1)", [None]),
        ("llama3", "<|python_tag|>", [None]),
        ("llama3", f"It is {AS_LLAMA}", []),
        ("llama3", f"{AS_LLAMA} or so", []),
        ("llama3", AS_LLAMA[:-1], []),
        ("llama3", '{"name": "Orrin"}', []),
        ("llama3", "3; 4", []),
        ("llama3", "", []),
        ("mistral", f"[TOOL_CALLS] [{json.dumps(ADD)}]", ["add"]),
        ("mistral", f"Let me see.[TOOL_CALLS]{json.dumps([ADD | {'id': 'a1b2c3d4e'}, ADD])}", ["add", "add"]),
        ("mistral", f"[TOOL_CALLS]{json.dumps(ADD)}", [None]),
        ("mistral", "[TOOL_CALLS][]", [None]),
        ("mistral", "[TOOL_CALLS]", [None]),
        ("mistral", f"[{json.dumps(ADD)}]", []),
    ],
)
def test_calls_are_read_in_the_form_of_their_family(form, text, names):
    found = parse_calls(text, TOOLS, form)
    assert [call.name for call in found] == names
    for call in found:
        assert (call.arguments == {"a": 1}) if call.valid else call.error == "the call is not a JSON object"
    assert not found or AS_LLAMA not in outside_calls(text, form)


json_values = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text(), max_size=3)


@given(st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1, max_size=3), st.text())
def test_every_form_reads_the_calls_that_are_written_in_it(arguments, before):
    before = "".join(character for character in before if character not in "<>[{")
    calls = [{"name": "add", "arguments": one} for one in arguments]
    llama = [json.dumps({"name": "add", "parameters": one}) for one in arguments]
    texts = {
        "hermes": before + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls),
        "xlam": json.dumps(calls),
        "llama3": f"{before}<|python_tag|>{'; '.join(llama)}",
        "mistral": f"{before}[TOOL_CALLS]{json.dumps(calls)}",
    }
    assert set(texts) == set(FORMS)
    for form, text in texts.items():
        assert [call.arguments for call in parse_calls(text, TOOLS, form)] == arguments


CALLS = st.builds(
    Call,
    raw=st.text(),
    name=st.none() | st.text(),
    arguments=st.none() | st.dictionaries(st.text(), st.integers()),
    error=st.none() | st.text(),
    undeclared=st.booleans(),
)


@given(st.lists(CALLS, max_size=3), st.text(), st.none() | st.text(), st.booleans())
def test_a_conversation_survives_its_json_form(calls, text, said, truncated):
    answers = [tool_message(f"answer {place}") for place, _ in enumerate(calls)]
    answers += [user_message(said)] if said is not None else []
    turn = Turn(text, tuple(calls), truncated, tuple(answers))
    whole = Conversation((user_message("start"),), (turn, Turn("end")))
    assert Conversation.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole
