"""Scores in an environment: tasks solved, reward and its parts. A failed episode is in no score."""

from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from drzero.recipe.tables import new_table
from drzero.stages.evaluate import Records
from drzero.stages.evaluate.intervals import mean_interval, wilson


@dataclass(frozen=True)
class EnvironmentScore:
    """A model's score in an environment. Means and shares are None without an episode."""

    n: int
    em: float | None  # share of tasks solved; every evaluation's report calls it `em`
    em_low: float | None
    em_high: float | None
    reward: float | None
    reward_low: float | None
    reward_high: float | None
    parts: dict[str, float]  # means, each over the episodes that have the part
    turns: float | None
    truncated_turn_share: float | None
    invalid_calls: int
    undeclared_calls: int  # invalid calls of tools that do not exist
    cut_off: int  # episodes that ran out of tokens
    token_drift: int  # episodes whose ids differ from the sampled ones
    failed: int  # episodes without a score: the environment's code or a service failed


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


def environment_table(title: str, environment: str, score: EnvironmentScore) -> Table:
    """The score as a table of one row, with a column for each part."""
    cells = {
        "n": str(score.n),
        "solved": _number(score.em),
        "95 %\ninterval": _between(score.em_low, score.em_high),
        "reward": _number(score.reward),
        "95 %\ninterval ": _between(score.reward_low, score.reward_high),
        **{part: _number(value) for part, value in score.parts.items()},
        "turns": "–" if score.turns is None else f"{score.turns:.2f}",
        "turns\ncut off": _number(score.truncated_turn_share),
        "invalid\ncalls": str(score.invalid_calls),
        "undeclared\ncalls": str(score.undeclared_calls),
        "no room\nleft": str(score.cut_off),
        "drift": str(score.token_drift),
        "failed": str(score.failed),
    }
    table = new_table(title, "", *(f">{heading.rstrip()}" for heading in cells), padding=(0, 0, 0, 1))
    table.add_row(environment, *cells.values())
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _between(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:.3f}–{high:.3f}"
