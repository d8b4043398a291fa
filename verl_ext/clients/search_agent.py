"""An agent that searches: one conversation over several turns, with tool calls answered in between.

Solver attempts, synthesis and evaluation run their conversations here, against a served model; veRL's
rollouts run theirs in `verl_ext.rollout.search_agent_loop`. Both build the same ids from the same samples,
call the tool by the same rules and return the same `Trajectory` (a test drives both with one script).

It uses any OpenAI-compatible *completions* server, with token ids as the prompt: a chat endpoint would render
the history again for each turn and change its tokens. Where that does not matter, because nobody trains on
the tokens, `endpoint` is one (`verl_ext.clients.chat_endpoint`).

    agent = SearchAgent("http://127.0.0.1:8001/v1/completions", "solver", tokenizer, search_client, topk=3, …)
    conversation = await agent.converse(messages)

A conversation is *finished* when the model ended it or reached a limit. If a service failed or the deadline
passed, it is unfinished, has the cause, and must not be scored. An agent's connections belong to the event
loop in which it is first used: one agent per loop, and `aclose` at the end.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from search.client import SearchRefused, SearchUnavailable
from verl_ext.clients.chat_endpoint import ChatDialogue, ChatEndpoint, ConversationRefused, Reply
from verl_ext.clients.served_model import ServedModel, ServerUnavailable
from verl_ext.method.chat import render_prompt_ids, tool_turn_ids
from verl_ext.method.passages import RESPONSE_LIMIT, format_passages
from verl_ext.method.prompts import MAX_TURNS, Message
from verl_ext.method.search_tool_schema import MAX_CALLS_PER_TURN, SEARCH_TOOL_SCHEMA
from verl_ext.method.tool_calls import invalid_call_response, parse_tool_calls, refuse_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.telemetry import waiting


class Retriever(Protocol):
    """What the agent uses of the search client; failures are `SearchUnavailable` or `SearchRefused`."""

    async def retrieve(self, queries: Sequence[str], topk: int | None = None) -> list[list[Any]]:
        """The passages for each query, best first."""
        ...


@dataclass(frozen=True)
class Conversation:
    """One conversation, finished or not."""

    trajectory: Trajectory
    finished: bool
    failure: str | None
    """Why the conversation is unfinished; None if it is finished."""
    tokens_in: int
    """Prompt tokens sent, summed over the turns."""
    tokens_out: int
    """Tokens sampled."""
    searches: int
    """Search calls that were answered."""
    latency_s: float
    """Wall-clock seconds, without the wait for a free slot."""


@dataclass
class _Progress:
    """What a conversation has done so far, kept if it is interrupted."""

    turns: list[Turn] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(eq=False)
class SearchAgent(ServedModel):
    """Plays conversations against one completions server and one search service, which its owner closes."""

    search: Retriever
    _: KW_ONLY
    topk: int
    max_tokens_per_turn: int
    max_context_tokens: int
    """Bounds prompt plus response of a conversation."""
    max_turns: int = MAX_TURNS
    tool_response_limit: int = RESPONSE_LIMIT
    """In characters."""
    endpoint: ChatEndpoint | None = None
    """A chat endpoint to converse with instead: `completions_url` and `tokenizer` are then not used. It is
    its owner's to close."""

    async def converse(self, messages: Sequence[Message], seed: int | None = None) -> Conversation:
        """Run one conversation from its prompt; the same seed gives the same turns from the same server.

        Raises SolverServerError when the server refuses the request itself.
        """
        progress = _Progress()
        async with self._slots:
            started = time.monotonic()
            try:
                async with asyncio.timeout(self.deadline_s):
                    failure = await self._play(messages, seed, progress)
            except TimeoutError:
                failure = f"the conversation did not end within {self.deadline_s:g} s"
            except ServerUnavailable as error:
                failure = f"the solver server at {self.completions_url} failed: {error}"
            except ConversationRefused as error:
                failure = str(error)
            latency_s = time.monotonic() - started
        trajectory = Trajectory(tuple(progress.turns))
        return Conversation(
            trajectory=trajectory,
            finished=failure is None,
            failure=failure,
            tokens_in=progress.tokens_in,
            tokens_out=progress.tokens_out,
            searches=len(trajectory.searches),
            latency_s=latency_s,
        )

    async def _play(self, messages: Sequence[Message], seed: int | None, progress: _Progress) -> str | None:
        """Sample turns until the model is done; returns why a search failed, or None."""
        dialogue = self._begin(messages)
        for turn_number in range(1, self.max_turns + 1):
            reply = await dialogue.reply(seed)
            if reply is None:
                return None
            progress.tokens_in += reply.tokens_in
            progress.tokens_out += reply.tokens_out
            calls = reply.calls
            # The passages of a call in the last turn would not be read.
            if calls and turn_number < self.max_turns:
                answered = await asyncio.gather(*map(self._respond, calls[:MAX_CALLS_PER_TURN]))
                calls = (*answered, *calls[MAX_CALLS_PER_TURN:])
            progress.turns.append(Turn(reply.text, calls, reply.truncated))
            failed = [call for call in calls if call.failed]
            if failed:
                return f"a search failed: {failed[0].error}"
            if not calls:
                return None
            dialogue.answer([call.response or "" for call in calls[:MAX_CALLS_PER_TURN]])
        return None

    def _begin(self, messages: Sequence[Message]) -> "_TokenDialogue | ChatDialogue":
        if self.endpoint is None:
            return _TokenDialogue(self, messages)
        return self.endpoint.dialogue(
            messages,
            max_tokens_per_turn=self.max_tokens_per_turn,
            max_context_tokens=self.max_context_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    async def _respond(self, call: SearchCall) -> SearchCall:
        """The call with the response that the model is shown."""
        if call.queries is None:
            return replace(call, response=invalid_call_response(call))
        try:
            with waiting("search", getattr(self.search, "deadline_s", None)):
                results = await self.search.retrieve(call.queries, self.topk)
        except SearchUnavailable as error:
            return replace(call, failed=True, error=str(error))
        except SearchRefused as refusal:
            return refuse_call(call, refusal.detail)
        return replace(call, response=format_passages(call.queries, results, self.tool_response_limit))


class _TokenDialogue:
    """One conversation with a completions server, as token ids that are only ever appended to."""

    def __init__(self, agent: SearchAgent, messages: Sequence[Message]) -> None:
        self._agent = agent
        self._context = render_prompt_ids(agent.tokenizer, messages, [SEARCH_TOOL_SCHEMA])
        self._said: list[int] = []

    async def reply(self, seed: int | None) -> Reply | None:
        """The next turn; None if no token is left for one."""
        agent, tokens_in = self._agent, len(self._context)
        room = min(agent.max_tokens_per_turn, agent.max_context_tokens - tokens_in)
        if room <= 0:
            return None
        said = await agent.complete(self._context, room, seed)
        self._said = said.ids
        calls = tuple(parse_tool_calls(said.text))
        return Reply(said.text, calls, said.truncated, tokens_in, len(said.ids))

    def answer(self, responses: Sequence[str]) -> None:
        """Append the last turn and the tool's responses to it."""
        self._context += self._said + tool_turn_ids(self._agent.tokenizer, self._said, responses)
