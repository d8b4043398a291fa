"""Plays a row of a `verifiers` taskset: each branch of the library's episode becomes one `Played`.

A branch is a path through the library's graph of messages. Its mask and log-probs are compared with the
model's samples, and any difference is token drift.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.types import content_text

from drzero.players.verifiers.endpoint import Endpoint
from drzero.players.verifiers.host import host_of
from drzero.players.verifiers.renderer import renderer_config
from drzero.players.verifiers.session import Clock, Session
from environments.call import parse_calls
from environments.conversation import Conversation, Message, Turn
from environments.fault import EnvironmentFault
from environments.row import Row
from environments.score import Score, score_fault
from environments.taskset import Taskset
from environments.verifiers.taskset import VerifiersTaskset
from verl_ext.episodes import Answered, EpisodeLimits, Model, Played
from verl_ext.method.chat import read_turn
from verl_ext.method.trajectory import token_drift


async def play(taskset: Taskset, row: Row, model: Model, limits: EpisodeLimits) -> list[Played]:
    """Play one episode. The last branch is the one that its agent ended on."""
    assert isinstance(taskset, VerifiersTaskset)
    return await _Play(taskset, row, model, limits).run()


class _Play:
    def __init__(self, taskset: VerifiersTaskset, row: Row, model: Model, limits: EpisodeLimits) -> None:
        self._taskset, self._row, self._model, self._limits = taskset, row, model, limits
        self._clock = Clock()
        self._sessions: dict[str, Session] = {}
        self._traces: list[Any] = []

    async def run(self) -> list[Played]:
        try:
            fault = self._fault(await self._episode())
        except EnvironmentFault as spoiled:
            fault = str(spoiled)
        for session in self._sessions.values():
            if session.failure is not None:
                raise session.failure
        branches = [played for trace in self._trained() for played in self._branches(trace)]
        if not branches:
            fault = fault or f"{self._taskset.name}: the model was asked nothing"
            branches = [Played([], [], [], None, Conversation(), None)]
        return [self._judged(played, fault) for played in branches]

    async def _episode(self) -> Any:
        server = await Endpoint.running()
        host = await host_of(self._taskset, self._row)
        client = vf.TrainClientConfig(
            base_url=f"{server.url}/v1",
            api_key_var="DRZERO_NO_KEY",  # none is needed, and other servers' keys are not for this one
            renderer=renderer_config(self._model.tokenizer, self._limits.call_form),
            renderer_model_name=self._model.tokenizer.name_or_path,
        )
        context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())

        def session_of(trace: Any) -> None:
            """Called in the library's thread, before the agent asks anything."""
            self._traces.append(trace)
            self._sessions[trace.id] = server.sessions[trace.id] = Session(
                self._model, self._limits, self._clock
            )

        try:
            task = self._taskset.task(self._row)
            return await host.play(task, context, self._clock, self._taskset.timeout_s, session_of)
        finally:
            for trace in self._traces:
                server.sessions.pop(trace.id, None)

    def _trained(self) -> list[Any]:
        return [trace for trace in self._traces if trace.agent.trainable]

    def _fault(self, episode: Any) -> str | None:
        name, trained = self._taskset.name, self._trained()
        for session in self._sessions.values():
            if session.too_long is not None:
                return f"{name}: {session.too_long}"
        for trace in self._traces:
            if trace.is_timeout:
                return f"{name}: the taskset's own limit of time has passed ({trace.stop_condition})"
        errors = [*episode.errors, *(error for trace in self._traces for error in trace.errors)]
        if errors or not episode.ok:
            return f"{name} failed: {_one_line(errors)}"
        if len(trained) != 1:
            return f"{name}: an episode has {len(trained)} agents to train, and veRL's row has one reward"
        return None

    def _judged(self, played: Played, fault: str | None) -> Played:
        if fault is None:
            (trace,) = self._trained()
            score = self._score(trace)
            wrong = score_fault(score)
            fault = f"{self._taskset.name}: {wrong}" if wrong else None
            played.score = None if wrong else score
        if fault is not None:
            played.fault, played.ended = f"{fault} [row {self._row.id}]", "fault"
        return played

    def _score(self, trace: Any) -> Score:
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Score(trace.reward, bool(trace.reward >= self._taskset.solved_at), {**metrics, **rewards})

    def _branches(self, trace: Any) -> Iterator[Played]:
        session = self._sessions[trace.id]
        left = list(session.asked)
        paths = [branch for branch in trace.branches if branch.trainable and any(branch.sampled_mask)]
        for branch in paths:
            ids = branch.token_ids
            asked = [one for one in session.asked if ids[: len(one.known)] == one.known]
            played = self._played(branch, asked)
            # Count a request that several branches share once.
            new = [one for one in asked if one in left]
            left = [one for one in left if one not in new]
            played.tokens_in = sum(len(one.prompt_ids) for one in new)
            played.tokens_out = sum(len(one.sampled.ids) for one in new)
            played.ended = "turns" if trace.stop_condition == "max_turns" else session.ended
            if branch is paths[-1] and left:  # sampled, but on no branch
                played.token_drift = 1
            yield played

    def _played(self, branch: Any, asked: Sequence[Answered]) -> Played:
        ids, mask = branch.token_ids, branch.sampled_mask
        first = mask.index(True)
        known = bool(asked) and all(one.sampled.log_probs is not None for one in asked)
        played = Played(
            prompt_ids=ids[:first],
            response_ids=ids[first:],
            response_mask=[int(sampled) for sampled in mask[first:]],
            log_probs=branch.logprobs[first:] if known else None,
            conversation=self._conversation(branch, asked),
            score=None,
        )
        sampled = [(one.prompt_ids, one.sampled.ids) for one in asked]
        complete = sum(played.response_mask) == sum(len(ids) for _, ids in sampled)
        played.token_drift = token_drift(played, sampled) if sampled and complete else 1
        return played

    def _conversation(self, branch: Any, asked: Sequence[Answered]) -> Conversation:
        sampled = {tuple(one.sampled.ids): one for one in asked}
        tools = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
            for tool in branch.tools
        ]
        opening: list[Message] = []
        turns: list[Turn] = []
        for node in branch.nodes:
            if node.sampled:
                ids = [token for token, drawn in zip(node.token_ids, node.mask, strict=True) if drawn]
                one = sampled.get(tuple(ids))
                text = read_turn(self._model.tokenizer, one.prompt_ids if one else (), ids)
                calls = parse_calls(text, tools, self._limits.call_form)
                turns.append(Turn(text, calls, one is not None and one.sampled.truncated))
                continue
            message = {"role": node.message.role, "content": content_text(node.message.content)}
            if not turns:
                opening.append(message)
            else:
                last = turns[-1]
                turns[-1] = Turn(last.text, last.calls, last.truncated, (*last.answers, message))
        return Conversation(tuple(opening), tuple(turns))


def _one_line(errors: Sequence[Any]) -> str:
    """The other errors led to the last one."""
    if not errors:
        return "for a reason that it does not say"
    return " ".join(f"{errors[-1].type}: {errors[-1].message}".split())[:300]
