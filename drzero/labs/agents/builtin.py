"""The project's own agent, which plays any environment by the code of training and evaluation.

await environment_agent(config, taskset, tokenizer, "smollm2-135m").make().run(row, base_url=…, api_key=…)
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from drzero.ops.bearer import MODEL_KEY
from drzero.recipe.environment import limits_of
from environments.agent.contract import Agent, Endpoint
from environments.row import Row
from environments.taskset import Taskset
from verl_ext.clients.environment_agent import EnvironmentAgent, fitting


class EpisodeFailed(Exception):
    """An episode without a score."""


def environment_agent(config: DictConfig, taskset: Taskset, tokenizer: Any, model: str) -> Agent:
    """The agent of an environment, with the limits of a resolved config."""

    async def play(task: Any, endpoint: Endpoint) -> Mapping[str, float]:
        """Play the row. Returns its reward and the reward's parts."""
        agent = EnvironmentAgent(
            f"{endpoint.base_url}/completions",
            model,
            tokenizer,
            taskset=taskset,
            limits=fitting(limits_of(config, tokenizer), config.solver.max_context_tokens),
            temperature=float(config.solver.temperature),
            key_variable=MODEL_KEY,
        )
        try:
            attempt = await agent.attempt(Row(task["id"], task["data"]))
        finally:
            await agent.aclose()
        if attempt.played is None or attempt.played.score is None:
            raise EpisodeFailed(attempt.failure)
        score = attempt.played.score
        return {"reward": score.reward, **score.parts}

    return Agent(taskset.name, play)
