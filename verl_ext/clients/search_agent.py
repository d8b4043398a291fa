"""An agent that searches: one conversation over several turns, with tool calls answered in between.

Use one agent per event loop. An unfinished conversation must not be scored.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

from drzero.ops.telemetry import waiting
from environments.call import ToolSchema
from search.client import SearchRefused, SearchUnavailable
from verl_ext.clients.chat_endpoint import ChatDialogue, ChatEndpoint, ConversationRefused, Reply
from verl_ext.clients.served_model import ServedModel, ServerUnavailable
from verl_ext.method.chat import call_form, read_turn, render_prompt_ids, tool_turn_ids
from verl_ext.method.passages import RESPONSE_LIMIT, format_passages
from verl_ext.method.prompts import MAX_TURNS, Message
from verl_ext.method.search_calls import (
    MAX_CALLS_PER_TURN,
    SEARCH_TOOL_SCHEMA,
    invalid_call_response,
    parse_tool_calls,
    refuse_call,
)
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn


class Retriever(Protocol):
    """The search client. Failures are `SearchUnavailable` or `SearchRefused`."""

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Any]]:
        """The passages for each query, best first."""
        ...


Heard = Callable[[Sequence[str], list[list[Any]] | None], None]
"""Called with a call's queries before their search (None), and after it with the passages of each."""


@dataclass(frozen=True)
class Conversation:
    """One conversation. Unfinished if a service failed or the deadline passed."""

    trajectory: Trajectory
    finished: bool
    failure: str | None
    tokens_in: int  # prompt tokens sent, summed over the turns
    tokens_out: int
    searches: int  # search calls that were answered
    latency_s: float  # without the wait for a free slot


@dataclass(eq=False)
class SearchAgent(ServedModel):
    """Plays conversations with one completions server and one search service. The owner closes both."""

    search: Retriever
    _: KW_ONLY
    topk: int
    max_tokens_per_turn: int
    max_context_tokens: int  # of a conversation, prompt and response
    max_turns: int = MAX_TURNS
    tool_response_limit: int = RESPONSE_LIMIT  # in characters
    endpoint: ChatEndpoint | None = None
    """A chat endpoint to use in place of `completions_url` and `tokenizer`. The owner closes it."""

    async def converse(
        self, messages: Sequence[Message], seed: int | None = None, heard: Heard | None = None
    ) -> Conversation:
        """Run one conversation, repeatable by its seed. Raises SolverServerError for a refused request."""
        turns: list[Turn] = []
        replies: list[Reply] = []
        async with self._slots:
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.deadline_s):
                    failure = await self._play(messages, seed, heard, turns, replies)
            except TimeoutError:
                failure = f"the conversation did not end within {self.deadline_s:g} s"
            except ServerUnavailable as error:
                own = f"the solver server at {self.completions_url}"
                failure = f"{self.endpoint.url if self.endpoint else own} failed: {error}"
            except ConversationRefused as error:
                failure = str(error)
            latency_s = time.monotonic() - started
        trajectory = Trajectory(tuple(turns))
        return Conversation(
            trajectory=trajectory,
            finished=failure is None,
            failure=failure,
            tokens_in=sum(reply.tokens_in for reply in replies),
            tokens_out=sum(reply.tokens_out for reply in replies),
            searches=len(trajectory.searches),
            latency_s=latency_s,
        )

    async def say(self, messages: Sequence[Message], most: int | None = None) -> Reply | None:
        """One turn of at most so many tokens without a search, or None if the messages leave no room.

        Raises as `converse`, and ServerUnavailable, ConversationRefused or TimeoutError if it fails.
        """
        async with self._slots, asyncio.timeout(self.deadline_s):
            return await self._begin(messages, (), most).reply(None)

    async def _play(
        self,
        messages: Sequence[Message],
        seed: int | None,
        heard: Heard | None,
        turns: list[Turn],
        replies: list[Reply],
    ) -> str | None:
        """Returns why a search failed, or None."""
        dialogue = self._begin(messages)
        for turn_number in range(1, self.max_turns + 1):
            reply = await dialogue.reply(seed)
            if reply is None:
                return None
            replies.append(reply)
            calls = reply.calls
            # Nobody would read the passages of a call in the last turn.
            if calls and turn_number < self.max_turns:
                asked = (
                    answered(call, self.search, self.topk, self.tool_response_limit, heard)
                    for call in calls[:MAX_CALLS_PER_TURN]
                )
                calls = (*await asyncio.gather(*asked), *calls[MAX_CALLS_PER_TURN:])
            turns.append(Turn(reply.text, calls, reply.truncated))
            failed = [call for call in calls if call.failed]
            if failed:
                return f"a search failed: {failed[0].error}"
            if not calls:
                return None
            dialogue.answer([call.response or "" for call in calls[:MAX_CALLS_PER_TURN]])
        return None

    def _begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (SEARCH_TOOL_SCHEMA,),
        most: int | None = None,
    ) -> "_TokenDialogue | ChatDialogue":
        limit = min(self.max_tokens_per_turn, most or self.max_tokens_per_turn)
        if self.endpoint is None:
            return _TokenDialogue(self, messages, tools, limit)
        return self.endpoint.dialogue(
            messages,
            tools=tools,
            max_tokens_per_turn=limit,
            max_context_tokens=self.max_context_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )


async def answered(
    call: SearchCall, search: Retriever, topk: int | None, limit: int, heard: Heard | None = None
) -> SearchCall:
    """The call with its response of at most `limit` characters. One that failed has none."""
    if call.queries is None:
        return replace(call, response=invalid_call_response(call))
    if heard:
        heard(call.queries, None)
    try:
        with waiting("search", getattr(search, "deadline_s", None)):
            results = await search.retrieve(call.queries, topk)
    except SearchUnavailable as error:
        return replace(call, failed=True, error=str(error))
    except SearchRefused as refusal:
        return refuse_call(call, refusal.detail)
    if heard:
        heard(call.queries, results)
    return replace(call, response=format_passages(call.queries, results, limit))


class _TokenDialogue:
    def __init__(
        self, agent: SearchAgent, messages: Sequence[Message], tools: Sequence[ToolSchema], limit: int
    ) -> None:
        self._agent, self._limit = agent, limit
        self._context = render_prompt_ids(agent.tokenizer, messages, tools or None)
        self._said: list[int] = []

    async def reply(self, seed: int | None) -> Reply | None:
        agent, tokens_in = self._agent, len(self._context)
        room = min(self._limit, agent.max_context_tokens - tokens_in)
        if room <= 0:
            return None
        said = await agent.complete(self._context, room, seed)
        self._said = said.ids
        text = read_turn(agent.tokenizer, self._context, said.ids)
        calls = parse_tool_calls(text, call_form(agent.tokenizer))
        return Reply(text, tuple(calls), said.truncated, tokens_in, len(said.ids))

    def answer(self, responses: Sequence[str]) -> None:
        self._context += self._said + tool_turn_ids(self._agent.tokenizer, self._said, responses)
