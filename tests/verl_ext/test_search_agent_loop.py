"""The agent loop over veRL's own state machine, with a scripted engine and an HTTP search service."""

import asyncio
import copy
import sys

import pytest
from agent_loops import Engine, run_loop
from conftest import unused_port
from families import family
from fastapi.responses import JSONResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from told_model import Told
from verl.experimental.agent_loop.tool_agent_loop import ToolListWrap
from verl.experimental.agent_loop.tool_parser import ToolParser

from data.search_taskset import SearchTaskset
from environments.row import Row
from search.client import SearchClient, SearchRequestError
from verl_ext.clients.search_agent import SearchAgent
from verl_ext.episodes import EpisodeLimits, play_row
from verl_ext.method.chat import call_form, render_prompt_ids, tool_turn_ids, turn_ends
from verl_ext.method.demonstration import encode, messages_of
from verl_ext.method.format_score import think_part
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import solver_messages
from verl_ext.method.search_calls import (
    MAX_CALLS_PER_TURN,
    SEARCH_TOOL_SCHEMA,
    parse_tool_calls,
    render_tool_call,
)
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory
from verl_ext.rollout.search_agent_loop import PARSER_NAME, SearchAgentLoop, SearchCallParser
from verl_ext.rollout.search_tool import UNAVAILABLE, SearchTool

PASSAGE = {"title": "Vell", "text": "A river.", "contents": "Vell\nA river."}
PROMPT = [{"role": "user", "content": "Ask."}]
FINAL = "<question>Which?</question><answer>Vell</answer>"
VELL = render_tool_call(["Vell"])


@pytest.fixture
def url(start_peer):
    return start_peer("/retrieve", library).url


def roll_out(tokenizer, url, *turns, response_length=400, cap=100):
    """One rollout of veRL's loop."""
    limits = {"max_user_turns": 5, "max_assistant_turns": 5, "max_parallel_calls": MAX_CALLS_PER_TURN}
    shown = {"max_tool_response_length": 1000, "tool_response_truncate_side": "middle"}
    multi_turn = {"format": PARSER_NAME, **limits, **shown}
    rollout = {"multi_turn": multi_turn, "prompt_length": 300, "response_length": response_length}
    tool = SearchTool({"retrieval_url": url, "topk": 2, "deadline_s": 2.0, "response_limit": 300}, None)
    engine = Engine(tokenizer, *turns)
    row = {"raw_prompt": PROMPT, "tools_kwargs": {}, "extra_info": {}}
    own = {"tools": ToolListWrap([tool]), "max_tokens_per_turn": cap}
    rollout["full_determinism"] = False
    return run_loop(SearchAgentLoop, rollout, engine, tokenizer, row, **own), engine


def library(request):
    return {"result": [[PASSAGE] * 2 for _ in request["queries"]]}


def opening(tokenizer, opens):
    own = copy.deepcopy(tokenizer)
    own.chat_template += f"{{{{ {opens!r} if add_generation_prompt else '' }}}}"
    return own


def trajectory(output):
    return Trajectory.from_dict(output.extra_fields["trajectory"])


def test_a_search_is_a_turn_with_the_text_as_shown(tokenizer, url):
    output, engine = roll_out(tokenizer, url, VELL, FINAL)
    turn, last = trajectory(output).turns
    shown = format_passages(["Vell"], [[PASSAGE] * 2], 300)
    assert turn.calls[0].queries == ("Vell",) and not turn.calls[0].failed
    assert turn.calls[0].response == shown
    assert (last.text, last.calls, last.truncated) == (FINAL, (), False)
    assert output.extra_fields["token_drift"] == 0
    prompt = render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])
    ids = [*tokenizer.encode(VELL, add_special_tokens=False), tokenizer.eos_token_id]
    assert engine.inputs == [prompt, prompt + ids + tool_turn_ids(tokenizer, ids, [shown])]
    assert output.prompt_ids == prompt


ASK_VELL = '{"name": "search", "%s": {"query_list": ["Vell"]}}'
FAMILIES = {
    "llama3": ASK_VELL % "parameters",
    "mistral": f"Let me see.[TOOL_CALLS][{ASK_VELL % 'arguments'}]",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_another_family_searches_in_its_own_form(smollm2_tokenizer, url, name):
    tokenizer, call = family(smollm2_tokenizer, name), FAMILIES[name]
    output, engine = roll_out(tokenizer, url, call, FINAL)
    turn, last = trajectory(output).turns
    assert (turn.text, turn.calls[0].queries, last.text) == (call, ("Vell",), FINAL)
    prompt = render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])
    shown = tool_turn_ids(tokenizer, engine.outputs[0], [turn.calls[0].response])
    assert engine.inputs == [prompt, prompt + engine.outputs[0] + shown]
    ids = output.prompt_ids + output.response_ids
    assert ids.count(tokenizer.bos_token_id) == 1 and output.extra_fields["token_drift"] == 0
    trained = [i for i, kept in zip(output.response_ids, output.response_mask, strict=True) if kept]
    assert trained == engine.outputs[0] + engine.outputs[1]
    assert engine.stops == [sorted(turn_ends(tokenizer))] * 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_turn_of_another_family_is_told_from_one_that_ended(smollm2_tokenizer, url, name):
    tokenizer = family(smollm2_tokenizer, name)
    length = len(tokenizer.encode(FINAL, add_special_tokens=False))
    ended, _ = roll_out(tokenizer, url, FINAL, cap=length + 1)
    cut, _ = roll_out(tokenizer, url, FINAL, cap=length)
    assert [one.truncated for output in (ended, cut) for one in trajectory(output).turns] == [False, True]


def test_an_engine_that_returns_no_token_loses_the_rollout(tokenizer, url):
    with pytest.raises(RuntimeError, match="returned no token"):
        roll_out(tokenizer, url, FINAL, cap=0)


SEVERAL = render_tool_call(["Vell", "Orrin"]) + render_tool_call(["Ostrel"])
LEARNT = [(None, "", [VELL, SEVERAL, "no answer"]), (None, "", [SEVERAL, ""]), (None, "", [VELL, " \né "])]
LEARNT += [(None, "<think>\n", [f"So.</think>{SEVERAL}", f"\nSo.</think>{FINAL}"])]
LEARNT += [(None, "<think>\n\n</think>\n\n", [VELL, FINAL])]
LEARNT += [("qwen3", "", [f"So.\n</think>\n\n{SEVERAL}", f"\nSo.</think>{VELL}", f"So.</think>{FINAL}"])]


@pytest.mark.parametrize(("name", "opens", "turns"), LEARNT)
def test_a_demonstration_has_the_ids_of_the_rollout_that_said_it(tokenizer, url, name, opens, turns):
    tokenizer = opening(family(tokenizer, name) if name else tokenizer, opens)
    output, _ = roll_out(tokenizer, url, *turns)
    example = encode(tokenizer, messages_of(PROMPT, trajectory(output)))
    assert example.ids_T == output.prompt_ids + output.response_ids
    assert example.own_T == [False] * len(output.prompt_ids) + list(map(bool, output.response_mask))


@pytest.mark.parametrize("blanks", ["", " ", "\r\n"])
def test_a_thought_that_the_template_opens_is_not_opened_twice(tokenizer, blanks):
    tokenizer = opening(tokenizer, "<think>\n")
    said, expected = (
        encode(tokenizer, [*PROMPT, {"role": "assistant", "content": f"<think>{each}So.</think>"}])
        for each in (blanks, "\n")
    )
    assert said == expected


def test_a_service_that_is_down_or_keeps_failing_marks_the_call_as_failed(tokenizer, start_peer):
    failing = start_peer("/retrieve", lambda _: 503).url
    for url, cause in ((f"http://127.0.0.1:{unused_port()}", "ConnectError"), (failing, "503")):
        output, _ = roll_out(tokenizer, url, VELL, FINAL)
        (call,) = trajectory(output).failed_calls
        assert call.response == UNAVAILABLE and cause in str(call.error)
        assert output.extra_fields["token_drift"] == 0


DRAFT = f"<think>maybe {VELL}</think>"


DRAFTS = [("", [DRAFT + FINAL], 0, 1.0), ("", [DRAFT + VELL, FINAL], 1, 0.5)]
DRAFTS += [("", [f"<think>maybe {VELL}"], 0, 0.0), ("<think>\n", [f"maybe {VELL}"], 0, 0.0)]
DRAFTS += [("<think>\n", [f"So.</think>{VELL}", f"So.</think>{FINAL}"], 1, 1.0)]
DRAFTS += [("<think>\n\n</think>\n\n", [VELL, FINAL], 1, 1.0)]


@pytest.mark.parametrize(("opens", "turns", "searches", "think"), DRAFTS)
def test_a_call_in_the_thinking_is_not_searched_whoever_opened_it(
    tokenizer, start_peer, opens, turns, searches, think
):
    peer, own = start_peer("/retrieve", library), opening(tokenizer, opens)
    output, engine = roll_out(own, peer.url, *turns, cap=200)
    assert own.decode(engine.inputs[0]).endswith("<|im_start|>assistant\n" + opens)
    found = trajectory(output)
    assert [turn.text for turn in found.turns] == [opens + turn for turn in turns]
    assert (len(found.calls), len(peer.requests), think_part(found)) == (searches, searches, think)
    conversation, _ = converse(own, start_peer, peer.url, *turns, cap=200)
    assert conversation.trajectory == found


def converse(tokenizer, start_peer, url, *turns, response_length=400, cap=100):
    """The script and limits of `roll_out`, played by the agent for served models."""
    script = [[*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id] for turn in turns]
    limit = len(render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])) + response_length

    def complete(request):
        ids = script[len(model.requests) - 1][: request["max_tokens"]]
        reason = "stop" if ids[-1] == tokenizer.eos_token_id else "length"
        return {"choices": [{"text": "by its ids", "token_ids": ids, "finish_reason": reason}]}

    model = start_peer("/v1/completions", complete)

    async def run():
        limits = {"max_tokens_per_turn": cap, "max_context_tokens": limit, "max_turns": 5}
        search = SearchClient(url, topk=2, deadline_s=2.0)
        limits |= {"topk": 2, "tool_response_limit": 300}
        agent = SearchAgent(f"{model.url}/v1/completions", "policy", tokenizer, search, **limits)
        try:
            return await agent.converse(PROMPT)
        finally:
            await agent.aclose()

    return asyncio.run(run()), model


@pytest.mark.parametrize(
    ("status", "detail"), [(413, "the body is longer than 9 bytes"), (422, "too long - at `$.queries[...]`")]
)
def test_refused_queries_are_an_invalid_call_for_both(tokenizer, start_peer, status, detail):
    url = start_peer("/retrieve", lambda _: JSONResponse({"detail": detail}, status)).url
    output, engine = roll_out(tokenizer, url, VELL, FINAL)
    conversation, model = converse(tokenizer, start_peer, url, VELL, FINAL)
    (call,) = trajectory(output).calls
    assert not call.valid and not call.failed
    assert call.error == f"the search service refuses these queries ({detail})"
    assert call.response.startswith(f"Error: {call.error}. A call looks like ")
    assert conversation.finished and conversation.trajectory == trajectory(output)
    assert [request["prompt"] for request in model.requests] == engine.inputs


def test_a_wrong_token_ends_the_run(tokenizer, start_peer):
    refusal = JSONResponse({"detail": "a bearer token is needed"}, 401)
    with pytest.raises(SearchRequestError, match="HTTP 401: a bearer token is"):
        roll_out(tokenizer, start_peer("/retrieve", lambda _: refusal).url, VELL, FINAL)


SCRIPTS = {
    "no search": ([FINAL], {}),
    "a search": ([VELL, FINAL], {}),
    "two searches": ([f"<think>A river?</think>\n{VELL}", f"<think>So.</think>\n{VELL}", FINAL], {}),
    "several calls in a turn": ([VELL * 2 + render_tool_call(["Orrin", "Ostrel"]), FINAL], {}),
    "an invalid call": ([f"<tool_call>Vell</tool_call>{VELL}", FINAL], {}),
    "too many calls": ([VELL * (MAX_CALLS_PER_TURN + 1), FINAL], {"response_length": 1500, "cap": 600}),
    "neither call nor question": (["I give up."], {}),
    "special tokens in a turn": (["<|im_start|>assistant\n" + VELL, "<|endoftext|>" + FINAL], {}),
    "a call in the last turn": ([VELL] * 5, {"response_length": 1500}),
    "a turn cut by its cap": ([FINAL], {"cap": 5}),
    "a turn cut by the room left": ([VELL, FINAL], {"response_length": 110}),
}


@pytest.mark.parametrize(("turns", "limits"), SCRIPTS.values(), ids=SCRIPTS)
def test_one_script_is_one_conversation_in_rollout_and_agent(tokenizer, start_peer, url, turns, limits):
    output, engine = roll_out(tokenizer, url, *turns, **limits)
    conversation, model = converse(tokenizer, start_peer, url, *turns, **limits)
    assert conversation.finished
    assert [request["prompt"] for request in model.requests] == engine.inputs
    assert [request["max_tokens"] for request in model.requests] == engine.caps
    assert conversation.trajectory == trajectory(output)


PIECES = ["<tool_call>", "</tool_call>", '{"name": "search", ', '"arguments": {"query_list": ["', '"]}}']
PIECES += ["{", VELL, "é", "\\ud800", "<think>", " ", "\n"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join)


def extract(tokenizer, ids):
    parser = ToolParser.get_tool_parser(PARSER_NAME, tokenizer)
    assert isinstance(parser, SearchCallParser)
    _, calls = asyncio.run(parser.extract_tool_calls(ids))
    return calls


@given(text=TEXTS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parser_finds_the_methods_calls(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = parse_tool_calls(tokenizer.decode(ids, skip_special_tokens=True))
    found = extract(tokenizer, ids)
    assert [call.arguments for call in found] == [call.raw for call in expected]
    judged = [parse_tool_calls(f"<tool_call>{call.arguments}</tool_call>") for call in found]
    assert judged == [[call] for call in expected]


@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_parser_accepts_any_ids(tokenizer, ids):
    extract(tokenizer, ids)


def as_environment(tokenizer, url, *turns):
    """One rollout of `env=search` with the same prompt and script."""
    limits = {"topk": 2, "deadline_s": 2.0, "response_limit": 300, "form": "short", "turns": 5}
    taskset = SearchTaskset(train="", eval="", url=url, **limits)
    taskset.name = "search"
    model = Told(tokenizer, *turns)
    row = Row("q", {"question": "Ask.", "targets": ["Vell"]})
    limits = EpisodeLimits(300, 400, 100, call_form=call_form(tokenizer))
    (played,) = asyncio.run(play_row(taskset, row, model, limits))
    return played, model


HERMES = [
    [VELL, "<answer>Vell</answer>"],
    [render_tool_call(["Vell", "Orrin"]) + render_tool_call(["Ostrel"]), "no answer"],
    ["<tool_call>no JSON</tool_call>", VELL, "<answer>Orrin</answer>"],
    ["<answer>Vell</answer>"],
    [VELL] * 5,
]


PLAYED = [(None, turns) for turns in HERMES]
PLAYED += [(name, [call, f"{call}x", "<answer>Vell</answer>"]) for name, call in FAMILIES.items()]


@pytest.mark.parametrize(("name", "turns"), PLAYED)
def test_the_search_environment_plays_the_ids_of_the_search_loop(tokenizer, url, name, turns, monkeypatch):
    tokenizer = family(tokenizer, name) if name else tokenizer
    monkeypatch.setattr(sys.modules[__name__], "PROMPT", solver_messages("Ask.", "short", 5))
    output, engine = roll_out(tokenizer, url, *turns)
    played, model = as_environment(tokenizer, url, *turns)
    assert model.inputs == engine.inputs
    assert (played.prompt_ids, played.response_ids) == (output.prompt_ids, output.response_ids)
    assert played.response_mask == output.response_mask and played.token_drift == 0
    assert played.score.reward == solver_reward(trajectory(output), ["Vell"]).score


def test_an_unanswered_search_spoils_the_environments_episode(tokenizer):
    played, _ = as_environment(tokenizer, f"http://127.0.0.1:{unused_port()}", VELL, FINAL)
    assert played.score is None
    assert "Episode.respond raised SearchUnavailable" in played.fault
