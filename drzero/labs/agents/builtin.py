"""The project's own agent, which plays any environment by the code of training and evaluation.

await environment_agent(config, taskset, tokenizer, "smollm2-135m").make().run(row, base_url=…, api_key=…)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from drzero.labs.agents.contract import AgentClass
from drzero.ops.bearer import MODEL_KEY
from drzero.recipe.environment import limits_of
from environments.row import Row
from environments.taskset import Taskset
from verl_ext.clients.environment_agent import EnvironmentAgent, fitting


class EpisodeFailed(Exception):
    """An episode without a score."""


@dataclass(frozen=True)
class EnvironmentPlayer:
    """Plays one episode."""

    config: DictConfig
    taskset: Taskset
    tokenizer: Any
    model: str

    async def run(self, data: Any, **extra_kwargs: Any) -> Mapping[str, float]:
        """Play the row. Returns its reward and the reward's parts."""
        agent = EnvironmentAgent(
            f"{extra_kwargs['base_url']}/completions",
            self.model,
            self.tokenizer,
            taskset=self.taskset,
            limits=fitting(limits_of(self.config), self.config.solver.max_context_tokens),
            temperature=float(self.config.solver.temperature),
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
    return AgentClass(taskset.name, lambda: EnvironmentPlayer(config, taskset, tokenizer, model))
