"""The solver agent with a scripted completions server on loopback."""

import asyncio
import json
import threading

import pytest
from conftest import unused_port
from fastapi.responses import StreamingResponse

from drzero.stages.demo_models import load_base_tokenizer
from search.client import SearchUnavailable
from verl_ext.clients.served_model import SolverServerError
from verl_ext.clients.solver_agent import SolverAgent
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids
from verl_ext.method.prompts import solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA, render_tool_call
from verl_ext.sglang.compat import CLIENT, NEEDS

SEARCH_TURN = render_tool_call(["Ostrel"])
ANSWER_TURN = "<think>So.</think>\n<answer>Kestmoor</answer>"
TOKENIZER = load_base_tokenizer()
FIRST_PROMPT = render_prompt_ids(TOKENIZER, solver_messages("Where?", "short"), [SEARCH_TOOL_SCHEMA])


def encode(text):
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def says(text, *, finish="stop"):
    end = "<|im_end|>" if finish == "stop" else ""
    choice = {"index": 0, "text": text + end, "finish_reason": finish, "token_ids": encode(text + end)}
    return {"object": "text_completion", "choices": [choice]}


async def never():
    await asyncio.sleep(3600)
    yield ""


@pytest.fixture
def serve(start_peer):
    """Start servers that give the replies in turn, the last one forever, or those of a function."""

    def start(*replies, by=None):
        def reply(body):
            return by(len(peer.requests)) if by else replies[min(len(peer.requests), len(replies)) - 1]

        peer = start_peer("/v1/completions", reply)
        peer.url += "/v1/completions"
        return peer

    return start


class Library:
    """A search service in memory that can fail for a query."""

    def __init__(self, down_for=""):
        self.down_for = down_for
        self.asked = []

    async def retrieve(self, queries, topk=None):
        if self.down_for in queries:
            raise SearchUnavailable("scripted outage")
        self.asked.append((tuple(queries), topk))
        return [[{"title": query, "text": "in Kestmoor", "contents": ""}] for query in queries]


def play(url, n=1, *, library=None, seed=None, heard=None, **settings):
    """Attempts at one question in a fresh event loop: n side by side, or one that is heard of."""
    defaults = {"topk": 3, "max_tokens_per_turn": 200, "max_context_tokens": 4000}
    defaults |= {"prompt_form": "short", "deadline_s": 30.0, "retries": 3}

    async def run():
        agent = SolverAgent(url, "solver", TOKENIZER, library or Library(), **(defaults | settings))
        try:
            if heard is None:
                return await agent.attempts("Where?", n, seed)
            return [await agent.attempt("Where?", heard=lambda *told: heard.append(told))]
        finally:
            await agent.aclose()

    return asyncio.run(run())


def test_a_search_and_an_answer(serve):
    script, library = serve(says(SEARCH_TURN), says(ANSWER_TURN)), Library()
    (attempt,) = play(script.url, library=library)
    assert (attempt.finished, attempt.failure, attempt.answer) == (True, None, "Kestmoor")
    assert [turn.text for turn in attempt.trajectory.turns] == [SEARCH_TURN, ANSWER_TURN]
    assert [call.response for call in attempt.trajectory.searches] == ["[1] Ostrel: in Kestmoor"]
    assert (attempt.searches, library.asked) == (1, [(("Ostrel",), 3)])
    # Each prompt extends the last one by sampled ids and responses.
    turn = encode(SEARCH_TURN + "<|im_end|>")
    second = FIRST_PROMPT + turn + tool_turn_ids(TOKENIZER, turn, ["[1] Ostrel: in Kestmoor"])
    assert [request["prompt"] for request in script.requests] == [FIRST_PROMPT, second]
    assert attempt.tokens_in == len(FIRST_PROMPT) + len(second)
    assert attempt.tokens_out == len(turn) + len(encode(ANSWER_TURN + "<|im_end|>"))
    data = json.loads(json.dumps(attempt.trajectory.to_dict()))
    assert type(attempt.trajectory).from_dict(data) == attempt.trajectory


@pytest.mark.parametrize("ending", ["", "<|im_end|>"])
def test_text_is_encoded_if_the_server_returns_no_ids(serve, ending):
    texts = (SEARCH_TURN + ending, ANSWER_TURN + ending)
    script = serve(*({"choices": [{"text": text, "finish_reason": "stop"}]} for text in texts))
    (attempt,) = play(script.url)
    turn = encode(SEARCH_TURN + "<|im_end|>")
    assert attempt.answer == "Kestmoor"
    assert script.requests[1]["prompt"][len(FIRST_PROMPT) :][: len(turn) + 1] == [*turn, *encode("\n")]


def test_the_request_selects_plain_sampling_with_ids(serve):
    script = serve(says(ANSWER_TURN))
    play(script.url, seed=7, temperature=0.5, top_p=0.9)
    request = script.requests[0]
    needs = {need.name.rpartition(".")[2] for need in NEEDS if (need.by, need.kind) == (CLIENT, "symbol")}
    # SGLang ignores this before 0.5.17, and an answer without token ids is encoded again.
    assert set(request) == needs | {"return_token_ids"}
    del request["prompt"]
    expected = {"model": "solver", "max_tokens": 200, "temperature": 0.5, "top_p": 0.9, "top_k": -1}
    expected |= {"stop_token_ids": [TOKENIZER.eos_token_id], "return_token_ids": True, "seed": 7}
    assert request == expected | {"skip_special_tokens": False, "no_stop_trim": True}
    play(script.url, 3, seed=10)
    assert sorted(request["seed"] for request in script.requests[1:]) == [10, 11, 12]
    script = serve(says(SEARCH_TURN), says(ANSWER_TURN))
    play(script.url, seed=2**63 - 1)
    assert [request["seed"] for request in script.requests] == [2**63 - 1] * 2
    play(script.url)
    assert "seed" not in script.requests[-1]


def test_a_full_context_ends_an_attempt(serve):
    script = serve(says(SEARCH_TURN))
    (attempt,) = play(script.url, max_context_tokens=len(FIRST_PROMPT) + 20)
    assert [request["max_tokens"] for request in script.requests] == [20]
    assert (attempt.finished, attempt.answer) == (True, None)
    (attempt,) = play(script.url, max_context_tokens=len(FIRST_PROMPT))
    assert (attempt.finished, attempt.trajectory.turns, len(script.requests)) == (True, (), 1)


def test_server_errors_are_retried(serve):
    script = serve(500, 503, 429, says(ANSWER_TURN))
    (attempt,) = play(script.url)
    assert (attempt.answer, len(script.requests)) == ("Kestmoor", 4)


@pytest.mark.parametrize(
    ("reply", "cause"),
    [(says("<answer>wr", finish="abort"), "'abort'"), (500, "HTTP 500"), (None, "ConnectError")],
)
def test_a_server_that_keeps_failing_leaves_the_attempt_unfinished(serve, reply, cause):
    script = serve(reply)
    if reply is None:
        script.url = f"http://127.0.0.1:{unused_port()}"
    (attempt,) = play(script.url, retries=1)
    assert (attempt.finished, attempt.answer, len(script.requests)) == (False, None, 2 if reply else 0)
    assert script.url in attempt.failure and cause in attempt.failure
    assert (attempt.trajectory.turns, attempt.tokens_in, attempt.tokens_out) == ((), 0, 0)


def test_a_server_that_never_answers_meets_the_deadline(serve):
    script = serve(by=lambda number: says(SEARCH_TURN) if number == 1 else StreamingResponse(never()))
    (attempt,) = play(script.url, deadline_s=0.5)
    assert (attempt.finished, attempt.failure) == (False, "the conversation did not end within 0.5 s")
    assert (len(attempt.trajectory.turns), attempt.searches) == (1, 1)
    assert attempt.tokens_in == len(FIRST_PROMPT)


def test_a_failed_search_leaves_the_attempt_unfinished(serve):
    two = says(SEARCH_TURN + render_tool_call(["Orrin"]))
    (attempt,) = play(serve(two).url, library=Library(down_for="Orrin"))
    assert (attempt.finished, attempt.failure) == (False, "a search failed: scripted outage")
    calls = attempt.trajectory.calls
    assert [(call.answered, call.failed) for call in calls] == [(True, False), (False, True)]


def test_each_search_is_heard_of_before_it_and_with_what_it_found(serve):
    two = says(render_tool_call(["a", "b"]) + "<tool_call>no json</tool_call>")
    both, one = ("a", "b"), ("Ostrel",)
    found = [[{"title": name, "text": "in Kestmoor", "contents": ""}] for name in (*both, *one)]
    play(serve(two, says(SEARCH_TURN), says(ANSWER_TURN)).url, heard=(heard := []))
    assert heard == [(both, None), (both, found[:2]), (one, None), (one, found[2:])]


def test_nothing_is_heard_of_a_search_that_is_not_made_and_no_end_of_one_that_fails(serve):
    script, heard = serve(says(SEARCH_TURN)), []
    play(script.url, heard=heard, max_turns=1)
    assert heard == []
    play(script.url, heard=heard, library=Library(down_for="Ostrel"))
    assert heard == [(("Ostrel",), None)]


def test_a_refused_request_is_a_configuration_error(serve):
    script = serve(404)
    with pytest.raises(SolverServerError) as refused:
        play(script.url)
    assert len(script.requests) == 1
    for part in (script.url, "HTTP 404", "'solver'", f"{len(FIRST_PROMPT)} prompt tokens"):
        assert part in str(refused.value)
    with pytest.raises(SolverServerError, match="did not answer as an OpenAI endpoint"):
        play(serve({"index": 0}).url)


def test_concurrency_is_bounded(serve):
    running, most = 0, 0

    async def slowly():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        yield json.dumps(says(ANSWER_TURN))

    attempts = play(serve(by=lambda _: StreamingResponse(slowly())).url, 9, concurrency=3)
    assert all(attempt.finished for attempt in attempts) and 1 <= most <= 3


def test_attempts_run_side_by_side(serve):
    # The first request is answered only after the second has arrived.
    both = threading.Event()

    def reply(number):
        if number == 2:
            both.set()
        return says(ANSWER_TURN) if both.is_set() else 503

    attempts = play(serve(by=reply).url, 2, retries=20)
    assert [attempt.answer for attempt in attempts] == ["Kestmoor", "Kestmoor"]
