"""Scores of an evaluation in an environment: tasks solved with Wilson's interval, reward and its parts.

    score = score_episodes(journal.records, failed=0)
    console().print(environment_table("evaluate_wordle", "wordle", score))

An episode that failed is in no score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from rich.table import Table
from scipy import stats

from drzero.recipe.tables import new_table
from drzero.stages.scores import LEVEL, Records, wilson


@dataclass(frozen=True)
class EnvironmentScore:
    """What a model achieves in an environment."""

    n: int
    """Episodes that have a score."""
    em: float | None
    """Share of tasks solved, by the name that every evaluation's report has; None without an episode."""
    em_low: float | None
    em_high: float | None
    """Ends of the 95 % interval."""
    reward: float | None
    """The mean."""
    reward_low: float | None
    reward_high: float | None
    """Ends of Student's 95 % interval."""
    parts: dict[str, float]
    """Means, each over the episodes that have the part."""
    turns: float | None
    truncated_turn_share: float | None
    invalid_calls: int
    undeclared_calls: int
    """Of them, those of tools that there are not."""
    cut_off: int
    """Episodes that ended where no tokens were left."""
    token_drift: int
    """Episodes whose ids are not those that were sampled."""
    failed: int
    """Episodes without a score: the environment's code or a service failed."""


def score_episodes(records: Records, failed: int) -> EnvironmentScore:
    """The score of the records of `answers.jsonl`."""
    n = len(records)
    rewards = [float(record["reward"]) for record in records]
    low, high = wilson(sum(record["right"] for record in records), n) if n else (None, None)
    reward_low, reward_high = mean_interval(rewards)
    names = dict.fromkeys(name for record in records for name in record["parts"])
    turns = sum(record["turns"] for record in records)
    return EnvironmentScore(
        n=n,
        em=sum(record["right"] for record in records) / n if n else None,
        em_low=low,
        em_high=high,
        reward=fmean(rewards) if n else None,
        reward_low=reward_low,
        reward_high=reward_high,
        parts={name: fmean(r["parts"][name] for r in records if name in r["parts"]) for name in names},
        turns=turns / n if n else None,
        truncated_turn_share=sum(r["truncated_turns"] for r in records) / turns if turns else None,
        invalid_calls=sum(record["invalid_calls"] for record in records),
        undeclared_calls=sum(record["undeclared_calls"] for record in records),
        cut_off=sum(record["ended"] == "tokens" for record in records),
        token_drift=sum(record["token_drift"] for record in records),
        failed=failed,
    )


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's interval of a mean; none of fewer than two values, a point of equal ones."""
    if len(values) < 2:
        return None, None
    mean, error = float(np.mean(values)), float(stats.sem(values))
    half = error * float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return mean - half, mean + half


def environment_table(title: str, environment: str, score: EnvironmentScore) -> Table:
    """The score as a table of one row: an environment's parts are columns."""
    headings = ("n", "solved", "95 %\ninterval", "reward", "95 %\ninterval", *score.parts)
    ends = (
        "turns",
        "turns\ncut off",
        "invalid\ncalls",
        "undeclared\ncalls",
        "no room\nleft",
        "drift",
        "failed",
    )
    table = new_table(title, "", *(f">{heading}" for heading in (*headings, *ends)), padding=(0, 0, 0, 1))
    table.add_row(
        environment,
        *(str(score.n), _number(score.em), _between(score.em_low, score.em_high)),
        *(_number(score.reward), _between(score.reward_low, score.reward_high)),
        *map(_number, score.parts.values()),
        *("–" if score.turns is None else f"{score.turns:.2f}", _number(score.truncated_turn_share)),
        *(str(score.invalid_calls), str(score.undeclared_calls), str(score.cut_off)),
        *(str(score.token_drift), str(score.failed)),
    )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _between(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:.3f}–{high:.3f}"
