"""A run's charts as Vega-Lite specifications, for the page and, drawn by the same library, for the docs.

Colours are `currentColor`, so one drawing serves light and dark pages. A chart without data is not made.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from vl_convert import vegalite_to_png

from drzero.ops.files import atomic_write
from drzero.runs.report.figures import Estimate, Tally, extremes
from drzero.runs.run_folder import Mark, RunFolder

Spec = dict[str, Any]
ChartRow = Mapping[str, Any]
Points = Sequence[tuple[float, Any]]  # times and values

_STRONG = ["#4e79a7", "#e8862d", "#59a14f", "#d1495b", "#9467bd", "#8c7a5b"]
_LIGHT = ["#2a9d9d", "#b8a02e", "#777777", "#e78ac3", "#6fb7e9", "#a3561f"]
_NARROW = 330  # pixels of a chart on a phone, which a legend and the names on an axis must fit
_GRID = "#88888840"
# What a page draws of a run, however long: marks, columns, series of a chart, characters of a tip.
_MOST_MARKS, _MOST_STEPS, _MOST_SERIES, _LONGEST_TIP = 200, 240, 24, 300


@dataclass(frozen=True)
class Chart:
    """A chart, its title, and a line about it."""

    name: str  # its id in the page
    title: str
    about: str
    spec: Spec


def style(ink: str = "currentColor") -> Spec:
    """The config of every chart. `ink` is the colour of text and axes."""
    sizes = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 400}
    text = {"labelColor": ink, "titleColor": ink, **sizes}
    legend = {"orient": "top", "title": None, "symbolOpacity": 1, "symbolType": "circle"}
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**text, "domainColor": ink, "tickColor": ink, "gridColor": _GRID, "labelFlush": False},
        "legend": {**text, **legend},
        "header": text,
        "title": {"color": ink},
        "range": {"category": [*_STRONG, *_LIGHT], "heatmap": {"scheme": "viridis"}},
    }


def training_charts(run: RunFolder, tally: Tally) -> list[Chart]:
    """The charts of a training run."""
    marks, format_parts = _few(run.marks), ("think", "tool", "answer_part")
    parts = [name for name in tally.names if name not in format_parts]
    means = {
        "reward": ("Reward and its parts", [tally.means(name) for name in parts]),
        "format-parts": ("Format score by part", [tally.means(name) for name in format_parts]),
    }
    shares: dict[str, tuple[str, list[ChartRow]]] = {
        "valid": ("Valid questions by hop", _rows([tally.shares("valid")])),
        "right": ("Right answers by hop", _rows([tally.shares("right")])),
        # An environment's tasks have no hops to tell them apart.
        "tasks": ("Tasks solved", [{**row, "name": "solved"} for row in _rows([tally.shares("solved")])]),
        "searched": ("Searched, by hop", _rows([tally.shares("searched")])),
    }
    return [
        *(c for name, (title, of) in means.items() for c in _lines(name, title, _MEANS, _rows(of), marks)),
        *(c for name, (title, rows) in shares.items() for c in _lines(name, title, _SHARES, rows, marks)),
        *_solved(tally, marks),
        *_metric_lines(run, marks),
        *_phases(run, marks),
        *_flow(run),
        *_resources(run),
    ]


_MEANS = "Mean of the trajectories that count, with its 95 % interval (Student). Click a point for its rows."
_SHARES = "Share of the trajectories that count, with its 95 % interval (Wilson). Click a point for its rows."
_OF_STEPS = {
    "entropy": (
        "Entropy",
        "nats a token, estimated from the sampled ones",
        {"drzero/collapse/entropy": "entropy"},
    ),
    "length": (
        "Lengths",
        "tokens of a response; veRL's include what tools returned",
        {"drzero/collapse/response_tokens": "sampled tokens", "response_length/mean": "with tool responses"},
    ),
    "drift": (
        "Token drift and failures",
        "drift: tokens whose text tokenizes otherwise; failures: share of rollouts lost or invalid",
        {"drzero/rollout/token_drift_rate": "drift", "drzero/failures/share": "failures"},
    ),
    "collapse": (
        "Signs of collapse",
        "shares; alarms judge their means over five steps",
        {
            "drzero/collapse/zero_variance_share": "groups of equal reward",
            "drzero/collapse/self_similarity": "similar questions",
            "drzero/collapse/duplicate_share": "repeated questions",
            "drzero/collapse/number_share": "answers that are numbers",
            "drzero/collapse/yes_no_share": "answers yes or no",
        },
    ),
    "validation": (
        "Validation",
        "on questions that training does not see",
        {
            "drzero/val/em": "exact match",
            "drzero/val/f1": "F1",
            "drzero/val/success": "solved",
            "drzero/val/score": "reward",
        },
    ),
}


def _few(marks: Sequence[Mark]) -> Sequence[Mark]:
    return marks[:: -(-len(marks) // _MOST_MARKS) or 1]


def _some_steps(rows: Sequence[ChartRow], about: str) -> tuple[list[ChartRow], str]:
    """Of many steps every second, third …, evenly over the run."""
    steps = sorted({row["step"] for row in rows})
    every = -(-len(steps) // _MOST_STEPS)
    kept = set(steps[::every])
    return [row for row in rows if row["step"] in kept], about + f" Every {every}th step." * (every > 1)


def _rows(groups: Iterable[Sequence[Estimate]]) -> list[ChartRow]:
    return [asdict(one) | {"name": one.name.replace("_", " ")} for group in groups for one in group]


def _color(field: str, rows: Iterable[ChartRow]) -> Spec:
    """With a legend whose columns are as wide as the longest name."""
    column = 22 + 5.5 * max(len(str(row[field])) for row in rows)
    columns = max(int(_NARROW / column), 1)
    return {"field": field, "type": "nominal", "sort": None, "legend": {"columns": columns}}


def _names(field: str, rows: Iterable[ChartRow]) -> Spec:
    """An axis of names: upright with a word a line if they fit side by side, else aslant."""
    names = {str(row[field]) for row in rows}
    longest = max((len(word) for name in names for word in name.split()), default=0)
    axis: Spec = {"labelAngle": -25}
    if 6 * longest < _NARROW / len(names):
        axis = {"labelAngle": 0, "labelExpr": "split(datum.label, ' ')"}
    return {"field": field, "type": "ordinal", "sort": None, "title": field, "axis": axis}


def _number(field: str, title: str | None = None, **more: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def _fields(*names: str, **more: Any) -> list[Spec]:
    return [{"field": name, **more} for name in names]


def _metric_lines(run: RunFolder, marks: Sequence[Mark]) -> list[Chart]:
    charts = []
    for name, (title, about, keys) in _OF_STEPS.items():
        rows: list[ChartRow] = [
            {"step": step, "name": shown, "mean": metrics[key]}
            for key, shown in keys.items()
            for step, metrics in run.steps.items()
            if key in metrics
        ]
        charts += _lines(name, title, about, rows, marks)
    return charts


def _lines(
    name: str, title: str, about: str, rows: Sequence[ChartRow], marks: Sequence[Mark] = ()
) -> list[Chart]:
    if not rows:
        return []
    by: dict[str, list[ChartRow]] = {}
    for row in rows:
        by.setdefault(row["name"], []).append(row)
    rows = [row for of in [*by.values()][:_MOST_SERIES] for row in extremes(of, lambda one: one["mean"])]
    x, color, y = step_axis({row["step"] for row in rows}), _color("name", rows), _number("mean")
    if not any(row["mean"] or row.get("high") for row in rows):
        y["scale"] = {"domain": [0, 1]}  # else an axis of nothing but zeros has its only label in the middle
    tip = [*_fields("step", "name"), {"field": "mean", "format": ".3f", "title": "value"}]
    layers: list[Spec] = []
    if any(row.get("low") is not None for row in rows):
        tip += [*_fields("low", "high", format=".3f"), {"field": "n"}]
        band = {"y": _number("low"), "y2": {"field": "high"}, "color": color}
        layers.append({"mark": {"type": "area", "opacity": 0.16}, "encoding": band})
    point = {"type": "line", "point": {"size": 45, "filled": True}, "strokeWidth": 2}
    layers.append({"mark": point, "encoding": {"y": y, "color": color, "tooltip": tip}})
    layers += _rules(x, ((mark.step, mark) for mark in marks if mark.step is not None))
    spec = {"data": {"values": list(rows)}, "encoding": {"x": x}, "layer": layers}
    return [Chart(name, title, about, spec)]


def step_axis(steps: set[int]) -> Spec:
    """An axis with labels at whole steps only. Of four, Vega would label halves too."""
    first, last = min(steps), max(steps)
    ticks = list(range(first, last + 1, (last - first) // 12 + 1))
    return _number("step", "step", axis={"values": ticks, "format": "d"})


def _rules(axis: Spec, marks: Iterable[tuple[float, Mark]]) -> list[Spec]:
    values = [{"at": at, "kind": mark.kind, "text": mark.text[:_LONGEST_TIP]} for at, mark in marks]
    if not values:
        return []
    rule = {"type": "rule", "strokeDash": [4, 3], "strokeWidth": 2, "color": "#d1495b"}
    encoding = {"x": {**axis, "field": "at"}, "tooltip": _fields("kind", "text")}
    return [{"data": {"values": values}, "mark": rule, "encoding": encoding}]


def _columns(rows: Sequence[ChartRow], mark: str, encoding: Spec, marks: Sequence[Mark]) -> Spec:
    axis = {"labelAngle": 0, "labelOverlap": True}
    x = {"field": "step", "type": "ordinal", "title": "step", "axis": axis}
    steps = ((max(math.ceil(m.step), 1), m) for m in marks if m.step is not None)
    layers = [{"mark": mark, "encoding": encoding}, *_rules(x, steps)]
    return {"data": {"values": list(rows)}, "encoding": {"x": x}, "layer": layers}


def _solved(tally: Tally, marks: Sequence[Mark]) -> list[Chart]:
    rows: Sequence[ChartRow] = tally.solved()
    if not rows:
        return []
    share = {"field": "share", "type": "quantitative", "scale": {"domainMin": 0}, "legend": {"format": "%"}}
    encoding: Spec = {
        "y": {"field": "k", "type": "ordinal", "sort": "descending", "title": "attempts that were right"},
        "color": share,
        "tooltip": [*_fields("step", "k", "n", "questions"), {"field": "share", "format": ".0%"}],
    }
    about = (
        "Share of the step's questions by how many of the solver's attempts were right. "
        "Those between none and all earn the difficulty reward."
    )
    rows, about = _some_steps(rows, about)
    return [Chart("solved", "Solved by k of n attempts", about, _columns(rows, "rect", encoding, marks))]


def _phases(run: RunFolder, marks: Sequence[Mark]) -> list[Chart]:
    rows: list[ChartRow] = [vars(phase) for phase in run.phases if phase.step > 0 and phase.phase != "done"]
    if not rows:
        return []
    encoding: Spec = {
        "y": _number("seconds", "seconds", aggregate="sum"),
        "color": _color("phase", rows),
        "tooltip": [*_fields("step", "phase"), *_fields("seconds", aggregate="sum", format=".1f")],
    }
    rows, about = _some_steps(rows, "Seconds of each step, a repeated step's summed.")
    return [Chart("phases", "Time by phase", about, _columns(rows, "bar", encoding, marks))]


def _flow(run: RunFolder) -> list[Chart]:
    rated = [record for record in run.flow if record.get("rates")]
    rates = [
        (name, [(record["time"], record["rates"].get(name)) for record in rated])
        for name in ("produced", "accepted", "invalid", "stale")
    ]
    points = dict.fromkeys(name for record in run.flow for name in record["points"])
    held = [
        (name, [(record["time"], record["points"].get(name, {}).get("depth")) for record in run.flow])
        for name in points
    ]
    about = "Queues, the buffer, and calls in flight."
    return [
        *_over_time(run, "flow-rates", "Flow: samples a second", "The extremes of each stretch.", rates),
        *_over_time(run, "flow-held", "Flow: what each point holds", about, held),
    ]


def _resources(run: RunFolder) -> list[Chart]:
    by: dict[str, list[ChartRow]] = {}
    for sample in run.samples:
        by.setdefault(str(sample["component"]), []).append(sample)
    host = by.pop("host", [])

    def series(samples: Sequence[ChartRow], field: str) -> Points:
        return [(sample["time"], sample.get(field)) for sample in samples]

    cpu = [(name, series(samples, "cpu_share")) for name, samples in by.items()]
    memory = [(name, series(samples, "rss_mb")) for name, samples in by.items()]
    memory.append(("free on the host", series(host, "memory_free_mb")))
    busiest = [(s["time"], max(gpu["busy_percent"] or 0 for gpu in s["gpus"])) for s in host if s.get("gpus")]
    about = "MB, resident, and what the host has free."
    return [
        *_over_time(run, "cpu", "Processor by component", "CPU seconds a second.", cpu),
        *_over_time(run, "memory", "Memory by component", about, memory),
        *_over_time(run, "gpu", "GPUs", "Percent busy, the busiest one.", [("busiest GPU", busiest)]),
    ]


def _over_time(
    run: RunFolder, name: str, title: str, about: str, series: Iterable[tuple[str, Points]]
) -> list[Chart]:
    times = [record["time"] for record in (*run.events, *run.samples, *run.flow)]
    start = min(times, default=0.0)
    rows: list[ChartRow] = [
        {"minutes": round((time - start) / 60, 3), "name": shown, "value": value}
        for shown, points in islice(series, _MOST_SERIES)
        for time, value in extremes([point for point in points if point[1] is not None], itemgetter(1))
    ]
    if not rows:
        return []
    scale = {"domain": [0, round((max(times) - start) / 60, 3)], "nice": False}
    x = _number("minutes", "minutes since the first start", scale=scale)
    tip = [*_fields("minutes", format=".1f"), {"field": "name"}, *_fields("value", format=".3~f")]
    encoding = {"y": _number("value"), "color": _color("name", rows), "tooltip": tip}
    line = {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": encoding}
    rules = _rules(x, (((mark.time - start) / 60, mark) for mark in _few(run.marks)))
    spec = {"data": {"values": rows}, "encoding": {"x": x}, "layer": [line, *rules]}
    return [Chart(name, title, about, spec)]


def scores_chart(name: str, title: str, rows: Sequence[ChartRow], x: str, series: str) -> list[Chart]:
    """Scores with their intervals: rows of `em`, `low`, `high`, `n`, by `x` and, in colour, by `series`."""
    if not rows:
        return []
    ends = {"y": _number("low", "exact match"), "y2": {"field": "high"}}
    value = {"y": {"field": "em", "type": "quantitative"}}
    spec: Spec = {
        "data": {"values": list(rows)},
        "encoding": {
            "x": _names(x, rows),
            "xOffset": {"field": series, "sort": None},
            "color": _color(series, rows),
            "tooltip": [*_fields(x, series), *_fields("em", "low", "high", format=".3f"), {"field": "n"}],
        },
        "layer": [
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": ends},
            {"mark": {"type": "point", "filled": True, "size": 70}, "encoding": value},
        ],
    }
    about = "With the 95 % interval of the questions asked (Wilson; of an average, MOVER)."
    return [Chart(name, title, about, spec)]


def counts_chart(
    name: str, title: str, about: str, rows: Sequence[ChartRow], x: str, series: str
) -> list[Chart]:
    """Stacked counts: rows of `count` by `x` and, in colour, by `series`, a column for each `run`."""
    if not rows:
        return []
    spec: Spec = {
        "data": {"values": list(rows)},
        "mark": "bar",
        "encoding": {
            "x": _names(x, rows),
            "xOffset": {"field": "run", "sort": None, "scale": {"paddingInner": 0.08}},
            "y": _number("count"),
            "color": _color(series, rows),
            "tooltip": _fields("run", x, series, "count"),
        },
    }
    return [Chart(name, title, about, spec)]


def page_spec(chart: Chart) -> Spec:
    """The specification as the page draws it, as wide as its container."""
    return {**chart.spec, "width": "container", "height": 220, "config": style()}


def to_png(spec: Spec, path: Path) -> None:
    """Draw a specification that sets its sizes as a picture on white, at twice its size in pixels."""
    spec = {**spec, "config": {**style("#222222"), "background": "white"}}
    atomic_write(path, vegalite_to_png(json.dumps(spec), scale=2))
