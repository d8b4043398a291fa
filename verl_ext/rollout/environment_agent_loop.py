"""The `environment` loop: veRL's rollout of any environment, one row for each branch (veRL 0.9.1)."""

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from drzero.ops.telemetry import waiting
from environments.registry import find
from environments.row import Row
from environments.taskset import Taskset
from verl_ext.episodes import EpisodeLimits, Played, Sampled, episode_turns, play_row
from verl_ext.method import chat
from verl_ext.rollout.turn_builder import NO_FAMILY


@functools.cache
def _taskset(name: str, folder: str | None, options_json: str) -> Taskset:
    return find(name, folder).load(**json.loads(options_json))


class EnvironmentAgentLoop(AgentLoopBase):
    """One rollout of an environment."""

    def __init__(
        self,
        *args: Any,
        environment: str,
        folder: str | None,
        options: Mapping[str, Any],
        max_tokens_per_turn: int,
        max_turns: int | None,
        call_form: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs | NO_FAMILY)
        self.tokenizer: Any = self.tokenizer  # veRL annotates it with the factory class
        plain = OmegaConf.to_container(OmegaConf.create(dict(options)), resolve=True)
        self._taskset = _taskset(environment, folder, json.dumps(plain, sort_keys=True))
        self._limits = EpisodeLimits(
            prompt_tokens=self.rollout_config.prompt_length,
            response_tokens=self.rollout_config.response_length,
            tokens_per_turn=max_tokens_per_turn,
            max_turns=max_turns,
            call_form=chat.call_form(self.tokenizer, call_form),
        )

    # veRL takes one output or a list (agent_loop_tq.py), but its base class is not annotated so.
    async def run(  # type: ignore[override]
        self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any
    ) -> list[AgentLoopOutput]:
        """Play the row's episode. Returns one output per branch, the episode's own last."""
        row = Row(kwargs["extra_info"]["row"], json.loads(kwargs["extra_info"]["task"]))
        # An episode that fails before its first sample still has the step's weights.
        version = dict.fromkeys(("min_global_steps", "max_global_steps"), kwargs.get("global_steps"))
        model = _Engine(self.server_manager, self.tokenizer, sampling_params, version)
        began = time.monotonic()
        with waiting("rollout"):
            branches = await play_row(self._taskset, row, model, self._limits)
        model.extra["rollout_s"] = time.monotonic() - began
        reward = reward_fields(branches)
        return [self._output(played, model, reward) for played in branches]

    def _output(self, played: Played, model: "_Engine", reward: dict[str, Any]) -> AgentLoopOutput:
        if not played.response_ids:  # a fault before the first sample, but a row must have a token
            end = self.tokenizer.eos_token_id
            played.prompt_ids = (played.prompt_ids or [end])[-self.rollout_config.prompt_length :]
            played.response_ids, played.response_mask = [end], [0]
            played.log_probs = [0.0]
        return AgentLoopOutput(
            prompt_ids=played.prompt_ids,
            response_ids=played.response_ids,
            response_mask=played.response_mask,
            response_logprobs=played.log_probs,
            reward_score=reward["score"],
            num_turns=2 * len(played.conversation.turns) + 1,
            metrics=AgentLoopMetrics(generate_sequences=model.seconds),
            extra_fields={
                **model.extra,
                "conversation": played.conversation.to_dict(),
                "token_drift": played.token_drift,
                # Not in the reward's fields: all rows of an episode have the same of those.
                "agent": played.agent,
                "reward_extra_info": reward,
            },
        )


def reward_fields(rows: Sequence[Played]) -> dict[str, Any]:
    """An episode's score as a reward function returns it. `filter_score` is NaN for invalid rows."""
    played, turns = rows[-1], episode_turns(rows)
    score, calls = played.score, [call for turn in turns for call in turn.calls]
    valid = score is not None
    return {
        "score": score.reward if score else 0.0,
        "valid": valid,
        "reason_invalid": played.fault,
        "filter_score": score.reward if score else math.nan,
        "success": bool(score and score.success),
        "parts": json.dumps(dict(score.parts) if score else {}),
        "ended": played.ended,
        "turns": len(turns),
        "calls": len(calls),
        "invalid_calls": sum(not call.valid for call in calls),
        "undeclared_calls": sum(call.undeclared for call in calls),
    }


@dataclass
class _Engine:
    """An episode stays with its first server."""

    server_manager: Any
    tokenizer: Any
    sampling_params: Mapping[str, Any]
    extra: dict[str, Any]  # reported by the engine: versions of the weights
    seconds: float = 0.0  # summed over the samples
    _turns: int = 0

    def __post_init__(self) -> None:
        self._ends = chat.turn_ends(self.tokenizer)
        self._request_id = uuid4().hex

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        """Raises RuntimeError if the engine returns nothing."""
        began = time.monotonic()
        with waiting("generation"):
            output = await self.server_manager.generate(
                request_id=self._request_id,
                prompt_ids=list(prompt_ids),
                sampling_params={
                    **self.sampling_params,
                    "max_tokens": max_tokens,
                    "stop_token_ids": sorted(self._ends),
                },
            )
        self.seconds += time.monotonic() - began
        ids = list(output.token_ids)
        if not ids:  # not the model's mistake, because an engine always samples at least one id
            raise RuntimeError(
                "the rollout engine returned no token: aborted, or no room left in max_model_len"
            )
        said = dict(output.extra_fields)
        # Everything from the first turn, and the last version from later ones.
        newest = said.get("max_global_steps", self.extra["max_global_steps"])
        self.extra |= said if not self._turns else {"max_global_steps": newest}
        self._turns += 1
        truncated = len(ids) >= max_tokens and ids[-1] not in self._ends
        return Sampled(ids, list(output.log_probs) if output.log_probs else None, truncated)
