"""Conversations of a search agent with a scripted model server.

`test_search_agent_loop.py` drives agent and rollout with one script, `test_clients_solver_agent.py` tests
requests, retries and ids.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Peer, StartPeer, unused_port
from transformers import AutoTokenizer

from search.client import SearchUnavailable
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.clients.served_model import SolverServerError
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.search_tool_schema import MAX_CALLS_PER_TURN, SEARCH_TOOL_SCHEMA
from verl_ext.method.tool_calls import render_tool_call

PROMPT = [
    {"role": "system", "content": "You write questions."},
    {"role": "user", "content": "Ask about Vell."},
]
CALL = render_tool_call(["Vell"])
FINAL = "<question>Which river runs through Vell?</question><answer>Orrin</answer>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


class Library:
    """A search service in memory that fails for some queries."""

    def __init__(self, down_for: Sequence[str] = ()) -> None:
        self._down_for = set(down_for)
        self.asked: list[str] = []

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[dict[str, str]]]:
        self.asked += queries
        if self._down_for & set(queries):
            raise SearchUnavailable("scripted outage")
        return [[{"title": query, "text": "a town", "contents": ""}] for query in queries]


def says(text: str) -> dict[str, Any]:
    """A completion by a server that trims the end token and returns no ids."""
    return {"choices": [{"text": text, "finish_reason": "stop"}]}


Play = Callable[..., tuple[list[Conversation], Peer]]


@pytest.fixture
def play(tokenizer: Any, start_peer: StartPeer) -> Play:
    """Converse with a server that gives these replies, once per seed.

    Returns the conversations and the server.
    """

    def run(
        *replies: Any, library: Library | None = None, seeds: Sequence[int | None] = (None,), **settings: Any
    ) -> tuple[list[Conversation], Peer]:
        turns = iter(replies)
        answer = replies[0] if callable(replies[0]) else lambda _: next(turns)
        model = start_peer("/v1/completions", answer)
        limits: dict[str, Any] = {
            "topk": 2,
            "max_tokens_per_turn": 200,
            "max_context_tokens": 4000,
            "retries": 0,
        }
        limits |= settings
        url = limits.pop("url", model.url)

        async def converse() -> list[Conversation]:
            url_ = f"{url}/v1/completions"
            agent = SearchAgent(url_, "challenger", tokenizer, library or Library(), **limits)
            try:
                return list(await asyncio.gather(*(agent.converse(PROMPT, seed) for seed in seeds)))
            finally:
                await agent.aclose()

        return asyncio.run(converse()), model

    return run


@pytest.fixture
def prompt(tokenizer: Any) -> list[int]:
    return render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])


def test_a_conversation_starts_from_its_prompt(play: Play, prompt: list[int]) -> None:
    (conversation,), model = play(says(FINAL))
    assert [request["prompt"] for request in model.requests] == [prompt]
    assert (conversation.finished, conversation.failure) == (True, None)
    assert conversation.trajectory.final_text == FINAL and "seed" not in model.requests[0]


def test_tokens_and_answered_searches_are_counted(play: Play, tokenizer: Any) -> None:
    (conversation,), model = play(says(CALL + "<tool_call>Vell</tool_call>"), says(FINAL))
    assert conversation.searches == 1
    assert conversation.tokens_in == sum(len(request["prompt"]) for request in model.requests)
    turns = [turn.text for turn in conversation.trajectory.turns]
    sampled = [len(tokenizer.encode(turn, add_special_tokens=False)) + 1 for turn in turns]
    assert conversation.tokens_out == sum(sampled)


def test_every_turn_is_drawn_with_the_seed(play: Play) -> None:
    _, model = play(says(CALL), says(FINAL), seeds=[2**63 - 1])
    assert [request["seed"] for request in model.requests] == [2**63 - 1] * 2


def test_a_failed_search_ends_the_conversation(play: Play) -> None:
    (conversation,), _ = play(says(CALL + render_tool_call(["Orrin"])), library=Library(down_for=["Orrin"]))
    assert (conversation.finished, conversation.failure) == (False, "a search failed: scripted outage")
    calls = conversation.trajectory.calls
    assert [(call.answered, call.failed) for call in calls] == [(True, False), (False, True)]


def test_turns_before_a_failure_are_kept_and_counted(play: Play) -> None:
    (conversation,), model = play(says(CALL), 503)
    assert (conversation.finished, conversation.searches) == (False, 1)
    assert conversation.tokens_in == len(model.requests[0]["prompt"])
    assert "HTTP 503" in str(conversation.failure)


def test_an_unreachable_server_gives_no_turns(play: Play) -> None:
    (conversation,), _ = play(says(FINAL), url=f"http://127.0.0.1:{unused_port()}")
    assert not conversation.finished
    assert (conversation.trajectory.turns, conversation.tokens_in, conversation.tokens_out) == ((), 0, 0)


def test_the_last_turns_call_is_not_searched(play: Play) -> None:
    library = Library()
    (conversation,), _ = play(says(CALL), says(CALL), library=library, max_turns=2)
    assert library.asked == ["Vell"] and conversation.finished


def test_calls_beyond_the_limit_of_a_turn_are_not_searched(play: Play) -> None:
    library, many = Library(), says(CALL * (MAX_CALLS_PER_TURN + 2))
    (conversation,), _ = play(many, says(FINAL), library=library, max_tokens_per_turn=1000)
    assert library.asked == ["Vell"] * MAX_CALLS_PER_TURN and conversation.finished


def test_a_prompt_that_fills_the_context_leaves_no_turn(play: Play, prompt: list[int]) -> None:
    (conversation,), model = play(says(FINAL), max_context_tokens=len(prompt))
    assert (conversation.finished, conversation.trajectory.turns, model.requests) == (True, (), [])


def test_one_conversations_failure_does_not_affect_the_others(play: Play) -> None:
    conversations, _ = play(lambda request: 500 if request["seed"] == 1 else says(FINAL), seeds=[0, 1, 2])
    assert [conversation.finished for conversation in conversations] == [True, False, True]


def test_a_refusal_names_address_model_and_prompt_length(play: Play, prompt: list[int]) -> None:
    with pytest.raises(SolverServerError) as refused:
        play(400)
    for part in ("http://127.0.0.1:", "HTTP 400", "'challenger'", f"{len(prompt)} prompt tokens"):
        assert part in str(refused.value)
