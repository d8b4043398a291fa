"""Whether a run is learning, in words that its data carries.

What counts is, in this order: the evaluations before and after a solver, its own first and last validation,
the trend of its steps. Evaluations ask both models the same questions (McNemar's exact test). A validation
leaves only counts (Fisher's exact test). A trend is Kendall's test over the steps, so that one lucky step
proves nothing.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from scipy import stats

from drzero.ops.grouping import by_key
from drzero.ops.records import JsonTail, read_object, shape
from drzero.runs.report.figures import Estimate, Tally, hops
from drzero.runs.run_folder import NotARun, RunFolder
from drzero.stages.evaluate import ANSWERS, Records
from drzero.stages.evaluate.changes import ExactMatchChange, by_benchmark
from drzero.stages.result import REPORT, RESULT

SURE = 0.05
"""A change with a smaller p is more than noise. Several figures share it between them (Bonferroni)."""
_FEW = "too few to say"
_FEWEST_STEPS = 5  # the fewest whose order can have a p below SURE
_KEYS = {"key": str, "benchmark": str, "right": bool}
_ANSWER = shape(_KEYS)
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Change:
    """A figure before and after, and the chance that noise alone moves it as far."""

    name: str
    before: float
    after: float
    p: float
    least_p: float  # what the largest change would have had: above SURE, nothing could be said
    count: str  # how much it rests on

    def __str__(self) -> str:
        tested = f", {shown_p(self.p)}" if self.least_p < SURE else ""
        return f"{self.name} {short(self.before)} → {short(self.after)} {self.count}{tested}"


@dataclass(frozen=True)
class Verdict:
    """The answer in a word or two, the sentence that it rests on, and what else the same record says."""

    answer: str  # "yes", "no, it got worse", "in part", "not beyond noise", _FEW, "nothing yet"
    sentence: str
    more: tuple[str, ...] = ()
    other: tuple[str, ...] = ()  # what records that count less say

    @property
    def good(self) -> bool | None:
        """None if the data cannot say."""
        return {"yes": True, "no, it got worse": False}.get(self.answer)


def verdict(run: RunFolder, tally: Tally) -> Verdict:
    """What the best record of a training run says."""
    sources = (
        ("held-out questions, both models asked the same (McNemar's exact test)", _evaluations(run)),
        ("validation questions, before and after (Fisher's exact test)", _validations(run)),
        (_of_steps(run, tally), list(_trends(tally))),
    )
    found = [(about, changes) for about, changes in sources if changes]
    if not found:
        return Verdict("nothing yet", "No step has a trajectory that counts.")
    # A validation of six questions says nothing, and the steps may.
    about, changes = next((one for one in found if any(c.least_p < SURE for c in one[1])), found[0])
    answer, told = judged(changes)
    others = [change for change in changes if change not in told]
    more = [*map(str, others), *["so few can show no change, however large"] * (answer == _FEW), about]
    rest = [str(change) for _, of in found if of is not changes for change in of]
    return Verdict(answer, "; ".join(map(str, told)), tuple(more), tuple(rest))


def judged(changes: Sequence[Change]) -> tuple[str, Sequence[Change]]:
    """The answer, and the changes that carry it. The last of several is their total."""
    parts, total = (changes[:-1], changes[-1]) if len(changes) > 1 else (changes, changes[0])
    sure = [change for change in parts if change.p * len(parts) < SURE]
    sure = sure or [total] * (total.p < SURE)
    rises = [change.after > change.before for change in sure]
    if all(change.least_p >= SURE for change in changes):
        return _FEW, changes
    if not sure:
        return "not beyond noise", [total]
    return "yes" if all(rises) else "in part" if any(rises) else "no, it got worse", sure


def _evaluations(run: RunFolder) -> list[Change]:
    """The loop's evaluations before and after this solver, by benchmark and over all questions."""
    iteration = run.setting("iteration")
    if run.setting("method") != "grpo" or not isinstance(iteration, int) or iteration < 1:
        return []
    before, after = (run.folder.parent / f"evaluate_iter{number}" for number in (iteration - 1, iteration))
    if not (_is_later(after, run) and (before / RESULT).is_file()):
        return []
    return evaluated(before, after)


def evaluated(before: Path, after: Path) -> list[Change]:
    """The changes between two evaluations' folders, by benchmark and over all questions."""
    changes = by_benchmark(records(before), records(after))
    return [_of_pairs(_named(name), change) for name, change in changes.items()]


def _of_pairs(name: str, change: ExactMatchChange) -> Change:
    right = round(change.before * change.n)
    least_p = 0.5 ** (max(right, change.n - right) - 1)
    count = f"on {change.n} held-out questions"
    return Change(name, change.before, change.after, change.p, least_p, count)


def _is_later(evaluation: Path, run: RunFolder) -> bool:
    """Whether the evaluation is finished and began after the run's last sign of life."""
    times = [record["time"] for record in (*run.events, *run.beats)]
    try:
        start = RunFolder(evaluation).last_start
    except NotARun:
        return False
    return (evaluation / RESULT).is_file() and bool(start) and start[0]["time"] >= max(times, default=0.0)


def records(folder: Path) -> Records:
    """An evaluation's answers to the questions it asked, without their conversations."""
    asked = read_object(folder / REPORT).get("benchmarks") or {}
    lines = JsonTail(folder / ANSWERS, _ANSWER).stream(to_end=True)
    return [{key: line[key] for key in _KEYS} for line in lines if line["benchmark"] in asked]


def _named(benchmark: str) -> str:
    found = re.fullmatch(r"\w*?_(\d)hop", benchmark, re.ASCII)
    return _hops(int(found[1])) if found else benchmark


def _hops(hop: int) -> str:
    return hops(hop).replace(str(hop), _WORDS[hop], 1) if hop < len(_WORDS) else hops(hop)


def _validations(run: RunFolder) -> list[Change]:
    """Exact match or solved tasks in the first and the last validation, by hop and over all."""
    scored = [step for step in run.steps.values() if {"drzero/val/em", "drzero/val/success"} & step.keys()]
    if len(scored) < 2:
        return []
    first, last = scored[0], scored[-1]
    by_hop = sorted(key for key in first if re.fullmatch(r".+/val/em_hop_\d+", key) and key in last)
    keys = {key: _hops(int(key.rpartition("_")[2])) for key in by_hop} if len(by_hop) > 1 else {}
    keys |= {key: "exact match" for key in ("drzero/val/em",) if key in first}
    keys |= {key: "solved" for key in ("drzero/val/success",) if key in first}
    return [_of_counts(name, key, first, last) for key, name in keys.items() if key in last]


def _of_counts(name: str, key: str, first: dict[str, float], last: dict[str, float]) -> Change:
    rows = re.sub(r"/(em|success)", "/rows", key)
    sizes = [int(step.get(rows, 0)) for step in (first, last)]
    rights = [round(step[key] * n) for step, n in zip((first, last), sizes, strict=True)]

    def p(right: int) -> float:
        table = [[rights[0], sizes[0] - rights[0]], [right, sizes[1] - right]]
        return float(stats.fisher_exact(table).pvalue)

    questions = f"on {sizes[1]} validation questions"
    return Change(name, first[key], last[key], p(rights[1]), min(p(0), p(sizes[1])), questions)


def _trends(tally: Tally) -> Iterator[Change]:
    """What a step of training earns, by hop where hops tell questions apart."""
    for flag in ("right", "solved"):
        by = by_key(tally.shares(flag), lambda one: one.name)
        for name, points in by.items():
            yield _trend(f"{flag}, {name}" if len(by) > 1 else flag, points)
    if points := tally.means("reward"):
        yield _trend("reward", points)


def _trend(name: str, points: Sequence[Estimate]) -> Change:
    """The first and the last quarter of the steps, and Kendall's test over all of them."""
    part = max(len(points) // 4, 1)
    values = [point.mean for point in points]
    ends = (fmean(values[:part]), fmean(values[-part:]))
    steps = points[-1].step - points[0].since + 1  # a point of a long run pools some
    few = len(points) < _FEWEST_STEPS
    p = 1.0
    if len(set(values)) > 1:
        p = float(stats.kendalltau(range(len(values)), values).pvalue)
    return Change(name, *ends, p, 1.0 if few else 0.0, f"over {steps} step{'s' * (steps != 1)}")


def _of_steps(run: RunFolder, tally: Tally) -> str:
    ends = "quarter of the steps" if len(tally.means("reward")) >= 8 else "step"
    filtered = run.setting("algorithm.filter_groups.enable")
    left_out = ", without groups that scored alike" if filtered else ""
    return f"the first and the last {ends}, on training questions{left_out} (Kendall's test over all steps)"


def short(value: float) -> str:
    """A figure as the sentence has it: .19, 1.00, −.05."""
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def shown_p(p: float) -> str:
    """A p value with as many digits as matter."""
    return "p < .001" if p < 0.001 else f"p = {p:.2g}".replace("0.", ".", 1)
