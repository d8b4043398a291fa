"""Plays an episode of any environment with a model, token in, token out.

An error in the environment's code is a `fault` without a score. Errors of the model's engine are raised.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol, TypeAlias

from jinja2 import TemplateError

from drzero.ops.telemetry import waiting
from environments.call import parse_calls, tools_fault
from environments.conversation import Conversation, Message, Turn
from environments.episode import Episode
from environments.fault import EnvironmentFault, guarded, one_line
from environments.row import Row
from environments.score import Score, score_fault
from environments.taskset import Taskset
from verl_ext.method.chat import next_turn_ids, read_turn, render_prompt_ids
from verl_ext.method.trajectory import token_drift


@dataclass(frozen=True)
class Sampled:
    """One turn as sampled."""

    ids: list[int]  # at least one, with the end of the turn if the model wrote it
    log_probs: list[float] | None = None
    truncated: bool = False  # cut off by the token limit


@dataclass
class Answered:
    """One answered request of a conversation that a player keeps."""

    prompt_ids: list[int]
    sampled: Sampled

    @property
    def known(self) -> list[int]:
        """Prompt and sampled ids."""
        return self.prompt_ids + self.sampled.ids


class Model(Protocol):
    """What samples the turns of an episode."""

    tokenizer: Any

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        """Sample the next turn. Errors of its engine or server propagate."""
        ...


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of one episode."""

    prompt_tokens: int
    response_tokens: int  # everything after the prompt, with the environment's messages
    tokens_per_turn: int
    max_turns: int | None = None  # in addition to the taskset's own limit
    call_form: str = "hermes"  # how the model writes tool calls, a key of `environments.call.FORMS`


Ended = Literal["over", "turns", "tokens", "fault"]


@dataclass
class Played:
    """One episode or branch: the ids to train on, and what happened."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]  # 1 for sampled ids, 0 for the environment's
    log_probs: list[float] | None  # 0 for the environment's ids. None if the engine gives none
    conversation: Conversation
    score: Score | None  # None after a fault
    fault: str | None = None  # why there is no score, in one line
    ended: Ended = "over"  # by the environment, or by a limit on turns or tokens
    token_drift: int = 0
    tokens_in: int = 0  # prompt tokens sent, summed over the turns
    tokens_out: int = 0
    extra: dict[str, Any] = field(default_factory=dict)  # the engine's report, for the trainer

    @property
    def agent(self) -> dict[str, Any]:
        """What an agent of one's own did, in JSON's form (docs/dumps.md). Empty for any other."""
        return dict(json.loads(json.dumps(self.extra.get("agent", {}))))

    @property
    def own_turns(self) -> Sequence[Turn]:
        """Its turns, without the first ones that another row of an agent's episode has."""
        turns = self.conversation.turns
        return turns[len(turns) - len(self.agent["places"]) :] if self.agent else turns


def episode_turns(rows: Sequence[Played]) -> list[Turn]:
    """Each turn of an episode once. A library's branches begin alike: only the last counts."""
    return [turn for row in (rows if rows[-1].agent else rows[-1:]) for turn in row.own_turns]


Player: TypeAlias = Callable[[Taskset, Row, Model, EpisodeLimits], Awaitable[Sequence[Played]]]


async def play_row(taskset: Taskset, row: Row, model: Model, limits: EpisodeLimits) -> list[Played]:
    """Play a row with its taskset's player. Returns one `Played` per branch, the episode's own last."""
    module, _, name = taskset.player.partition(":")
    player: Player = getattr(import_module(module), name)
    return list(await player(taskset, row, model, limits))


async def play(taskset: Taskset, row: Row, model: Model, limits: EpisodeLimits) -> list[Played]:
    """Play one episode from its first message to its score."""
    return [await _Play(taskset, row, model, limits).run()]


async def ask(taskset: Taskset, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an environment's code. Raises EnvironmentFault, which names the `part`."""
    with waiting("environment", taskset.timeout_s):
        return await guarded(f"{taskset.name}: {part}", function, *arguments, timeout_s=taskset.timeout_s)


class _Play:
    def __init__(self, taskset: Taskset, row: Row, model: Model, limits: EpisodeLimits) -> None:
        self._taskset, self._row, self._model, self._limits = taskset, row, model, limits
        self._played = Played([], [], [], None, Conversation(), None)
        self._turns: list[Turn] = []
        self._sampled: list[tuple[list[int], list[int]]] = []

    async def run(self) -> Played:
        """Play to the end, or to a fault of the environment."""
        played, episode = self._played, None
        try:
            episode = await ask(self._taskset, "Taskset.episode", self._taskset.episode, self._row)
            if not isinstance(episode, Episode):
                kind = type(episode).__name__
                raise EnvironmentFault(f"{self._taskset.name}: Taskset.episode gave a {kind}, not an Episode")
            await self._converse(episode)
            score: Score = await ask(self._taskset, "Episode.score", episode.score)
            if wrong := score_fault(score):
                raise EnvironmentFault(f"{self._taskset.name}: Episode.score: {wrong}")
            played.score = score
        except EnvironmentFault as fault:
            played.fault, played.ended = f"{fault} [row {self._row.id}]", "fault"
        finally:
            if isinstance(episode, Episode):
                await self._close(episode)
        played.conversation = Conversation(played.conversation.opening, tuple(self._turns))
        if played.response_ids:
            played.token_drift = token_drift(played, self._sampled)
        return played

    async def _converse(self, episode: Episode) -> None:
        taskset, limits, played = self._taskset, self._limits, self._played
        opening = _messages(await ask(taskset, "Episode.messages", episode.messages), taskset, "messages")
        tools = await self._tools(episode)
        played.conversation = Conversation(tuple(opening))
        played.prompt_ids = self._rendered(render_prompt_ids, opening, tools or None)
        if len(played.prompt_ids) > limits.prompt_tokens:
            raise EnvironmentFault(
                f"{taskset.name}: the first messages are {len(played.prompt_ids)} tokens, more than "
                f"data.max_prompt_length={limits.prompt_tokens}"
            )
        most = min(taskset.max_turns, limits.max_turns or taskset.max_turns)
        for number in range(1, most + 1):
            turn = await self._sample(tools)
            answers = await ask(taskset, "Episode.respond", episode.respond, turn)
            if answers is None:
                self._turns.append(turn)
                return
            answers = _messages(answers, taskset, "respond")
            self._turns.append(Turn(turn.text, turn.calls, turn.truncated, tuple(answers)))
            if number == most:
                played.ended = "turns"
            elif not self._append(answers):
                played.ended = "tokens"
                return
            tools = await self._tools(episode)  # an answer may have added some

    async def _tools(self, episode: Episode) -> list[Any]:
        tools = await ask(self._taskset, "Episode.tools", episode.tools) or ()
        if wrong := tools_fault(tools):
            raise EnvironmentFault(f"{self._taskset.name}: Episode.tools: {wrong}")
        return list(tools)

    def _rendered(self, render: Callable[..., list[int]], *arguments: Any) -> list[int]:
        """Raises EnvironmentFault if the chat template rejects the messages or tools."""
        try:
            return render(self._model.tokenizer, *arguments)
        except (TemplateError, TypeError, ValueError) as error:
            why = one_line(error.with_traceback(None))
            raise EnvironmentFault(
                f"{self._taskset.name}: the model's chat template does not take its messages: {why}"
            ) from error

    async def _sample(self, tools: Sequence[Any]) -> Turn:
        played, limits = self._played, self._limits
        context = played.prompt_ids + played.response_ids
        room = min(limits.tokens_per_turn, limits.response_tokens - len(played.response_ids))
        sampled = await self._model.sample(context, room)
        self._sampled.append((context, list(sampled.ids)))
        played.tokens_in += len(context)
        played.tokens_out += len(sampled.ids)
        if sampled.log_probs is not None:
            played.log_probs = [*(played.log_probs or [0.0] * len(played.response_ids)), *sampled.log_probs]
        played.response_ids += sampled.ids
        played.response_mask += [1] * len(sampled.ids)
        text = read_turn(self._model.tokenizer, context, sampled.ids)
        return Turn(text, parse_calls(text, tools, limits.call_form), sampled.truncated)

    def _append(self, answers: Sequence[Message]) -> bool:
        """Returns False, adding nothing, if no turn would fit afterwards."""
        played = self._played
        ids = self._rendered(next_turn_ids, self._sampled[-1][1], answers)
        if len(played.response_ids) + len(ids) >= self._limits.response_tokens:
            return False
        played.response_ids += ids
        played.response_mask += [0] * len(ids)
        if played.log_probs is not None:
            played.log_probs += [0.0] * len(ids)
        return True

    async def _close(self, episode: Episode) -> None:
        try:
            await ask(self._taskset, "Episode.close", episode.close)
        except EnvironmentFault as fault:
            # The score stands. Failing to clean up is the environment's own problem.
            self._played.extra["close_fault"] = str(fault)


def _messages(given: Any, taskset: Taskset, part: str) -> list[Message]:
    what = f"{taskset.name}: Episode.{part}"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise EnvironmentFault(f"{what} gave {type(given).__name__}, not a list of messages")
    for message in given:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant", "tool") or not isinstance(message.get("content"), str):
            raise EnvironmentFault(f'{what} gave {message!r:.80}, not {{"role": …, "content": a text}}')
    return list(given)
