"""The server as agents use it: OpenAI's client, messages, tools, streams and refusals."""

import json
import time
from functools import partial

import openai
import pytest
from families import family
from served_model import served_model

from environments.call import FORMS
from verl_ext.engine.api_answers import TextStream, heard
from verl_ext.method.chat import render_prompt_ids, turn_text
from verl_ext.method.prompts import challenger_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

MAX_SEQ_LEN = 600
QUESTION = [{"role": "user", "content": "Who came?"}]
DOCUMENT = challenger_messages("Orrin\nOrrin is a town.", 2, "short")
SEARCH = SEARCH_TOOL_SCHEMA


@pytest.fixture(scope="module")
def served(speaking_model):
    with served_model(speaking_model, "speaking", MAX_SEQ_LEN) as served:
        yield served


@pytest.fixture(scope="module")
def url(served):
    return served[0]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="None", max_retries=0, timeout=60) as client:
        yield client


def chat(client, messages=QUESTION, **fields):
    given = {"model": "speaking", "messages": messages, "temperature": 0, "max_tokens": 60}
    return client.chat.completions.create(**(given | fields))


def streamed(client, messages=QUESTION, **fields):
    return list(chat(client, messages, stream=True, **fields))


def calling_seed(client):
    """A seed with which the model calls the tool instead of answering."""
    for seed in range(40):
        said = chat(client, DOCUMENT, tools=[SEARCH], temperature=1, seed=seed).choices[0]
        if said.finish_reason == "tool_calls":
            return seed
    raise AssertionError("the model calls no tool")


def test_a_chat_continues_the_prompt_of_the_models_template(client, smollm2_tokenizer):
    answer = chat(client)
    ids = render_prompt_ids(smollm2_tokenizer, QUESTION, None)
    continued = client.completions.create(model="speaking", prompt=ids, temperature=0, max_tokens=60)
    assert answer.choices[0].message.content == continued.choices[0].text
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.total_tokens == len(ids) + answer.usage.completion_tokens


def test_a_written_call_is_a_tool_call_and_can_be_sent_back(client, smollm2_tokenizer):
    seed = calling_seed(client)
    message = chat(client, DOCUMENT, tools=[SEARCH], temperature=1, seed=seed).choices[0].message
    (call,) = message.tool_calls
    assert (call.type, call.function.name) == ("function", "search")
    assert json.loads(call.function.arguments) == {"query_list": ["town"]}
    assert "<tool_call>" not in (message.content or "")
    result = {"role": "tool", "tool_call_id": call.id, "content": "[1] Orrin: a town."}
    followed = chat(client, [*DOCUMENT, message.model_dump(), result], tools=[SEARCH])
    spelled = {"name": "search", "arguments": {"query_list": ["town"]}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": spelled}]}
    told = render_prompt_ids(smollm2_tokenizer, [*DOCUMENT, turn, result], [SEARCH])
    assert followed.usage.prompt_tokens == len(told)


def test_without_offered_tools_a_call_stays_text(client):
    seed = calling_seed(client)
    sampled = {"temperature": 1, "seed": seed}
    offered = chat(client, DOCUMENT, tools=[SEARCH], tool_choice="none", **sampled)
    assert offered.choices[0].message == chat(client, DOCUMENT, **sampled).choices[0].message
    assert offered.choices[0].message.tool_calls is None


@pytest.mark.parametrize("tools", [None, [SEARCH]])
def test_a_stream_equals_the_whole_answer(client, tools):
    given = {"tools": tools} if tools else {}
    for seed in range(4):
        sampled = {"temperature": 1, "seed": seed, **given}
        whole = chat(client, DOCUMENT, **sampled)
        events = streamed(client, DOCUMENT, stream_options={"include_usage": True}, **sampled)
        choices = [choice for event in events for choice in event.choices]
        content = "".join(choice.delta.content or "" for choice in choices)
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        expected = whole.choices[0].message
        assert content == (expected.content or "")
        assert [c.function for c in expected.tool_calls or ()] == [
            type(expected.tool_calls[0].function)(**call.function.model_dump()) for call in calls
        ]
        assert choices[-1].finish_reason == whole.choices[0].finish_reason
        assert events[-1].usage == whole.usage and not events[-1].choices
        assert len(choices) > 3 or calls or "<tool_call>" in content, "it comes in pieces"


def test_a_completion_is_streamed_without_its_stop_string(client):
    given = {"model": "speaking", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 30}
    free = client.completions.create(**given).choices[0].text
    stop = free[6:10]
    events = list(client.completions.create(**given, stop=[stop], stream=True))
    text = "".join(event.choices[0].text for event in events)
    assert text == free[: free.index(stop)] and events[-1].choices[0].finish_reason == "stop"


def test_several_answers_differ_and_a_seed_repeats_them(client):
    given = {"model": "speaking", "prompt": [5, 6, 7], "n": 4, "seed": 3, "max_tokens": 6}
    first, second = (client.completions.create(**given) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 1 and texts == [choice.text for choice in second.choices]
    assert first.usage is not None and first.usage.completion_tokens > 6
    streamed_texts = ["", "", "", ""]
    for event in client.completions.create(**given, stream=True):
        streamed_texts[event.choices[0].index] += event.choices[0].text
    assert streamed_texts == texts


def test_log_probs_are_those_of_the_sampled_tokens(client):
    said = chat(client, logprobs=True).choices[0]
    tokens = said.logprobs.content
    assert "".join(token.token for token in tokens).startswith(said.message.content)
    assert all(token.logprob <= 0 and token.top_logprobs == [] for token in tokens)


def test_the_model_is_listed_and_another_is_refused(client):
    assert [model.id for model in client.models.list()] == ["speaking"]
    assert client.models.retrieve("speaking").id == "speaking"
    with pytest.raises(openai.NotFoundError, match="this server has 'speaking'") as refused:
        chat(client, model="gpt-4o")
    assert refused.value.code == "model_not_found"


UNSUPPORTED = [({"response_format": {"type": "json_object"}}, "response_format")]
UNSUPPORTED += [({"logit_bias": {"5": 1}}, "logit_bias"), ({"presence_penalty": 0.5}, "presence_penalty")]
UNSUPPORTED += [({"tool_choice": "required", "tools": [SEARCH]}, "tool_choice")]
UNSUPPORTED += [({"parallel_tool_calls": False}, "parallel_tool_calls")]
UNSUPPORTED += [({"logprobs": True, "top_logprobs": 3}, "top_logprobs")]
UNSUPPORTED += [({"logprobs": True, "stream": True}, "logprobs"), ({"n": 0}, "n")]
UNSUPPORTED += [({"extra_body": {"guided_json": {}}}, "guided_json")]
UNSUPPORTED += [({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs")]
UNSUPPORTED += [({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages")]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **fields)
    assert str(refused.value.param).startswith(param) and param in str(refused.value)


def test_fields_that_ask_for_nothing_are_accepted(client):
    neutral = {"presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}}
    neutral |= {"user": "me", "metadata": {"run": "1"}, "n": 1, "stop": None, "store": False}
    assert chat(client, **neutral).choices[0].message == chat(client).choices[0].message


def test_a_too_long_prompt_gets_openais_error(client):
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {MAX_SEQ_LEN}") as refused:
        chat(client, [{"role": "user", "content": "long " * MAX_SEQ_LEN}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_a_stream_whose_client_leaves_frees_its_place(client, served):
    engine = served[1]
    before = engine.stats().tokens_out
    given = {"model": "speaking", "prompt": [9], "max_tokens": MAX_SEQ_LEN, "stop": None}
    with client.completions.create(**given, n=8, stream=True) as stream:
        next(iter(stream))
    deadline = time.monotonic() + 60
    while engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.stats().tokens_out - before < 8 * (MAX_SEQ_LEN - 1)


CALL = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'


def test_a_turn_with_a_malformed_call_stays_text():
    good = CALL
    content, calls = heard(f"So. {good}", [SEARCH], "hermes")
    assert content == "So." and [call.name for call in calls] == ["search"]
    broken = f"So. {good} <tool_call>{{oops</tool_call>"
    assert heard(broken, [SEARCH], "hermes") == (broken, ())
    assert heard(good, [], "hermes") == (good, ())


@pytest.mark.parametrize(
    ("opened", "text", "content", "names"),
    [
        ("<think>\n", f"maybe {CALL}", f"maybe {CALL}", []),
        ("<think>\n", f"maybe {CALL}</think>{CALL}", f"maybe {CALL}</think>", ["search"]),
        ("<think>\n\n</think>\n\n", CALL, None, ["search"]),
    ],
)
def test_thinking_that_the_prompt_opened_makes_no_call(opened, text, content, names):
    said, calls = heard(text, [SEARCH], "hermes", opened)
    assert (said, [call.name for call in calls]) == (content, names)


@pytest.mark.parametrize("form", FORMS)
def test_no_piece_of_a_call_or_a_stop_string_is_sent_early(form, smollm2_tokenizer):
    openings = FORMS[form].openings
    text = f"Ø 3 < 4, then \n{openings[-1]}more STOP"
    stream = TextStream(smollm2_tokenizer.decode, ("STOP",), openings)
    pieces = [stream.push(token) for token in smollm2_tokenizer.encode(text)]
    assert "".join(pieces) == stream.sent == "Ø 3 < 4, then"
    plain = TextStream(smollm2_tokenizer.decode, (), ())
    assert "".join(plain.push(token) for token in smollm2_tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {"query": "Ø"}}]'),
        ("llama3", '<|python_tag|>{"name": "search", "parameters": {"query": "Ø"}}'),
    ],
)
def test_a_call_that_a_special_token_marks_is_held_back_and_heard(name, call, smollm2_tokenizer):
    tokenizer = family(smollm2_tokenizer, name)
    ids = tokenizer.encode(f"Let me see. {call}", add_special_tokens=False)
    stream = TextStream(partial(turn_text, tokenizer), (), FORMS[name].openings)
    assert "".join(stream.push(token) for token in ids) == "Let me see."
    said, (made,) = heard(turn_text(tokenizer, ids), [SEARCH], name)
    assert (said, made.name, made.arguments) == ("Let me see.", "search", {"query": "Ø"})
