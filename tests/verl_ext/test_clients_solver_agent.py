"""The solver agent with a scripted completions server on loopback."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from search.client import SearchUnavailable
from verl_ext.clients.served_model import SolverServerError
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.chat import demo_chat_template, render_prompt_ids, tool_turn_ids
from verl_ext.method.prompts import solver_messages
from verl_ext.method.tool_calls import SEARCH_TOOL_SCHEMA, render_tool_call

SEARCH_TURN = render_tool_call(["Ostrel"])
ANSWER_TURN = "<think>So.</think>\n<answer>Kestmoor</answer>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML over single bytes and one merge, so that "ab" has two spellings in ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "ab"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    ends: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **ends)
    tokenizer.chat_template = demo_chat_template()
    return tokenizer


TOKENIZER = byte_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


FIRST_PROMPT = render_prompt_ids(TOKENIZER, solver_messages("Where?", "short"), [SEARCH_TOOL_SCHEMA])

Reply = dict[str, Any] | int | None
"""A choice of a completion, an HTTP status, or None for no answer."""


def says(text: str, *, ids: Sequence[int] | None = None, finish: str = "stop") -> dict[str, Any]:
    end = "<|im_end|>" if finish == "stop" else ""
    token_ids = list(ids) if ids is not None else encode(text + end)
    return {"index": 0, "text": text + end, "finish_reason": finish, "token_ids": token_ids}


@dataclass
class Script:
    """The server's answers and the requests that it has seen."""

    reply: Callable[[dict[str, Any], int], Reply]
    requests: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.requests.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0.01)
            reply = self.reply(body, len(self.requests) - 1)
            if reply is None:
                await asyncio.sleep(3600)
            if isinstance(reply, int):
                return JSONResponse({"error": "scripted"}, status_code=reply)
            return JSONResponse({"object": "text_completion", "choices": [reply]})
        finally:
            self.in_flight -= 1


Serve = Callable[..., Script]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that answer with the given replies in turn, the last one forever."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(*replies: Reply, by: Callable[[dict[str, Any], int], Reply] | None = None) -> Script:
        script = Script(by or (lambda _, number: replies[min(number, len(replies) - 1)]))
        app = FastAPI()
        app.add_api_route("/v1/completions", script.completions, methods=["POST"])
        listener = socket.create_server(("127.0.0.1", 0))
        script.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return script

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(timeout=10)


class Library:
    """A search service in memory that can fail for a query."""

    def __init__(self, down_for: str = "") -> None:
        self.down_for = down_for
        self.asked: list[tuple[tuple[str, ...], int | None]] = []

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[dict[str, str]]]:
        if self.down_for in queries:
            raise SearchUnavailable("scripted outage")
        self.asked.append((tuple(queries), topk))
        return [[{"title": query, "text": "in Kestmoor", "contents": ""}] for query in queries]


def play(
    url: str, n: int = 1, *, library: Library | None = None, seed: int | None = None, **settings: Any
) -> list[SolverAttempt]:
    """Run n attempts at one question in a fresh event loop."""
    defaults: dict[str, Any] = {"topk": 3, "max_tokens_per_turn": 200, "max_context_tokens": 4000}
    defaults |= {"prompt_form": "short", "deadline_s": 30.0, "retries": 3}

    async def run() -> list[SolverAttempt]:
        agent = SolverAgent(url, "solver", TOKENIZER, library or Library(), **(defaults | settings))
        try:
            return await agent.attempts("Where?", n, seed)
        finally:
            await agent.aclose()

    return asyncio.run(run())


def test_a_search_and_an_answer(serve: Serve) -> None:
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


def test_sampled_ids_are_kept_as_they_are(serve: Serve) -> None:
    a, b = encode("a")[0], encode("b")[0]
    sampled = [a, b, *encode(SEARCH_TURN + "<|im_end|>")]
    assert sampled != encode("ab" + SEARCH_TURN + "<|im_end|>")
    script = serve(says("ab" + SEARCH_TURN, ids=sampled), says(ANSWER_TURN))
    play(script.url)
    assert script.requests[1]["prompt"][len(FIRST_PROMPT) :][: len(sampled)] == sampled


@pytest.mark.parametrize("ending", ["", "<|im_end|>"])
def test_text_is_encoded_if_the_server_returns_no_ids(serve: Serve, ending: str) -> None:
    texts = (SEARCH_TURN + ending, ANSWER_TURN + ending)
    script = serve(*({"index": 0, "text": text, "finish_reason": "stop"} for text in texts))
    (attempt,) = play(script.url)
    turn = encode(SEARCH_TURN + "<|im_end|>")
    assert attempt.answer == "Kestmoor"
    assert script.requests[1]["prompt"][len(FIRST_PROMPT) :][: len(turn) + 1] == [*turn, *encode("\n")]


def test_the_request_selects_plain_sampling_with_ids(serve: Serve) -> None:
    script = serve(says(ANSWER_TURN))
    play(script.url, seed=7, temperature=0.5, top_p=0.9)
    request = script.requests[0]
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


def test_a_turn_without_answer_or_with_a_cut_ends_the_attempt(serve: Serve) -> None:
    (attempt,) = play(serve(says("I give up.")).url)
    assert (attempt.finished, attempt.answer) == (True, None)
    (attempt,) = play(serve(says("thinking on", finish="length")).url)
    assert attempt.trajectory.turns[0].truncated
    assert (attempt.finished, attempt.answer) == (True, None)


def test_the_turn_limit_leaves_the_last_call_unanswered(serve: Serve) -> None:
    library = Library()
    (attempt,) = play(serve(says(SEARCH_TURN)).url, library=library, max_turns=3)
    assert (attempt.finished, attempt.answer, len(attempt.trajectory.turns)) == (True, None, 3)
    assert len(library.asked) == 2
    assert [call.answered for call in attempt.trajectory.calls] == [True, True, False]


def test_a_full_context_ends_an_attempt(serve: Serve) -> None:
    script = serve(says(SEARCH_TURN))
    (attempt,) = play(script.url, max_context_tokens=len(FIRST_PROMPT) + 20)
    assert [request["max_tokens"] for request in script.requests] == [20]
    assert (attempt.finished, attempt.answer) == (True, None)
    (attempt,) = play(script.url, max_context_tokens=len(FIRST_PROMPT))
    assert (attempt.finished, attempt.trajectory.turns, len(script.requests)) == (True, (), 1)


def test_server_errors_are_retried(serve: Serve) -> None:
    script = serve(500, 503, 429, says(ANSWER_TURN))
    (attempt,) = play(script.url)
    assert (attempt.answer, len(script.requests)) == ("Kestmoor", 4)


@pytest.mark.parametrize(
    ("reply", "cause"), [(says("<answer>wr", finish="abort"), "'abort'"), (500, "HTTP 500")]
)
def test_a_server_that_keeps_failing_leaves_the_attempt_unfinished(
    serve: Serve, reply: Reply, cause: str
) -> None:
    script = serve(reply)
    (attempt,) = play(script.url, retries=1)
    assert (attempt.finished, attempt.answer, len(script.requests)) == (False, None, 2)
    assert script.url in str(attempt.failure) and cause in str(attempt.failure)


def test_a_server_that_never_answers_meets_the_deadline(serve: Serve) -> None:
    (attempt,) = play(serve(says(SEARCH_TURN), None).url, deadline_s=0.5)
    assert (attempt.finished, attempt.failure) == (False, "the conversation did not end within 0.5 s")
    assert (len(attempt.trajectory.turns), attempt.searches) == (1, 1)
    assert attempt.tokens_in == len(FIRST_PROMPT)


def test_a_refused_connection_leaves_the_attempt_unfinished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (attempt,) = play(f"http://127.0.0.1:{port}/v1/completions", retries=1)
    assert not attempt.finished and "ConnectError" in str(attempt.failure)
    assert (attempt.trajectory.turns, attempt.tokens_in, attempt.tokens_out) == ((), 0, 0)


def test_a_failed_search_leaves_the_attempt_unfinished(serve: Serve) -> None:
    two = says(SEARCH_TURN + render_tool_call(["Orrin"]))
    (attempt,) = play(serve(two).url, library=Library(down_for="Orrin"))
    assert (attempt.finished, attempt.failure) == (False, "a search failed: scripted outage")
    calls = attempt.trajectory.calls
    assert [(call.answered, call.failed) for call in calls] == [(True, False), (False, True)]


def heard_in(url: str, library: Library, **settings: Any) -> list[tuple[list[str], list[Any] | None]]:
    """What is heard of one attempt's searches."""
    heard: list[tuple[list[str], list[Any] | None]] = []

    async def run() -> None:
        limits = {"topk": 3, "max_tokens_per_turn": 200, "max_context_tokens": 4000, "deadline_s": 30.0}
        agent = SolverAgent(url, "solver", TOKENIZER, library, **{**limits, **settings})
        try:
            await agent.attempt("Where?", heard=lambda queries, found: heard.append((list(queries), found)))
        finally:
            await agent.aclose()

    asyncio.run(run())
    return heard


def test_each_search_is_heard_of_before_it_and_with_what_it_found(serve: Serve) -> None:
    two = says(render_tool_call(["a", "b"]) + "<tool_call>no json</tool_call>")
    script = serve(two, says(SEARCH_TURN), says(ANSWER_TURN))
    found = [[{"title": name, "text": "in Kestmoor", "contents": ""}] for name in ("a", "b", "Ostrel")]
    assert heard_in(script.url, Library()) == [
        (["a", "b"], None),
        (["a", "b"], found[:2]),
        (["Ostrel"], None),
        (["Ostrel"], found[2:]),
    ]


def test_nothing_is_heard_of_a_search_that_is_not_made_and_no_end_of_one_that_fails(serve: Serve) -> None:
    assert heard_in(serve(says(SEARCH_TURN)).url, Library(), max_turns=1) == []
    down = Library(down_for="Ostrel")
    assert heard_in(serve(says(SEARCH_TURN)).url, down) == [(["Ostrel"], None)]


def test_a_refused_request_is_a_configuration_error(serve: Serve) -> None:
    script = serve(404)
    with pytest.raises(SolverServerError) as refused:
        play(script.url)
    assert len(script.requests) == 1
    for part in (script.url, "HTTP 404", "'solver'", f"{len(FIRST_PROMPT)} prompt tokens"):
        assert part in str(refused.value)
    with pytest.raises(SolverServerError, match="did not answer as an OpenAI endpoint"):
        play(serve({"index": 0}).url)


def test_concurrency_is_bounded(serve: Serve) -> None:
    script = serve(says(ANSWER_TURN))
    attempts = play(script.url, 9, concurrency=3)
    assert all(attempt.finished for attempt in attempts)
    assert script.most_in_flight <= 3


def test_attempts_run_side_by_side(serve: Serve) -> None:
    """The first request is answered only after the second has arrived."""
    both = threading.Event()

    def reply(_: dict[str, Any], number: int) -> Reply:
        if number == 1:
            both.set()
        return says(ANSWER_TURN) if both.is_set() else 503

    attempts = play(serve(by=reply).url, 2, retries=20)
    assert [attempt.answer for attempt in attempts] == ["Kestmoor", "Kestmoor"]
