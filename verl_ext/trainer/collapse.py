"""Collapse alarms, on averages over a window of steps. A resumed run compares with its restart."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from verl_ext.method.answers import normalize_answer
from verl_ext.method.trajectory import Trajectory
from verl_ext.trainer.step_metrics import mean

if TYPE_CHECKING:  # readers of WINDOW need neither TransferQueue nor Ray
    from verl_ext.trainer.step_rows import StepRow

WINDOW = 5  # steps to average

# A group of equal rewards has advantage 0. With four of five such groups, four fifths of a step is wasted.
ZERO_VARIANCE_LIMIT = 0.8
# e^0.05 = 1.05 choices a token: samples of one prompt are nearly the same text.
ENTROPY_LIMIT_NATS = 0.05
# Half or twice the length at the start: the policy has dropped its reasoning or pads its text.
LENGTH_FACTOR_LIMIT = 2.0
# Near the maximum of 1 only difficulty is left to learn. If it halves, only the format is optimized.
FORMAT_LIMIT, DIFFICULTY_FALL_LIMIT = 0.95, 0.5
# Half of the answers to yes/no questions are right by chance, which pays difficulty for nothing.
YES_NO_LIMIT = 0.5
# Years and counts can be guessed within a range. The limit is higher, because dates are good answers.
NUMBER_LIMIT = 0.7
# Two questions that share 7 of 10 word pairs are one template with different names.
SIMILARITY_LIMIT = 0.7
# Prompts have different documents, so a repeated question is not about its document.
DUPLICATE_LIMIT = 0.2
# Below a tenth, most groups of five have no search in them, and nothing is left to reinforce.
SEARCHED_LIMIT = 0.1

ALARM = "drzero/collapse/alarm/"  # prefix of the metrics of active alarms

_NUMBER = re.compile(r"[+-]?\d[\d.,:/ -]*%?|zero|one|two|three|four|five|six|seven|eight|nine|ten")


def collapse_metrics(
    rows: Sequence[StepRow], groups: Sequence[Hashable], log_probs: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Metrics of one step. `entropy` is the negated mean of the sampler's `log_probs`, in nats a token."""
    good = [index for index, row in enumerate(rows) if row.counts]
    rewards: dict[Hashable, dict[str, float]] = {}
    sampled: Counter[str] = Counter()  # all rows of a rollout
    for index in good:
        rewards.setdefault(groups[index], {})[rows[index].rollout] = float(rows[index].reward["score"])
        sampled[rows[index].rollout] += len(log_probs[index])
    compared = [group.values() for group in rewards.values() if len(group) > 1]
    tokens = [value for index in good for value in log_probs[index]]
    metrics = {
        "zero_variance_share": mean([min(group) == max(group) for group in compared]),
        "entropy": -mean(tokens),
        "response_tokens": mean([*sampled.values()]),
    }
    # A challenger's one-hop question needs no search. A row without a hop count may need several.
    searching = [rows[index] for index in good if isinstance(rows[index].trajectory, Trajectory)]
    if needing := [row for row in searching if row.hop != 1]:
        metrics["searched_share"] = mean([bool(row.trajectory.searches) for row in needing])
    reward_parts = [rows[index].reward for index in good]
    if any("integrity" in part for part in reward_parts):
        asked = [part for part in reward_parts if part["integrity"]]
        metrics |= question_metrics([part["question"] for part in asked], [part["answer"] for part in asked])
        metrics["format_saturated_share"] = mean([part["format"] >= 1 for part in asked])
        metrics["format"] = mean([part["format"] for part in asked])
        metrics["difficulty"] = mean([part["difficulty"] for part in asked])
    return {f"drzero/collapse/{name}": float(value) for name, value in metrics.items()}


def question_metrics(questions: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """Shares of answer types and repeats, and the mean overlap of word pairs with the nearest question."""
    # Markers at both ends give one-word questions word pairs too.
    pairs = [frozenset(pairwise(["^", *normalize_answer(question).split(), "$"])) for question in questions]
    nearest = [
        max((len(own & other) / len(own | other) for j, other in enumerate(pairs) if j != i), default=0.0)
        for i, own in enumerate(pairs)
    ]
    distinct = len({normalize_answer(question) for question in questions})
    return {
        "yes_no_share": mean([normalize_answer(answer) in ("yes", "no") for answer in answers]),
        "number_share": mean([bool(_NUMBER.fullmatch(answer.strip().lower())) for answer in answers]),
        "self_similarity": mean(nearest),
        "duplicate_share": 1 - distinct / len(questions) if questions else 0.0,
    }


@dataclass(frozen=True)
class Alarm:
    """A crossed limit: its name, the measured value and the advice."""

    name: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"collapse alarm [{self.name}]: {self.evidence}: {self.advice}"


class CollapseWatch:
    """The last steps and the active alarms."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._first: dict[str, float] | None = None
        self.active: dict[str, Alarm] = {}

    @property
    def window_full(self) -> bool:
        """Whether a full window has been seen. Until then, no alarm can be raised."""
        return self._first is not None

    def add_step(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add one step's metrics. Returns the newly active alarms, again only after they were clear."""
        prefix = "drzero/collapse/"
        own = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        self._steps.append(own)
        if len(self._steps) < WINDOW:
            return []
        names = set.intersection(*(set(step) for step in self._steps))
        now = {name: fmean(step[name] for step in self._steps) for name in names}
        self._first = self._first or now
        before = self.active
        self.active = {alarm.name: alarm for alarm in _alarms(now, self._first)}
        return [alarm for name, alarm in self.active.items() if name not in before]


_READ_QUESTIONS = "read the questions in the rollout dumps before training a solver on them"
# By metric: the alarm for a share above its limit, the limit, the meaning of the share, and advice.
_SHARES = {
    "zero_variance_share": (
        "zero-variance",
        ZERO_VARIANCE_LIMIT,
        "of the groups have equal rewards",
        "they teach nothing; the task is too easy or too hard for the present policy",
    ),
    "yes_no_share": (
        "answer-types",
        YES_NO_LIMIT,
        "of the answers are yes or no",
        f"such a question is right by chance half of the time, which looks difficult; {_READ_QUESTIONS}",
    ),
    "number_share": (
        "numbers",
        NUMBER_LIMIT,
        "of the answers are numbers",
        f"the challenger has found one kind of question that pays; {_READ_QUESTIONS}",
    ),
    "self_similarity": (
        "self-similarity",
        SIMILARITY_LIMIT,
        "of a question's word pairs also occur in another question of the step",
        f"the challenger fills one template; {_READ_QUESTIONS}",
    ),
    "duplicate_share": (
        "duplicates",
        DUPLICATE_LIMIT,
        "of the questions repeat another one of the step",
        f"the challenger no longer reads its document; {_READ_QUESTIONS}",
    ),
}


def _alarms(now: Mapping[str, float], first: Mapping[str, float]) -> Iterator[Alarm]:
    for metric, (name, limit, what, advice) in _SHARES.items():
        if now.get(metric, 0.0) > limit:
            yield Alarm(name, f"{_percent(now[metric])} {what} (limit {_percent(limit)})", advice)
    if (searched := now.get("searched_share", 1.0)) < SEARCHED_LIMIT:
        yield Alarm(
            "searching",
            f"{_percent(searched)} of the rollouts of two and more hops search "
            f"(limit {_percent(SEARCHED_LIMIT)})",
            "answers come from the document alone or are guessed; searching does not pay at the present "
            "accuracy: go back to an earlier checkpoint, with easier questions or a better warm start",
        )
    # Exactly 0 means that no token was sampled, which is a different problem.
    if 0 < now["entropy"] < ENTROPY_LIMIT_NATS:
        yield Alarm(
            "entropy",
            f"{now['entropy']:.3f} nats a token (limit {ENTROPY_LIMIT_NATS:g})",
            "the policy hardly explores any more; go back to an earlier checkpoint with a smaller learning "
            "rate, or add actor_rollout_ref.actor.entropy_coeff",
        )
    was, length = first["response_tokens"], now["response_tokens"]
    if was and not was / LENGTH_FACTOR_LIMIT <= length <= was * LENGTH_FACTOR_LIMIT:
        yield Alarm(
            "length",
            f"{length:.0f} tokens a response, {was:.0f} in the first steps "
            f"(limit {LENGTH_FACTOR_LIMIT:g} times)",
            "the policy has stopped reasoning or searching, or pads its text; read the rollout dumps",
        )
    # A solver's steps have neither metric.
    was, difficulty = first.get("difficulty", 0.0), now.get("difficulty", 0.0)
    if was and now.get("format", 0.0) >= FORMAT_LIMIT and difficulty < was * DIFFICULTY_FALL_LIMIT:
        yield Alarm(
            "format",
            f"the format score is {now['format']:.2f} while difficulty fell from {was:.2f} to "
            f"{difficulty:.2f} (limits {FORMAT_LIMIT:g} and {_percent(DIFFICULTY_FALL_LIMIT)} of the first)",
            "the challenger optimises the format and no longer asks questions that the solver sometimes "
            "fails; try a stronger or weaker solver, or a smaller weight of the format score",
        )


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
