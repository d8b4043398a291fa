"""A run's charts as Vega-Lite specifications, for the page and, drawn by the same library, for the docs.

    for chart in training_charts(run, tally): …        # chart.spec goes into the page
    to_png({**chart.spec, "width": 640, "height": 260}, Path("docs/reward.png"))

A chart without data is not made. Colours are the page's own (`currentColor`), so light and dark need one
drawing.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vl_convert import vegalite_to_png

from drzero.ops.files import atomic_write
from drzero.runs.report.figures import Estimate, Tally, thinned
from drzero.runs.run_folder import Mark, RunFolder

Spec = dict[str, Any]

_PALETTE = (
    *("#4e79a7", "#e8862d", "#59a14f", "#d1495b", "#9467bd", "#8c7a5b"),
    *("#2a9d9d", "#b8a02e", "#777777", "#e78ac3", "#6fb7e9", "#a3561f"),
)
_NARROW = 330
"""Pixels of a chart on a phone, in which a legend and the names on an axis have to fit."""
_GRID = "#88888840"
_BY_STEP: Spec = {"field": "step", "type": "ordinal", "title": "step"}


@dataclass(frozen=True)
class Chart:
    """A chart, its title, and what a reader must know of it."""

    name: str
    """Its id in the page."""
    title: str
    about: str
    spec: Spec


def style(ink: str = "currentColor") -> Spec:
    """What all charts share; `ink` is the colour of text and axes."""
    text = {
        "labelColor": ink,
        "titleColor": ink,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": 400,
    }
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**text, "domainColor": ink, "tickColor": ink, "gridColor": _GRID, "labelFlush": False},
        "legend": {
            **text,
            "orient": "top",
            "title": None,
            "symbolOpacity": 1,
            "symbolType": "circle",
        },
        "header": text,
        "title": {"color": ink},
        "range": {"category": list(_PALETTE), "heatmap": {"scheme": "viridis"}},
    }


def training_charts(run: RunFolder, tally: Tally) -> list[Chart]:
    """The charts of a challenger's or a solver's run."""
    marks = run.marks
    of_format = ("think", "tool", "answer_part")
    parts = [name for name in tally.names if name not in of_format]
    return [
        *_lines(
            "reward", "Reward and its parts", _MEANS, _estimates(tally.means(name) for name in parts), marks
        ),
        *_lines(
            "format-parts",
            "Format score by part",
            _MEANS,
            _estimates(tally.means(name) for name in of_format),
            marks,
        ),
        *_lines("valid", "Valid questions by hop", _SHARES, _estimates([tally.shares("valid")]), marks),
        *_lines("right", "Right answers by hop", _SHARES, _estimates([tally.shares("right")]), marks),
        *_lines("tasks", "Tasks solved", _SHARES, _solved_tasks(tally), marks),
        *_lines("searched", "Searched, by hop", _SHARES, _estimates([tally.shares("searched")]), marks),
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
            **{"drzero/val/em": "exact match", "drzero/val/f1": "F1"},
            **{"drzero/val/success": "solved", "drzero/val/score": "reward"},
        },
    ),
}


def _estimates(groups: Iterable[Sequence[Estimate]]) -> list[Mapping[str, Any]]:
    return [asdict(one) | {"name": one.name.replace("_", " ")} for group in groups for one in group]


def _color(field: str, rows: Iterable[Mapping[str, Any]]) -> Spec:
    """A colour for each name, and a legend whose columns are as wide as the longest: none is cut off."""
    column = 22 + 5.5 * max(len(str(row[field])) for row in rows)
    columns = max(int(_NARROW / column), 1)
    return {"field": field, "type": "nominal", "sort": None, "legend": {"columns": columns}}


def _names(field: str, rows: Iterable[Mapping[str, Any]]) -> Spec:
    """An axis of names, a word a line where those stand side by side, else aslant."""
    names = {str(row[field]) for row in rows}
    longest = max((len(word) for name in names for word in name.split()), default=0)
    is_narrow = 6 * longest < _NARROW / len(names)
    upright: Spec = {"labelAngle": 0, "labelExpr": "split(datum.label, ' ')"}
    axis = upright if is_narrow else {"labelAngle": -25}
    return {"field": field, "type": "ordinal", "sort": None, "title": field, "axis": axis}


def _solved_tasks(tally: Tally) -> list[Mapping[str, Any]]:
    """An environment's tasks have no hops to tell them apart by."""
    return [{**row, "name": "solved"} for row in _estimates([tally.shares("solved")])]


def _metric_lines(run: RunFolder, marks: Sequence[Mark]) -> list[Chart]:
    charts = []
    for name, (title, about, keys) in _OF_STEPS.items():
        rows: list[Mapping[str, Any]] = [
            {"step": step, "name": shown, "mean": metrics[key]}
            for key, shown in keys.items()
            for step, metrics in run.steps.items()
            if key in metrics
        ]
        charts += _lines(name, title, about, rows, marks)
    return charts


def _lines(
    name: str, title: str, about: str, rows: Sequence[Mapping[str, Any]], marks: Sequence[Mark] = ()
) -> list[Chart]:
    """Lines over steps, with bands where rows have `low` and `high`, and what happened as vertical rules."""
    if not rows:
        return []
    x = step_axis({row["step"] for row in rows})
    color = _color("name", rows)
    y: Spec = {"field": "mean", "type": "quantitative", "title": None}
    if not any(row["mean"] or row.get("high") for row in rows):
        y["scale"] = {"domain": [0, 1]}  # else the axis of nothing but zeros has its only label in the middle
    tip = [{"field": "step"}, {"field": "name"}, {"field": "mean", "format": ".3f", "title": "value"}]
    layers: list[Spec] = []
    if any(row.get("low") is not None for row in rows):
        tip += [{"field": end, "format": ".3f"} for end in ("low", "high")] + [{"field": "n"}]
        band = {"y": {"field": "low", "type": "quantitative", "title": None}, "y2": {"field": "high"}}
        layers.append({"mark": {"type": "area", "opacity": 0.16}, "encoding": {**band, "color": color}})
    point = {"type": "line", "point": {"size": 45, "filled": True}, "strokeWidth": 2}
    layers.append({"mark": point, "encoding": {"y": y, "color": color, "tooltip": tip}})
    spec: Spec = {
        "data": {"values": list(rows)},
        "encoding": {"x": x},
        "layer": [*layers, *_rules(x, ((mark.step, mark) for mark in marks if mark.step is not None))],
    }
    return [Chart(name, title, about, spec)]


def step_axis(steps: set[int]) -> Spec:
    """An axis that labels whole steps only: of four, Vega would label halves too."""
    first, last = min(steps), max(steps)
    ticks = list(range(first, last + 1, (last - first) // 12 + 1))
    return {
        "field": "step",
        "type": "quantitative",
        "title": "step",
        "axis": {"values": ticks, "format": "d"},
    }


def _rules(axis: Spec, marks: Iterable[tuple[float, Mark]]) -> list[Spec]:
    """What happened, and where on an axis, as dashed vertical lines; the pointer shows it in words."""
    values = [{"at": at, "kind": mark.kind, "text": mark.text} for at, mark in marks]
    if not values:
        return []
    rule = {"type": "rule", "strokeDash": [4, 3], "strokeWidth": 2, "color": "#d1495b"}
    tip = [{"field": "kind"}, {"field": "text"}]
    x = {**axis, "field": "at"}
    return [{"data": {"values": values}, "mark": rule, "encoding": {"x": x, "tooltip": tip}}]


def _columns(rows: Sequence[Mapping[str, Any]], mark: str, encoding: Spec, marks: Sequence[Mark]) -> Spec:
    """A bar or a stack of cells for each step; what happened in a step is a rule through its middle."""
    x = {**_BY_STEP, "axis": {"labelAngle": 0, "labelOverlap": True}}
    steps = ((max(math.ceil(m.step), 1), m) for m in marks if m.step is not None)
    layers = [{"mark": mark, "encoding": encoding}, *_rules(x, steps)]
    return {"data": {"values": list(rows)}, "encoding": {"x": x}, "layer": layers}


def _solved(tally: Tally, marks: Sequence[Mark]) -> list[Chart]:
    rows = tally.solved()
    if not rows:
        return []
    fields = ("step", "k", "n", "questions")
    encoding: Spec = {
        "y": {"field": "k", "type": "ordinal", "sort": "descending", "title": "attempts that were right"},
        "color": {
            "field": "share",
            "type": "quantitative",
            "scale": {"domainMin": 0},
            "legend": {"format": "%"},
        },
        "tooltip": [*({"field": field} for field in fields), {"field": "share", "format": ".0%"}],
    }
    about = (
        "Share of the step's questions by how many of the solver's attempts were right. "
        "Those between none and all earn the difficulty reward."
    )
    spec = _columns(rows, "rect", encoding, marks)
    return [Chart("solved", "Solved by k of n attempts", about, spec)]


def _phases(run: RunFolder, marks: Sequence[Mark]) -> list[Chart]:
    rows = [asdict(phase) for phase in run.phases if phase.step > 0 and phase.phase != "done"]
    if not rows:
        return []
    encoding: Spec = {
        "y": {"field": "seconds", "type": "quantitative", "aggregate": "sum", "title": "seconds"},
        "color": _color("phase", rows),
        "tooltip": [
            {"field": "step"},
            {"field": "phase"},
            {"field": "seconds", "aggregate": "sum", "format": ".1f"},
        ],
    }
    spec = _columns(rows, "bar", encoding, marks)
    return [Chart("phases", "Time by phase", "Seconds of each step, a repeated step's summed.", spec)]


def _flow(run: RunFolder) -> list[Chart]:
    if not run.flow:
        return []
    rates = [
        (
            name,
            [
                {"time": record["time"], "value": record["rates"].get(name)}
                for record in run.flow
                if record["rates"]
            ],
        )
        for name in ("produced", "accepted", "invalid", "stale")
    ]
    points = list(dict.fromkeys(name for record in run.flow for name in record["points"]))
    held = [
        (name, [{"time": r["time"], "value": r["points"].get(name, {}).get("depth")} for r in run.flow])
        for name in points
    ]
    return [
        *_over_time(run, "flow-rates", "Flow: samples a second", "The extremes of each stretch.", rates),
        *_over_time(
            run, "flow-held", "Flow: what each point holds", "Queues, the buffer, and calls in flight.", held
        ),
    ]


def _resources(run: RunFolder) -> list[Chart]:
    by: dict[str, list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        by.setdefault(str(sample["component"]), []).append(sample)
    host = by.pop("host", [])
    gpus = [
        {
            "time": sample["time"],
            "value": max((gpu["busy_percent"] or 0 for gpu in sample["gpus"]), default=0),
        }
        for sample in host
        if sample.get("gpus")
    ]

    def of(field: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
        return [
            (name, [{"time": s["time"], "value": s.get(field)} for s in samples])
            for name, samples in by.items()
        ]

    memory = of("rss_mb")
    memory.append(("free on the host", [{"time": s["time"], "value": s.get("memory_free_mb")} for s in host]))
    return [
        *_over_time(run, "cpu", "Processor by component", "CPU seconds a second.", of("cpu_share")),
        *_over_time(
            run,
            "memory",
            "Memory by component",
            "MB, resident; and what the host has free.",
            memory,
        ),
        *_over_time(run, "gpu", "GPUs", "Percent busy, the busiest one.", [("busiest GPU", gpus)]),
    ]


def _over_time(
    run: RunFolder,
    name: str,
    title: str,
    about: str,
    series: Sequence[tuple[str, Sequence[Mapping[str, Any]]]],
) -> list[Chart]:
    """Lines over the minutes since the run's first sign of life."""
    start = min((record["time"] for record in (*run.events, *run.samples, *run.flow)), default=0.0)
    rows = [
        {"minutes": round((time - start) / 60, 3), "name": shown, "value": value}
        for shown, records in series
        for time, value in thinned(records, "time", "value")
    ]
    if not rows:
        return []
    total = max(record["time"] for record in (*run.events, *run.samples, *run.flow)) - start
    x: Spec = {
        "field": "minutes",
        "type": "quantitative",
        "title": "minutes since the first start",
        "scale": {"domain": [0, round(total / 60, 3)], "nice": False},
    }
    tip = [{"field": "minutes", "format": ".1f"}, {"field": "name"}, {"field": "value", "format": ".3~f"}]
    line: Spec = {
        "mark": {"type": "line", "strokeWidth": 1.5},
        "encoding": {
            "y": {"field": "value", "type": "quantitative", "title": None},
            "color": _color("name", rows),
            "tooltip": tip,
        },
    }
    rules = _rules(x, (((mark.time - start) / 60, mark) for mark in run.marks))
    spec: Spec = {"data": {"values": rows}, "encoding": {"x": x}, "layer": [line, *rules]}
    return [Chart(name, title, about, spec)]


def scores_chart(
    name: str, title: str, rows: Sequence[Mapping[str, Any]], x: str, series: str
) -> list[Chart]:
    """Scores with their intervals: rows of `em`, `low`, `high`, `n`, by `x` and, in colour, by `series`."""
    if not rows:
        return []
    shift: Spec = {
        "xOffset": {"field": series, "sort": None},
        "color": _color(series, rows),
    }
    ends = {"y": {"field": "low", "type": "quantitative", "title": "exact match"}, "y2": {"field": "high"}}
    tip = [
        {"field": x},
        {"field": series},
        *({"field": end, "format": ".3f"} for end in ("em", "low", "high")),
        {"field": "n"},
    ]
    spec: Spec = {
        "data": {"values": list(rows)},
        "encoding": {"x": _names(x, rows), **shift, "tooltip": tip},
        "layer": [
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": ends},
            {
                "mark": {"type": "point", "filled": True, "size": 70},
                "encoding": {"y": {"field": "em", "type": "quantitative"}},
            },
        ],
    }
    about = "With the 95 % interval of the questions asked (Wilson; of an average, MOVER)."
    return [Chart(name, title, about, spec)]


def counts_chart(
    name: str, title: str, about: str, rows: Sequence[Mapping[str, Any]], x: str, series: str
) -> list[Chart]:
    """Stacked counts: rows of `count` by `x` and, in colour, by `series`; a column for each `run`."""
    if not rows:
        return []
    spec: Spec = {
        "data": {"values": list(rows)},
        "mark": "bar",
        "encoding": {
            "x": _names(x, rows),
            "xOffset": {"field": "run", "sort": None, "scale": {"paddingInner": 0.08}},
            "y": {"field": "count", "type": "quantitative", "title": None},
            "color": _color(series, rows),
            "tooltip": [{"field": field} for field in ("run", x, series, "count")],
        },
    }
    return [Chart(name, title, about, spec)]


def page_spec(chart: Chart) -> Spec:
    """The specification as the page draws it: as wide as its place."""
    return {**chart.spec, "width": "container", "height": 220, "config": style()}


def to_png(spec: Spec, path: Path) -> None:
    """Draw a specification that has its own sizes as a picture on white, at twice its size in pixels."""
    spec = {**spec, "config": {**style("#222222"), "background": "white"}}
    atomic_write(path, vegalite_to_png(json.dumps(spec), scale=2))
