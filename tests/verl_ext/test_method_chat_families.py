"""Turns joined one by one, with the chat templates of other families, against the whole conversation."""

import copy

import pytest
from families import family
from hypothesis import given
from hypothesis import strategies as st

from drzero.preflight.growth import growth_fault
from verl_ext.method.chat import (
    call_form,
    next_turn_ids,
    opened_thinking,
    read_turn,
    render_prompt_ids,
    turn_end_id,
    turn_ends,
    turn_text,
)
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA, parse_tool_calls

TOOLS = [SEARCH_TOOL_SCHEMA]
WITH_TOOLS = ("llama3", "mistral", "qwen3")
ALL = (*WITH_TOOLS, "gemma")
ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "qwen3": "<|im_end|>"}
SEPARATORS = {"gemma": "\n", "qwen3": "\n"}


@pytest.fixture(scope="module")
def families(smollm2_tokenizer):
    return {name: family(smollm2_tokenizer, name) for name in ALL}


def said(role, content):
    return {"role": role, "content": content}


def calling(queries):
    function = {"name": "search", "arguments": {"query_list": queries}}
    return said("assistant", "") | {
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}]
    }


texts = st.text(max_size=12) | st.sampled_from(
    ["</s>", "<|im_end|>\n", "<s>[INST]", "<|eot_id|>", "\n\n", "</think>"]
)
# What a template keeps as it is: without blanks around it, and no token of its own with what comes before it.
plain = st.from_regex(r"[A-Za-z][^\s<\[\]>|]{0,8}", fullmatch=True)
talks = st.lists(st.tuples(plain, texts.map("Q".__add__)), min_size=1, max_size=4)


def joined(tokenizer, messages, turns, tools=None):
    """The prompt before the last turn, of these turns as sampled and what answered them."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    ids = render_prompt_ids(tokenizer, messages[:first], tools)
    for turn, answer in zip(turns, messages[first + 1 :: 2], strict=True):
        ids += turn + next_turn_ids(tokenizer, turn, [answer])
    return ids


def sampled(tokenizer, text):
    return [*tokenizer.encode(text, add_special_tokens=False), turn_end_id(tokenizer)]


@pytest.mark.parametrize("name", ALL)
def test_a_turn_ends_with_the_templates_own_token(families, name):
    tokenizer = families[name]
    assert tokenizer.convert_ids_to_tokens(turn_end_id(tokenizer)) == ENDS[name]
    others = {"llama3": {"<|eom_id|>"}, "gemma": {"<eos>"}}.get(name, set())
    assert set(tokenizer.convert_ids_to_tokens(turn_ends(tokenizer))) == {ENDS[name], *others}


@pytest.mark.parametrize("name", ["mistral", "gemma"])
@given(talk=talks)
def test_a_talk_joined_turn_by_turn_is_the_whole_talk_rendered_once(families, name, talk):
    tokenizer = families[name]
    messages = [said("user", "Who?")]
    for answer, question in talk:
        messages += [said("assistant", answer), said("user", question)]
    # Mistral's older templates write a blank before an answer, and this vocabulary keeps it.
    blank = " " if name == "mistral" else ""
    turns = [sampled(tokenizer, blank + answer) for answer, _ in talk]
    ids = joined(tokenizer, messages, turns)
    assert ids == render_prompt_ids(tokenizer, messages, None)


@pytest.mark.parametrize("name", ALL)
@given(talk=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_only_an_assistants_own_turn_may_be_rendered_in_another_way(families, name, talk):
    tokenizer = families[name]
    messages = [said("user", "Who?")]
    for answer, question in talk:
        messages += [said("assistant", answer), said("user", question)]
    if not any(token in answer for answer, _ in talk for token in ENDS.values()):
        assert growth_fault(tokenizer, messages) is None
    ids = joined(tokenizer, messages, [sampled(tokenizer, answer) for answer, _ in talk])
    fresh = render_prompt_ids(tokenizer, messages, None)
    new = next_turn_ids(tokenizer, [turn_end_id(tokenizer)], messages[-1:])
    assert ids[-len(new) :] == new == fresh[-len(new) :]


@pytest.mark.parametrize("name", WITH_TOOLS)
@given(results=st.lists(texts, min_size=1, max_size=3))
def test_results_of_tools_are_joined_as_the_template_writes_them(families, name, results):
    tokenizer = families[name]
    messages = [said("user", "Who?")]
    for number, result in enumerate(results):
        messages += [calling([f"town {number}"]), said("tool", result)]
    assert growth_fault(tokenizer, messages, TOOLS) is None
    prefix = render_prompt_ids(tokenizer, messages[:1], TOOLS)
    ids = joined(tokenizer, messages, [sampled(tokenizer, "call")] * len(results), TOOLS)
    assert ids[: len(prefix)] == prefix


@pytest.mark.parametrize("name", ALL)
@given(turn=st.lists(st.integers(20, 900), min_size=1, max_size=6), question=texts)
def test_a_cut_turn_gets_no_end_and_no_separator(families, name, turn, question):
    tokenizer, answer = families[name], said("user", f"Q{question}")
    ended = next_turn_ids(tokenizer, [*turn, turn_end_id(tokenizer)], [answer])
    cut = next_turn_ids(tokenizer, turn, [answer])
    separator = tokenizer.encode(SEPARATORS.get(name, ""), add_special_tokens=False)
    assert ended == separator + cut


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_a_text_begins_once(families, name):
    tokenizer = families[name]
    messages = [said("user", "Who?"), said("assistant", "Vell."), said("user", "Where?")]
    ids = joined(tokenizer, messages, [sampled(tokenizer, "Vell.")])
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_what_ends_a_turn_that_waits_for_a_tool_is_followed_by_its_result(families):
    tokenizer = families["llama3"]
    waits, over = (tokenizer.convert_tokens_to_ids(token) for token in ("<|eom_id|>", "<|eot_id|>"))
    result = [said("tool", "text")]
    assert next_turn_ids(tokenizer, [9, waits], result) == next_turn_ids(tokenizer, [9, over], result)


def test_sampled_thinking_stays_where_the_template_would_leave_it_out(families):
    tokenizer = families["qwen3"]
    first = render_prompt_ids(tokenizer, [said("user", "Who?")], None)
    assert opened_thinking(tokenizer, first) == "<think>\n\n"
    turn = sampled(tokenizer, "Vell?\n</think>\n\nVell.")
    ids = first + turn + next_turn_ids(tokenizer, turn, [said("user", "Where?")])
    assert "Vell?\n</think>" in tokenizer.decode(ids)
    answer = said("assistant", read_turn(tokenizer, first, turn))
    messages = [said("user", "Who?"), answer, said("user", "Where?")]
    assert "Vell?" not in tokenizer.decode(render_prompt_ids(tokenizer, messages, None))
    assert growth_fault(tokenizer, messages) is None


SYSTEM = said("system", "Be brief.")
ASKED = [said("user", "Who?"), said("assistant", "Vell."), said("user", "Where?")]
SEARCHED = [said("user", "Who?"), calling(["town"]), said("tool", "text")]


@pytest.mark.parametrize(
    ("name", "messages", "tools", "place"),
    [
        (
            "mistral",
            [SYSTEM, *ASKED],
            None,
            "writes messages 1–2 (system, user) as '<s>[INST] Who?[/INST] Vell.</s>[INST] Be",
        ),
        (
            "mistral",
            [SYSTEM, *SEARCHED],
            TOOLS,
            "[INST] Be brief.\\n\\nWho?[/INST]', once message 4 (tool) follows",
        ),
        ("mistral", [*SEARCHED, *ASKED[1:]], TOOLS, "writes message 1 (user) as '<s>[INST] Who?"),
        ("gemma", [SYSTEM, *ASKED], None, "take messages 1–2 (system, user) (System role not supported)"),
        ("gemma", SEARCHED, TOOLS, "does not take message 3 (tool) (Conversation roles must alternate"),
        ("llama3", [SYSTEM, *SEARCHED, *ASKED[1:]], TOOLS, None),
        ("qwen3", [SYSTEM, *SEARCHED, *ASKED[1:]], TOOLS, None),
    ],
)
def test_a_conversation_that_does_not_grow_is_named_with_its_place(families, name, messages, tools, place):
    fault = growth_fault(families[name], messages, tools)
    assert fault is None if place is None else fault is not None and place in fault


@pytest.mark.parametrize(
    ("name", "form"), [("llama3", "llama3"), ("mistral", "mistral"), ("gemma", "hermes"), ("qwen3", "hermes")]
)
def test_calls_are_read_as_the_models_template_writes_them(families, name, form):
    assert call_form(families[name]) == form
    assert call_form(families[name], "xlam") == "xlam"


def test_calls_in_a_form_that_nothing_reads_are_refused(families):
    other = copy.deepcopy(families["qwen3"])
    other.chat_template = other.chat_template.replace("tool_call>", "act>")
    with pytest.raises(ValueError, match=r"writes calls in a form that is not known: .*<act>"):
        call_form(other)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", 'Let me see.[TOOL_CALLS][{"name": "search", "arguments": {"query_list": ["town"]}}]'),
        ("llama3", '<|python_tag|>{"name": "search", "parameters": {"query_list": ["town"]}}'),
    ],
)
def test_a_special_token_that_marks_a_call_stays_in_a_turns_text(families, name, text):
    tokenizer = families[name]
    assert text not in tokenizer.decode(sampled(tokenizer, text), skip_special_tokens=True)
    assert read_turn(tokenizer, [], sampled(tokenizer, text)) == text
    (call,) = parse_tool_calls(text, name)
    assert call.queries == ("town",)


@given(text=texts)
def test_without_such_a_token_a_turns_text_is_the_decoded_one(families, text):
    for tokenizer in families.values():
        ids = sampled(tokenizer, text)
        assert turn_text(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=True)
