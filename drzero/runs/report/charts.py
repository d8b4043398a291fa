"""A run's charts as Vega-Lite specifications, for the page and, drawn by the same library, for the docs.

Colours are `currentColor`, so one drawing serves light and dark pages. A chart without data is not made.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from vl_convert import vegalite_to_png

from drzero.ops.files import atomic_write
from drzero.ops.grouping import by_key
from drzero.runs.report.figures import MOST_POINTS, Estimate, Tally, extremes, stretches
from drzero.runs.run_folder import Mark, RunFolder

Spec = dict[str, Any]
ChartRow = Mapping[str, Any]
Points = Sequence[tuple[float, Any]]  # times and values

# Each with a contrast of at least 3 on the light and the dark page.
_COLORS = ["#3f7fc1", "#d5711a", "#3d9a4a", "#cf4f6f", "#9467bd"]
_NARROW = 330  # pixels of a chart on a phone, which a legend and the names on an axis must fit
_GRID = "#88888840"
_IN_ONE = len(_COLORS)  # series of a chart. The others go into further charts, folded
# What a page draws of a run, however long: marks, columns, series, characters of a tip.
_MOST_MARKS, _MOST_STEPS, _MOST_SERIES, _LONGEST_TIP = 200, 2 * MOST_POINTS, 5 * _IN_ONE, 300


@dataclass(frozen=True)
class Chart:
    """A chart, its title, and a line about it."""

    name: str  # its id in the page
    title: str
    about: str  # what to look for
    spec: Spec
    folded: bool = False  # behind a fold of the page, because another chart shows what matters more


def style(ink: str = "currentColor") -> Spec:
    """The config of every chart. `ink` is the colour of text and axes."""
    sizes = {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": 400}
    text = {"labelColor": ink, "titleColor": ink, **sizes}
    legend = {
        "orient": "top",
        "title": None,
        "unselectedOpacity": 0.7,
        "symbolOpacity": 1,
        "symbolType": "circle",
    }
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**text, "domainColor": ink, "tickColor": ink, "gridColor": _GRID, "labelFlush": False},
        "legend": {**text, **legend},
        "header": text,
        "title": {"color": ink},
        "range": {"category": _COLORS},
    }


def training_charts(run: RunFolder, tally: Tally) -> list[Chart]:
    """The charts of a training run."""
    marks, format_parts = _few(run.marks), ("think", "tool", "answer_part")
    parts = [tally.means(name) for name in tally.names if name not in format_parts]
    of_format = _rows(map(tally.means, format_parts))
    solved: list[ChartRow] = [{**row, "name": "solved"} for row in _rows([tally.shares("solved")])]
    shares: dict[str, tuple[str, str, list[ChartRow]]] = {
        "right": ("Right answers by hop", _RIGHT, _rows([tally.shares("right")])),
        "valid": ("Valid questions by hop", _VALID, _rows([tally.shares("valid")])),
        # An environment's tasks have no hops to tell them apart.
        "tasks": ("Tasks solved", _RIGHT, solved),
        "searched": ("Searched, by hop", _SEARCHED, _rows([tally.shares("searched")])),
    }
    return [
        *metric_lines(run, marks, ("validation",)),
        *_lines("reward", "Reward and its parts", _REWARD, _rows(parts), marks, unit=True),
        *(c for name, about in shares.items() for c in _lines(name, *about, marks, unit=True)),
        *_solved(tally, marks),
        *metric_lines(run, marks, ("entropy", "length", "drift", "collapse")),
        *_lines("format-parts", "Format score by part", _FORMAT, of_format, marks, unit=True),
        *_phases(run, marks),
        *_flow(run),
        *_resources(run),
    ]


_REWARD = "The mean of a step. It should rise, but a challenger's falls when its solver gets better."
_RIGHT = "The share of a step's rollouts. It should rise."
_VALID = "The share of a step's questions that keep the format. It should come near 1 and stay there."
_SEARCHED = "The share of a step's rollouts that searched. Without a search, two hops are a guess."
_FORMAT = "Think, tool and answer, each between 0 and 1. They should come near 1 and stay there."
_OF_STEPS = {
    "entropy": (
        "Entropy",
        "In nats a token. It may fall slowly. Near 0, the model has stopped exploring.",
        {"drzero/collapse/entropy": "entropy"},
    ),
    "length": (
        "Lengths",
        "Tokens of a response. A rise without a better score is padding.",
        {"drzero/collapse/response_tokens": "sampled tokens", "response_length/mean": "with tool responses"},
    ),
    "drift": (
        "Token drift and failures",
        "Shares of tokens that tokenize otherwise, and of rollouts lost or invalid. Both should stay at 0.",
        {"drzero/rollout/token_drift_rate": "drift", "drzero/failures/share": "failures"},
    ),
    "collapse": (
        "Signs of collapse",
        "Shares, where less is better. Alarms judge their means over five steps.",
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
        "On questions that training does not see: this curve counts. It should rise.",
        {
            "drzero/val/em": "exact match",
            "drzero/val/f1": "F1",
            "drzero/val/success": "solved",
            "drzero/val/score": "reward",
        },
    ),
    "loss": (
        "Loss on the demonstrations",
        "In nats a token of the model's own turns. If only the training loss falls, it memorizes.",
        {"train/loss": "training", "val/loss": "held out"},
    ),
}
_UNIT = ("validation", "collapse")  # shares


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


def metric_lines(run: RunFolder, marks: Sequence[Mark], names: Iterable[str]) -> list[Chart]:
    """The charts of these names, each of some metrics by step."""
    charts = []
    for name in names:
        title, about, keys = _OF_STEPS[name]
        rows: list[ChartRow] = []
        for key, shown in keys.items():
            values = {step: metrics[key] for step, metrics in run.steps.items() if key in metrics}
            rows += [{"name": shown, **point} for point in _pooled(values)]
        band = " Band: smallest and largest"
        charts += _lines(name, title, about, rows, marks, unit=name in _UNIT, band=band)
    return charts


def _pooled(values: Mapping[int, float]) -> Iterator[ChartRow]:
    """A point for each step, or for a stretch of steps its mean, its smallest and its largest value."""
    for some in stretches(list(values)):
        found = [values[step] for step in some]
        ends = {"low": min(found), "high": max(found), "n": len(found)} if len(values) > MOST_POINTS else {}
        yield {"since": some[0], "step": some[-1], "mean": fmean(found), **ends}


def _lines(
    name: str,
    title: str,
    about: str,
    rows: Sequence[ChartRow],
    marks: Sequence[Mark] = (),
    *,
    unit: bool = False,
    band: str = " Band: 95 % interval",
) -> list[Chart]:
    """A chart for each five names. Values of a `unit` lie between 0 and 1, most of them."""
    charts = []
    for part, place, some in _in_fives(rows):
        spec = _line_spec(some, marks, unit)
        charts.append(Chart(name + part, title + place, about + _band(band, some), spec, bool(part)))
    return charts


def _in_fives(rows: Iterable[ChartRow]) -> Iterator[tuple[str, str, list[ChartRow]]]:
    """The rows of each five names, with the end of their chart's name and title."""
    by = by_key(rows, itemgetter("name"))
    names = [*by][:_MOST_SERIES]
    for first in range(0, len(names), _IN_ONE):
        some = names[first : first + _IN_ONE]
        place = f", from the {first + 1}th of {len(by)}" if first else ""
        yield f"-{first}" * bool(first), place, [row for name in some for row in by[name]]


def _band(what: str, rows: Iterable[ChartRow]) -> str:
    banded = {row["name"] for row in rows if row.get("low") is not None}
    if not banded:
        return ""
    whose = ", of the name that you click in the legend" * (len(banded) > 1)
    return f"{what}{whose}."


def _line_spec(rows: Sequence[ChartRow], marks: Sequence[Mark], unit: bool) -> Spec:
    steps = {row["step"] for row in rows}
    x, color, y = step_axis(steps), _color("name", rows), _number("mean")
    if unit:
        y["scale"] = {"domain": _unit_domain([row["mean"] for row in rows]), "nice": False}
    elif not any(row["mean"] for row in rows):
        y["scale"] = {"domain": [0, 1]}  # else an axis of nothing but zeros has its only label in the middle
    tip = _fields("since", "step", "name")
    tip.append({"field": "mean", "format": ".3f", "title": "value"})
    layers: list[Spec] = []
    if any(row.get("low") is not None for row in rows):
        tip += [*_fields("low", "high", format=".3f"), {"field": "n"}]
        layers.append(_one_band(rows, color))
    point = {"size": 45 if len(steps) <= MOST_POINTS / 2 else 20, "filled": True}
    line = {"type": "line", "point": point, "strokeWidth": 2}
    layers.append({"mark": line, "encoding": {"y": y, "color": color, "tooltip": tip}})
    layers += _rules(x, ((mark.step, mark) for mark in marks if mark.step is not None))
    return {"data": {"values": rows}, "encoding": {"x": x}, "layer": layers}


def _one_band(rows: Sequence[ChartRow], color: Spec) -> Spec:
    """The interval of one name at a time, because several would cover each other."""
    banded = by_key((row for row in rows if row.get("low") is not None), itemgetter("name"))
    surest = max(banded, key=lambda name: sum(row["n"] for row in banded[name]))
    chosen = {
        "name": "chosen",
        "select": {"type": "point", "fields": ["name"]},
        "bind": "legend",
        "value": [{"name": surest}],
    }
    opacity = {"condition": {"param": "chosen", "empty": False, "value": 0.22}, "value": 0}
    band = {"y": _number("low"), "y2": {"field": "high"}, "color": color, "opacity": opacity}
    return {"params": [chosen], "mark": {"type": "area", "clip": True}, "encoding": band}


def _unit_domain(values: Sequence[float]) -> list[float]:
    """From 0 to 1, and further in halves where a value is: so most charts of most runs have one scale."""
    return [min(math.floor(2 * min(values)) / 2, 0), max(math.ceil(2 * max(values)) / 2, 1)]


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


def _bars(rows: Sequence[ChartRow], encoding: Spec, marks: Sequence[Mark]) -> Spec:
    axis = {"labelAngle": 0, "labelOverlap": True}
    x = {"field": "step", "type": "ordinal", "title": "step", "axis": axis}
    steps = ((max(math.ceil(m.step), 1), m) for m in marks if m.step is not None)
    layers = [{"mark": "bar", "encoding": encoding}, *_rules(x, steps)]
    return {"data": {"values": list(rows)}, "encoding": {"x": x}, "layer": layers}


def _solved(tally: Tally, marks: Sequence[Mark]) -> list[Chart]:
    rows: Sequence[ChartRow] = tally.solved()
    if not rows:
        return []
    share = {"scale": {"domain": [0, 1]}, "axis": {"format": "%"}}
    encoding: Spec = {
        "y": _number("share", "questions", **share),
        "color": _color("attempts", rows) | {"scale": {"range": [_COLORS[3], _COLORS[2], _COLORS[0]]}},
        "order": {"field": "order"},
        "tooltip": [*_fields("since", "step", "attempts", "questions"), {"field": "share", "format": ".0%"}],
    }
    about = "How many of the solver's attempts were right. Only questions between none and all teach it."
    return [Chart("solved", "Too hard, just right, too easy", about, _bars(rows, encoding, marks))]


def _phases(run: RunFolder, marks: Sequence[Mark]) -> list[Chart]:
    rows = _with_other([vars(phase) for phase in run.phases if phase.step > 0 and phase.phase != "done"])
    if not rows:
        return []
    encoding: Spec = {
        "y": _number("seconds", "seconds", aggregate="sum"),
        "color": _color("phase", rows),
        "tooltip": [*_fields("step", "phase"), *_fields("seconds", aggregate="sum", format=".1f")],
    }
    rows, about = _some_steps(rows, "Seconds of each step, repetitions included.")
    return [Chart("phases", "Time by phase", about, _bars(rows, encoding, marks))]


def _with_other(rows: list[ChartRow]) -> list[ChartRow]:
    """The phases that take longest by name, the rest as one."""
    seconds = Counter[str]()
    for row in rows:
        seconds[row["phase"]] += row["seconds"]
    if len(seconds) <= _IN_ONE:
        return rows
    kept = {phase for phase, _ in seconds.most_common(_IN_ONE - 1)}
    return [row if row["phase"] in kept else {**row, "phase": "other"} for row in rows]


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
    about = "Queues, the buffer, and calls in flight. One that stays full is where samples wait."
    rate = "Accepted should follow produced. A gap is lost work."
    return [
        *_over_time(run, "flow-rates", "Flow: samples a second", rate, rates),
        *_over_time(run, "flow-held", "Flow: what each point holds", about, held),
    ]


def _resources(run: RunFolder) -> list[Chart]:
    by = by_key(run.samples, itemgetter("component"))
    host = by.pop("host", [])

    def series(samples: Sequence[ChartRow], field: str) -> Points:
        return [(sample["time"], sample.get(field)) for sample in samples]

    cpu = [(name, series(samples, "cpu_share")) for name, samples in by.items()]
    memory = [(name, series(samples, "rss_mb")) for name, samples in by.items()]
    memory.append(("free on the host", series(host, "memory_free_mb")))
    busiest = [(s["time"], max(gpu["busy_percent"] or 0 for gpu in s["gpus"])) for s in host if s.get("gpus")]
    about = "MB, resident, and what the host has free. A steady rise is a leak."
    return [
        *_over_time(run, "cpu", "Processor by component", "CPU seconds a second. 1 is a busy core.", cpu),
        *_over_time(run, "memory", "Memory by component", about, memory),
        *_over_time(run, "gpu", "GPUs", "Percent busy, the busiest one.", [("busiest GPU", busiest)]),
    ]


def _over_time(
    run: RunFolder, name: str, title: str, about: str, series: Iterable[tuple[str, Points]]
) -> list[Chart]:
    times = [record["time"] for record in (*run.events, *run.samples, *run.flow)]
    start = min(times, default=0.0)
    known = {shown: [point for point in points if point[1] is not None] for shown, points in series}
    largest = sorted((shown for shown in known if known[shown]), key=lambda shown: -_peak(known[shown]))
    rows: list[ChartRow] = [
        {"minutes": round((time - start) / 60, 3), "name": shown, "value": value}
        for shown in largest[:_MOST_SERIES]
        for time, value in extremes(known[shown], itemgetter(1))
    ]
    if not rows:
        return []
    scale = {"domain": [0, round((max(times) - start) / 60, 3)], "nice": False}
    x = _number("minutes", "minutes since the first start", scale=scale)
    tip = [*_fields("minutes", format=".1f"), {"field": "name"}, *_fields("value", format=".3~f")]
    rules = _rules(x, (((mark.time - start) / 60, mark) for mark in _few(run.marks)))

    def spec(some: list[ChartRow]) -> Spec:
        encoding = {"y": _number("value"), "color": _color("name", some), "tooltip": tip}
        line = {"mark": {"type": "line", "strokeWidth": 1.5}, "encoding": encoding}
        return {"data": {"values": some}, "encoding": {"x": x}, "layer": [line, *rules]}

    return [
        Chart(name + part, title + place, about, spec(some), bool(part))
        for part, place, some in _in_fives(rows)
    ]


def _peak(points: Points) -> float:
    return max(float(value) for _, value in points)


def scores_chart(
    name: str,
    title: str,
    rows: Sequence[ChartRow],
    x: str,
    series: str | None = None,
    *,
    joined: bool = True,
    about: str = "With 95 % intervals. Where two hardly overlap, more than chance differs.",
) -> list[Chart]:
    """Scores with their intervals between 0 and 1: rows of `em`, `low`, `high`, `n`, by `x`.

    `series` tells rows with one `x` apart by colour. Rows are `joined` by lines where `x` has an order.
    """
    if not rows:
        return []
    seen: Spec = {"color": _color(series, rows), "xOffset": _beside(series)} if series else {}
    y = _number("em", "exact match", scale={"domain": [0, 1]})
    ends = {"y": _number("low", "exact match"), "y2": {"field": "high"}}
    line = {"type": "line", "strokeWidth": 2, "opacity": 0.6}
    first = {} if series else {"color": _COLORS[0]}
    tip = [*_fields(x, *([series] if series else ())), *_fields("em", "low", "high", format=".3f")]
    spec: Spec = {
        "data": {"values": list(rows)},
        "encoding": {"x": _names(x, rows) | {"title": None}, **seen, "tooltip": [*tip, {"field": "n"}]},
        "layer": [
            *([{"mark": line | first, "encoding": {"y": y}}] if joined else ()),
            {"mark": {"type": "rule", "strokeWidth": 1.5, **first}, "encoding": ends},
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, **first},
                "encoding": {"y": y},
            },
        ],
    }
    return [Chart(name, title, about, spec)]


def _beside(series: str) -> Spec:
    return {"field": series, "sort": None, "scale": {"paddingOuter": 6}}  # else they would leave their place


def page_spec(chart: Chart) -> Spec:
    """The specification as the page draws it, as wide as its container."""
    return {**chart.spec, "width": "container", "height": 220, "config": style()}


def to_png(spec: Spec, path: Path) -> None:
    """Draw a specification that sets its sizes as a picture on white, at twice its size in pixels."""
    spec = {**spec, "config": {**style("#222222"), "background": "white"}}
    atomic_write(path, vegalite_to_png(json.dumps(spec), scale=2))
