"""One conversation of an agent that searches, whatever it was asked to do, against a scripted model server.

What a conversation has in common with a rollout is tested where both are driven by one script
(`test_search_agent_loop.py`); requests, retries and ids are tested through the solver's agent.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
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
    """A search service in memory; it fails for the queries it is set to fail for."""

    def __init__(self, down_for: Sequence[str] = ()) -> None:
        self._down_for = set(down_for)
        self.asked: list[str] = []

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[dict[str, str]]]:
        self.asked += queries
        if self._down_for & set(queries):
            raise SearchUnavailable("scripted outage")
        return [[{"title": query, "text": "a town", "contents": ""}] for query in queries]


def says(text: str) -> dict[str, Any]:
    """A completion by a server that trims the end token and gives no ids."""
    return {"choices": [{"text": text, "finish_reason": "stop"}]}


def model_that_says(start_peer: StartPeer, *turns: str) -> Peer:
    """A server whose n-th answer is the n-th turn."""
    replies: Iterator[str] = iter(turns)
    return start_peer("/v1/completions", lambda _: says(next(replies)))


def play(
    tokenizer: Any,
    url: str,
    library: Library | None = None,
    *,
    seeds: Sequence[int | None] = (None,),
    **settings: Any,
) -> list[Conversation]:
    """One conversation per seed, side by side, in a fresh event loop."""
    limits: dict[str, Any] = {"topk": 2, "max_tokens_per_turn": 200, "max_context_tokens": 4000, "retries": 0}

    async def run() -> list[Conversation]:
        agent = SearchAgent(
            f"{url}/v1/completions", "challenger", tokenizer, library or Library(), **(limits | settings)
        )
        try:
            return list(await asyncio.gather(*(agent.converse(PROMPT, seed) for seed in seeds)))
        finally:
            await agent.aclose()

    return asyncio.run(run())


def test_a_conversation_starts_from_its_prompt_as_a_rollout_would(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    model = model_that_says(start_peer, FINAL)
    (conversation,) = play(tokenizer, model.url)
    prompt = render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA])
    assert [request["prompt"] for request in model.requests] == [prompt]
    assert (conversation.finished, conversation.failure) == (True, None)
    assert conversation.trajectory.final_text == FINAL


def test_a_conversation_counts_its_tokens_and_its_answered_searches(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    model = model_that_says(start_peer, CALL + "<tool_call>Vell</tool_call>", FINAL)
    (conversation,) = play(tokenizer, model.url)
    assert conversation.searches == 1
    assert conversation.tokens_in == sum(len(request["prompt"]) for request in model.requests)
    turns = [turn.text for turn in conversation.trajectory.turns]
    sampled = [len(tokenizer.encode(turn, add_special_tokens=False)) + 1 for turn in turns]
    assert conversation.tokens_out == sum(sampled)


def test_every_turn_of_a_conversation_is_drawn_with_its_seed(tokenizer: Any, start_peer: StartPeer) -> None:
    model = model_that_says(start_peer, CALL, FINAL)
    play(tokenizer, model.url, seeds=[2**63 - 1])
    assert [request["seed"] for request in model.requests] == [2**63 - 1] * 2


def test_a_conversation_without_a_seed_sends_none(tokenizer: Any, start_peer: StartPeer) -> None:
    model = model_that_says(start_peer, FINAL)
    play(tokenizer, model.url)
    assert "seed" not in model.requests[0]


def test_a_turn_in_which_one_of_several_searches_failed_ends_the_conversation(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    model = model_that_says(start_peer, CALL + render_tool_call(["Orrin"]))
    (conversation,) = play(tokenizer, model.url, Library(down_for=["Orrin"]))
    assert (conversation.finished, conversation.failure) == (False, "a search failed: scripted outage")
    assert [(call.answered, call.failed) for call in conversation.trajectory.calls] == [
        (True, False),
        (False, True),
    ]


def test_turns_before_a_failure_are_kept_and_counted(tokenizer: Any, start_peer: StartPeer) -> None:
    replies: Iterator[Any] = iter([says(CALL), 503])
    model = start_peer("/v1/completions", lambda _: next(replies))
    (conversation,) = play(tokenizer, model.url)
    assert (conversation.finished, conversation.searches) == (False, 1)
    assert conversation.tokens_in == len(model.requests[0]["prompt"])
    assert "HTTP 503" in str(conversation.failure)


def test_an_unreachable_server_gives_a_conversation_without_turns(tokenizer: Any) -> None:
    (conversation,) = play(tokenizer, f"http://127.0.0.1:{unused_port()}")
    assert not conversation.finished
    assert (conversation.trajectory.turns, conversation.tokens_in, conversation.tokens_out) == ((), 0, 0)


def test_the_last_turns_call_is_not_searched(tokenizer: Any, start_peer: StartPeer) -> None:
    library = Library()
    (conversation,) = play(tokenizer, model_that_says(start_peer, CALL, CALL).url, library, max_turns=2)
    assert library.asked == ["Vell"]
    assert conversation.finished


def test_calls_beyond_the_limit_of_a_turn_are_not_searched(tokenizer: Any, start_peer: StartPeer) -> None:
    library = Library()
    many = CALL * (MAX_CALLS_PER_TURN + 2)
    (conversation,) = play(
        tokenizer, model_that_says(start_peer, many, FINAL).url, library, max_tokens_per_turn=1000
    )
    assert library.asked == ["Vell"] * MAX_CALLS_PER_TURN
    assert conversation.finished


def test_a_prompt_that_fills_the_context_gives_a_conversation_without_turns(
    tokenizer: Any, start_peer: StartPeer
) -> None:
    model = model_that_says(start_peer, FINAL)
    room = len(render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA]))
    (conversation,) = play(tokenizer, model.url, max_context_tokens=room)
    assert (conversation.finished, conversation.trajectory.turns, model.requests) == (True, (), [])


def by_seed(fails: int) -> Callable[[dict[str, Any]], Any]:
    return lambda request: 500 if request["seed"] == fails else says(FINAL)


def test_one_conversations_failure_does_not_affect_the_others(tokenizer: Any, start_peer: StartPeer) -> None:
    model = start_peer("/v1/completions", by_seed(fails=1))
    conversations = play(tokenizer, model.url, seeds=[0, 1, 2])
    assert [conversation.finished for conversation in conversations] == [True, False, True]


def test_a_refusal_names_address_model_and_prompt_length(tokenizer: Any, start_peer: StartPeer) -> None:
    model = start_peer("/v1/completions", lambda _: 400)
    with pytest.raises(SolverServerError) as refused:
        play(tokenizer, model.url)
    prompt = len(render_prompt_ids(tokenizer, PROMPT, [SEARCH_TOOL_SCHEMA]))
    for part in (model.url, "HTTP 400", "'challenger'", f"{prompt} prompt tokens"):
        assert part in str(refused.value)
