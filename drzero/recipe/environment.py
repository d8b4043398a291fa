"""The environment that a config names: its taskset, its rows, and an episode without a model.

taskset = load_taskset(config)
rows = rows_of(taskset, "eval", config.num_examples, config.data.seed)
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from environments.call import ToolSchema
from environments.fault import EnvironmentFault, EnvironmentUnusable, guarded
from environments.registry import find, names
from environments.row import Row, Split
from environments.taskset import Taskset
from verl_ext.episodes import EpisodeLimits, Played, Sampled, ask, play_row
from verl_ext.method.chat import call_form, turn_end_id

ROWS_PATIENCE = 10  # rows may take this many times longer than other calls, because they may come from a file


def load_taskset(config: DictConfig) -> Taskset:
    """The taskset that `environment` names. Raises EnvironmentUnusable with the known names."""
    environment, folder = config.environment, config.paths.environments
    if not environment.name:
        known = ", ".join(names(folder))
        raise EnvironmentUnusable(f"name an environment, env=NAME. There are: {known}")
    options = OmegaConf.to_container(environment.options, resolve=True)
    assert isinstance(options, dict)
    return find(environment.name, folder).load(**{str(name): value for name, value in options.items()})


def rows_of(taskset: Taskset, split: Split, n: int | None, seed: int) -> list[Row]:
    """The rows of a split, at least one. Raises EnvironmentUnusable."""
    what, limit = f"{taskset.name}: Taskset.rows({split!r})", ROWS_PATIENCE * taskset.timeout_s
    try:
        rows = asyncio.run(guarded(what, taskset.rows, split, n, seed, timeout_s=limit))
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, EnvironmentUnusable):  # it says itself what to do
            raise fault.__cause__ from None
        raise EnvironmentUnusable(str(fault)) from fault
    if not isinstance(rows, Sequence) or not all(isinstance(row, Row) for row in rows):
        raise EnvironmentUnusable(f"{what} gave {type(rows).__name__}, not a list of Row")
    if not rows:
        raise EnvironmentUnusable(f"{what} gave no rows")
    seen: set[str] = set()
    for row in rows:
        if not isinstance(row.id, str):
            raise EnvironmentUnusable(f"{what}: the id of a row is a text, not {row.id!r}")
        if row.id in seen:
            raise EnvironmentUnusable(f"{what} gave two rows of the id {row.id!r}")
        seen.add(row.id)
        try:
            json.dumps(dict(row.data))
        except (TypeError, ValueError) as error:
            raise EnvironmentUnusable(f"{what}: the data of row {row.id!r} is no JSON: {error}") from error
    return list(rows if n is None else rows[:n])


def limits_of(config: DictConfig, tokenizer: Any) -> EpisodeLimits:
    """An episode's limits, from a run's config."""
    return EpisodeLimits(
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.data.max_response_length,
        tokens_per_turn=config.rollout.max_tokens_per_turn,
        max_turns=config.environment.max_turns,
        call_form=call_form(tokenizer, config.environment.call_form),
    )


@dataclass
class _Silent:
    tokenizer: Any

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        return Sampled([turn_end_id(self.tokenizer)])


def play_silent(taskset: Taskset, row: Row, tokenizer: Any, limits: EpisodeLimits) -> Played:
    """Play an episode with silence, which shows an environment's faults without a model."""
    return asyncio.run(play_row(taskset, row, _Silent(tokenizer), limits))[-1]


def opening_tools(taskset: Taskset, row: Row) -> list[ToolSchema]:
    """The tools at the beginning of a row's episode. Raises EnvironmentFault."""

    async def tools() -> list[ToolSchema]:
        episode = await ask(taskset, "Taskset.episode", taskset.episode, row)
        try:
            return list(await ask(taskset, "Episode.tools", episode.tools) or ())
        finally:
            await ask(taskset, "Episode.close", episode.close)

    return asyncio.run(tools())


def opening_tokens(taskset: Taskset, row: Row, tokenizer: Any) -> int:
    """Tokens of the first messages of a row's episode, unless the environment makes its ids itself."""
    limits = EpisodeLimits(prompt_tokens=0, response_tokens=1, tokens_per_turn=1)
    return len(play_silent(taskset, row, tokenizer, limits).prompt_ids)
