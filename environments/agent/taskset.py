"""An agent of your own as an environment: its tasks are rows of a file, and it plays itself."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.agent.contract import RewardRule, total
from environments.agent.load import load_agent, load_items
from environments.episode import Episode
from environments.fault import EnvironmentUnusable
from environments.row import Row, Split
from environments.score import Score
from environments.taskset import Taskset

_EVERY = 10  # Without a file for evaluation, one task of so many is held out


class AgentTaskset(Taskset):
    """The tasks of one agent."""

    player = "drzero.players.gateway.player:play"
    filters_groups = True

    def __init__(
        self,
        name: str,
        *,
        data: str | None = None,
        eval_data: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        search: bool = False,
        search_url: str | None = None,
        solved_at: float = 1.0,
        max_calls: int = 50,
        timeout_s: float = 300.0,
        tries: int = 2,
    ) -> None:
        """`weights` are of a dict's rewards. A failed episode begins again until it had `tries`.

        With `search`, the run's search service is started, and its address is `Endpoint.search_url`.
        """
        self.name, self.max_turns, self.timeout_s = f"agent:{name}", max_calls, float(timeout_s)
        self.agent = load_agent(name, dict(arguments or {}))
        self.weights = {part: float(weight) for part, weight in dict(weights or {}).items()}
        self._solved_at, self.tries = float(solved_at), int(tries)
        self.needs_retrieval, self.search_url = search, search_url if search else None
        if data is None:
            raise EnvironmentUnusable(f"{self.name}: name its tasks, tasks=FILE (.jsonl or .parquet)")
        self._files: dict[Split, str | None] = {"train": data, "eval": eval_data}
        self.held_out = "its own file" if eval_data else f"every {_EVERY}th task"
        self.files = [file for file in (self.agent.file, Path(eval_data or data)) if file is not None]

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """The tasks of a split in an order by the seed. An item's `id` names its row, else its place."""
        file = self._files[split] or str(self._files["train"])
        items = load_items(Path(file))
        rows = [
            Row(str(item.get("id", f"{split}-{place}")), {"task": item}) for place, item in enumerate(items)
        ]
        if self._files["eval"] is None:
            rows = _half(file, rows, split)
        random.Random(seed).shuffle(rows)
        return rows[:n]

    def episode(self, row: Row) -> Episode:
        """Never called, since the agent plays."""
        raise NotImplementedError(f"{self.name} is played by {self.player}")

    def scored(self, returned: Any, calls: int) -> Score | str:
        """The score of an agent's rewards, or their fault."""
        if fault := RewardRule().fault(returned):
            return fault
        if isinstance(returned, Sequence) and len(returned) != calls:
            return f"it returned {len(returned)} rewards for {calls} model calls"
        if unknown := set(self.weights) - set(returned if isinstance(returned, Mapping) else ()):
            return f"the weights name {sorted(unknown)}, and the agent returned no such reward"
        reward = total(returned, self.weights)
        if not math.isfinite(reward):
            return f"the reward adds up to {reward}"
        parts = (
            {name: float(value) for name, value in returned.items()} if isinstance(returned, Mapping) else {}
        )
        return Score(reward, reward >= self._solved_at, parts)


def _half(file: str, rows: list[Row], split: Split) -> list[Row]:
    held_out = rows[_EVERY - 1 :: _EVERY]
    if split == "eval" and not held_out:
        why = f"tasks={file} has {len(rows)} tasks, and every {_EVERY}th is held out: there is none"
        raise EnvironmentUnusable(f"{why}. Name others, environment.options.eval_data=FILE")
    return held_out if split == "eval" else [row for n, row in enumerate(rows, 1) if n % _EVERY]
