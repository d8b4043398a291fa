"""What loops have learnt: exact match over seeds, how the arms of an ablation differ, and the curves.

    drzero evolve loop=demo paths.checkpoints=outputs/ablation/as_is --seeds 3
    drzero evolve loop=demo paths.checkpoints=outputs/ablation/lr3e-5 --seeds 3 \\
        actor_rollout_ref.actor.optim.lr=3e-5
    python -m bench.learning outputs/ablation/as_is outputs/ablation/lr3e-5 --out docs/learning.png

Each argument is an arm: the folder of a loop, or of the loops of its seeds, or NAME=FOLDER,FOLDER… of loops
or training runs that count as seeds. Arms are compared with the first one, seed by seed, on the questions
that both have answered. Loops that are not finished yet count as far as they are. The tables are Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy import stats

from drzero.loop.report import last_of_all, read_answers
from drzero.recipe.metrics import Steps, is_training, read_metrics
from drzero.runs.report.charts import Spec, scores_chart, step_axis, to_png
from drzero.stages.evaluate import Records
from drzero.stages.evaluate.changes import SeedsChange, benchmarks_over_seeds, by_benchmark, gains_over_seeds
from drzero.stages.evaluate.intervals import LEVEL


@dataclass(frozen=True)
class Curve:
    """A metric of training steps."""

    stage: str
    metric: str
    label: str


CURVES = (
    Curve(
        "challenger", "drzero/rollout/searched_share_multi_hop", "challenger: share of ≥ 2 hops that search"
    ),
    Curve("challenger", "drzero/reward/difficulty", "challenger: difficulty"),
    Curve("solver", "drzero/rollout/searched_share", "solver: share of rollouts that search"),
    Curve("solver", "drzero/reward/em", "solver: exact match on its own questions"),
)
STAGES = ("challenger", "solver")
Row = Sequence[str]
"""Cells of a table."""


class NothingToShow(Exception):
    """A folder holds neither a loop nor a run."""


@dataclass
class Seed:
    """One loop, or one training run without evaluations."""

    answers: dict[int, Records]
    """By iteration, 0 for the base model."""
    steps: dict[str, Steps]
    """Of challenger and solver, numbered through all iterations."""


Arm = Mapping[str, Seed]
"""An arm's seeds by number. The same number in another arm makes a pair."""


def read_arms(arguments: Sequence[str]) -> dict[str, Arm]:
    """The arms by name. Raises NothingToShow for two with one name, and as `read_arm`."""
    arms: dict[str, Arm] = {}
    for argument in arguments:
        name, arm = read_arm(argument)
        if name in arms:
            raise NothingToShow(f"two arms are called {name}: name one of them, OTHER={argument}")
        arms[name] = arm
    return arms


def read_arm(argument: str) -> tuple[str, Arm]:
    """The name and seeds of an argument, without seeds that have nothing yet. Raises NothingToShow."""
    name, equals, folders = argument.partition("=")
    places = [Path(folder) for folder in (folders if equals else argument).split(",")]
    name = name if equals else ",".join(place.name for place in places)
    loops = [loop.parent for loop in sorted(places[0].glob("seed*/evolve"))] if len(places) == 1 else []
    seeds = {loop.name.removeprefix("seed"): read_seed(loop) for loop in loops}
    if begun := {number: seed for number, seed in seeds.items() if seed}:
        return name, begun
    seeds = {str(number): read_seed(place) for number, place in enumerate(places, 1)}
    for place, seed in zip(places, seeds.values(), strict=True):
        if seed is None:
            raise NothingToShow(f"{place} holds neither an evaluation of a loop nor steps of a run")
    return name, {number: seed for number, seed in seeds.items() if seed}


def read_seed(folder: Path) -> Seed | None:
    """The results so far of a loop's or a training run's folder, or None."""
    steps = {stage: dict(_numbered_through(folder, stage)) for stage in STAGES}
    if (folder / "metrics").is_dir():
        run = {number: step for number, step in read_metrics(folder).items() if is_training(step)}
        asks = any("drzero/questions/valid_share" in step for step in run.values())
        steps["challenger" if asks else "solver"] = run
    answers = read_answers(folder)
    return Seed(answers, steps) if answers or any(steps.values()) else None


def _numbered_through(loop: Path, stage: str) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps of all iterations. A challenger keeps counting, a solver restarts at 1 each time."""
    before = 0
    runs = {
        int(run.name.rpartition("_iter")[2]): run
        for run in loop.glob(f"{stage}_iter*/")
        if "_hf" not in run.name
    }
    for _, run in sorted(runs.items()):
        trained = {number: step for number, step in read_metrics(run).items() if is_training(step)}
        offset = before if trained and min(trained) <= before else 0
        for number, step in trained.items():
            yield number + offset, step
        before = max(before, *(number + offset for number in trained)) if trained else before


def last_iteration(*arms: Arm) -> int:
    """The last iteration that all evaluated seeds have, or 0."""
    return last_of_all(seed.answers for arm in arms for seed in arm.values())


def gains(arm: Arm, last: int) -> dict[str, SeedsChange]:
    """The change from the base to iteration `last`, by benchmark."""
    return gains_over_seeds([seed.answers for seed in arm.values()], last)


def differences(first: Arm, other: Arm, last: int) -> dict[str, SeedsChange]:
    """What another arm has after iteration `last` beyond the first, by benchmark, over the seeds of both."""
    pairs = [(first[seed].answers, other[seed].answers) for seed in first if seed in other]
    return benchmarks_over_seeds(
        [by_benchmark(one[last], two[last]) for one, two in pairs if last in one and last in two]
    )


def gain_rows(arms: Mapping[str, Arm]) -> Iterator[Row]:
    """One row an arm and benchmark: base, last iteration, and the change between them."""
    for name, arm in arms.items():
        last = last_iteration(arm)
        for benchmark, change in gains(arm, last).items() if last else ():
            before, after = (
                fmean(getattr(one, when) for one in change.changes) for when in ("before", "after")
            )
            n = change.changes[0].n
            yield name, benchmark, str(n), str(last), f"{before:.3f}", f"{after:.3f}", *_cells(change)


def difference_rows(arms: Mapping[str, Arm]) -> Iterator[Row]:
    """A row per benchmark and arm but the first: its gain beyond the first."""
    (first, base), *others = arms.items()
    for name, arm in others:
        last = last_iteration(base, arm)
        for benchmark, change in differences(base, arm, last).items() if last else ():
            yield f"{name} − {first}", benchmark, str(last), *_cells(change)


def _cells(change: SeedsChange) -> Row:
    return (
        str(len(change.changes)),
        f"{change.effect:+.3f}",
        f"{change.low:+.3f} to {change.high:+.3f}",
        "–" if change.p is None else f"{change.p:.2g}",
        change.each,
    )


def step_rows(arms: Mapping[str, Arm]) -> Iterator[Row]:
    """One row an arm and curve: first and last step, and the change with Student's interval over seeds."""
    for name, arm in arms.items():
        for curve in CURVES:
            lines = [line for line in lines_of(curve, arm) if len(line) > 1]
            if not lines:
                continue
            ends = [(line[min(line)], line[max(line)]) for line in lines]
            changes, between = [last - first for first, last in ends], "–"
            if len(set(changes)) > 1:
                low, high = stats.ttest_1samp(changes, 0.0).confidence_interval(LEVEL)
                between = f"{low:+.3f} to {high:+.3f}"
            first, last = (fmean(values) for values in zip(*ends, strict=True))
            each = ", ".join(f"{one:.2f} → {other:.2f}" for one, other in ends)
            yield name, curve.label, f"{first:.3f}", f"{last:.3f}", f"{fmean(changes):+.3f}", between, each


def lines_of(curve: Curve, arm: Arm) -> list[dict[int, float]]:
    """The curve of each seed that has one, by step."""
    lines = (
        {
            number: step[curve.metric]
            for number, step in seed.steps[curve.stage].items()
            if curve.metric in step
        }
        for seed in arm.values()
    )
    return [line for line in lines if line]


def picture(arms: Mapping[str, Arm]) -> Spec:
    """Exact match by iteration, then the arms' curves, as a Vega-Lite chart with a colour per arm."""
    answers = [seed.answers[0] for arm in arms.values() for seed in arm.values() if 0 in seed.answers]
    benchmarks = dict.fromkeys(record["benchmark"] for records in answers for record in records)
    curves = [curve for curve in CURVES if any(lines_of(curve, arm) for arm in arms.values())]
    scores = [panel for name in benchmarks for panel in score_panels(name, arms)]
    panels = [*scores, *(curve_panel(one, arms) for one in curves)]
    return {"columns": 3, "concat": [{**panel, "width": 300, "height": 180} for panel in panels]}


def score_panels(benchmark: str, arms: Mapping[str, Arm]) -> list[Spec]:
    """Exact match of base and iterations, with the interval of the change since the base, or nothing."""
    rows: list[dict[str, Any]] = []
    for name, arm in arms.items():
        found = (gains(arm, iteration).get(benchmark) for iteration in range(1, last_iteration(arm) + 1))
        changes = [change for change in found if change]
        if changes:
            base = fmean(one.before for one in changes[0].changes)
            n = changes[0].changes[0].n
            rows.append({"arm": name, "iteration": "base", "em": base, "low": base, "high": base, "n": n})
        for iteration, one in enumerate(changes, 1):
            values = {"em": base + one.effect, "low": base + one.low, "high": base + one.high}
            rows.append({"arm": name, "iteration": f"iteration {iteration}", **values, "n": one.changes[0].n})
    charts = scores_chart(benchmark, f"{benchmark}: exact match", rows, "iteration", "arm")
    return [{**chart.spec, "title": chart.title} for chart in charts]


def curve_panel(curve: Curve, arms: Mapping[str, Arm]) -> Spec:
    """The curve of each seed as a thin line, and their mean where all have one as a thick one."""
    seeds: list[dict[str, Any]] = []
    means: list[dict[str, Any]] = []
    for name, arm in arms.items():
        lines = lines_of(curve, arm)
        for seed, line in enumerate(lines):
            seeds += [{"arm": name, "seed": seed, "step": step, "value": line[step]} for step in line]
        for step in sorted(set.intersection(*map(set, lines))) if lines else ():
            means.append({"arm": name, "step": step, "value": fmean(line[step] for line in lines)})
    y: Spec = {"field": "value", "type": "quantitative", "title": None, "scale": {"domain": [0, 1]}}
    thin = {"type": "line", "strokeWidth": 1, "opacity": 0.45}
    thick = {"type": "line", "strokeWidth": 2.5}
    return {
        "title": curve.label,
        "encoding": {
            "x": {**step_axis({row["step"] for row in seeds}), "title": f"{curve.stage} step"},
            "y": y,
            "color": {"field": "arm", "type": "nominal", "sort": None},
        },
        "layer": [
            {"data": {"values": seeds}, "mark": thin, "encoding": {"detail": {"field": "seed"}}},
            {"data": {"values": means}, "mark": thick},
        ],
    }


def table(headings: str, rows: Iterator[Row]) -> str:
    """A Markdown table, empty without rows. `|` separates the headings."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    rule = "---|" * (headings.count("|") + 1)
    return "".join([f"| {headings} |\n", f"|{rule}\n", *lines]) if lines else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of some arms, and plot them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("arms", nargs="+", metavar="FOLDER or NAME=FOLDER,…")
    parser.add_argument("--out", type=Path, help="a PNG of the curves")
    options = parser.parse_args(arguments)
    try:
        arms = read_arms(options.arms)
    except NothingToShow as error:
        sys.exit(f"bench.learning: {error}")
    change = "seeds | change | 95 % interval | p | each seed (won, lost)"
    print(table(f"arm | benchmark | n | iterations | base | after them | {change}", gain_rows(arms)))
    print(table(f"arms | benchmark | after iteration | {change}", difference_rows(arms)))
    print(table("arm | curve | first step | last step | change | 95 % interval | each seed", step_rows(arms)))
    if options.out:
        to_png(picture(arms), options.out)


if __name__ == "__main__":
    main()
