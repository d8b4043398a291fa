"""The project's own agent, which plays any environment, in the form of the contract: one object a run.

    agent = environment_agent(config, taskset, tokenizer, "smollm2-135m")
    rewards = await agent.make().run({"id": "crane", "data": {…}}, base_url=…, api_key=…)

It plays by the code of training and evaluation, token in and token out, over `/v1/completions`.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from drzero.labs.agents.contract import AgentClass
from drzero.ops.bearer import MODEL_KEY
from drzero.recipe.environment import limits_of
from environments.row import Row
from environments.taskset import Taskset
from verl_ext.clients.environment_agent import EnvironmentAgent, fitting
from verl_ext.episodes import EpisodeLimits


class EpisodeFailed(Exception):
    """An episode without a score; the message says why."""


class EnvironmentPlayer:
    """One episode."""

    def __init__(
        self, taskset: Taskset, tokenizer: Any, model: str, limits: EpisodeLimits, temperature: float
    ) -> None:
        self._taskset, self._tokenizer, self._model = taskset, tokenizer, model
        self._limits, self._temperature = limits, temperature

    async def run(self, data: Any, **extra_kwargs: Any) -> Mapping[str, float]:
        """Play the row; returns its reward and the parts that it is made of."""
        agent = EnvironmentAgent(
            f"{extra_kwargs['base_url']}/completions",
            self._model,
            self._tokenizer,
            taskset=self._taskset,
            limits=self._limits,
            temperature=self._temperature,
            key_variable=MODEL_KEY,
        )
        try:
            attempt = await agent.attempt(Row(data["id"], data["data"]))
        finally:
            await agent.aclose()
        if attempt.played is None or attempt.played.score is None:
            raise EpisodeFailed(attempt.failure)
        score = attempt.played.score
        return {"reward": score.reward, **score.parts}


def environment_agent(config: DictConfig, taskset: Taskset, tokenizer: Any, model: str) -> AgentClass:
    """The agent of an environment, with the limits of a resolved config."""
    limits = fitting(limits_of(config), config.solver.max_context_tokens)
    temperature = float(config.solver.temperature)
    return AgentClass(taskset.name, lambda: EnvironmentPlayer(taskset, tokenizer, model, limits, temperature))
