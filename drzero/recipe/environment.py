"""The environment that a config names: its taskset, its rows, and one of its episodes without a model.

    taskset = load_taskset(config)
    rows = rows_of(taskset, "eval", config.num_examples, config.data.seed)

Whatever an environment's own code does wrong is an EnvironmentUnusable of one line.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from environments.fault import EnvironmentFault, EnvironmentUnusable, guarded
from environments.registry import find, names
from environments.row import Row, Split
from environments.taskset import Taskset
from verl_ext.episodes import EpisodeLimits, Played, Sampled, play_row
from verl_ext.method.chat import turn_end_id

ROWS_PATIENCE = 10
"""How much longer than any other call a taskset may take for its rows: it may read them from a file."""


def load_taskset(config: DictConfig) -> Taskset:
    """The taskset that `environment` names; raises EnvironmentUnusable, with those there are for an unknown
    one."""
    environment, folder = config.environment, config.paths.environments
    if not environment.name:
        known = ", ".join(names(folder))
        raise EnvironmentUnusable(f"name an environment, env=NAME. There are: {known}")
    options = OmegaConf.to_container(environment.options, resolve=True)
    assert isinstance(options, dict)
    return find(environment.name, folder).load(**{str(name): value for name, value in options.items()})


def rows_of(taskset: Taskset, split: Split, n: int | None, seed: int) -> list[Row]:
    """The rows of a split, at least one; raises EnvironmentUnusable if there are none or they are no rows."""
    what, limit = f"{taskset.name}: Taskset.rows({split!r})", ROWS_PATIENCE * taskset.timeout_s
    try:
        rows = asyncio.run(guarded(what, taskset.rows, split, n, seed, timeout_s=limit))
    except EnvironmentFault as fault:
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


def limits_of(config: DictConfig) -> EpisodeLimits:
    """What an episode may take, as a run's config has it."""
    return EpisodeLimits(
        prompt_tokens=config.data.max_prompt_length,
        response_tokens=config.data.max_response_length,
        tokens_per_turn=config.rollout.max_tokens_per_turn,
        max_turns=config.environment.max_turns,
        call_form=config.environment.call_form,
    )


@dataclass
class _Silent:
    """In place of a model: every turn is one that says nothing."""

    tokenizer: Any

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        """The end of a turn."""
        return Sampled([turn_end_id(self.tokenizer)])


def play_silent(taskset: Taskset, row: Row, tokenizer: Any, limits: EpisodeLimits) -> Played:
    """An episode with a model that says nothing: what an environment does wrong shows without a model."""
    return asyncio.run(play_row(taskset, row, _Silent(tokenizer), limits))[-1]


def opening_tokens(taskset: Taskset, row: Row, tokenizer: Any) -> int:
    """How many tokens the first messages of a row's episode are: with room for none, it ends there.

    Of an environment that makes its ids itself they are not known before it is played.
    """
    limits = EpisodeLimits(prompt_tokens=0, response_tokens=1, tokens_per_turn=1)
    return len(play_silent(taskset, row, tokenizer, limits).prompt_ids)
