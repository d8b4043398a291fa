"""Draws the state of a run at any width: its progress, its figures, its parts, what happened."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from drzero.ops.notices import Notice, one_line
from drzero.recipe.metrics import ALARMS, COLUMNS, columns_of, is_training, k_of_n
from drzero.runs.view.run_state import RunState, shown_s, shown_time

_BARS = "▁▂▃▄▅▆▇█"
_TREND = 12
_TWO_COLUMNS = 76  # from this width on, figures have two columns
_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}
_WELL = ("healthy", "running", "starting", "stopped", "ended")
_LEAST_NOTICES = 3
_INDENT = 9
_CONSOLE = Console()  # rich needs one to wrap text


def screen(state: RunState, notices: Sequence[Notice], now: float, width: int, height: int | None) -> Text:
    """Lines of at most `width` cells, at most `height` of them. Without a height, all notices are shown."""
    lines = [_headline(state, now), _times(state, now)]
    if state.facts.steps:
        done = sum(1 for step in state.metrics.values() if is_training(step))
        cells = min(width, 60)
        full = round(cells * min(done / state.facts.steps, 1.0))
        lines.append(Text("━" * full, "green").append("─" * (cells - full), "dim"))
    body = [*_figures(state, width), *_components(state)]
    if height is None:
        lines += [*body, *(line for notice in notices for line in _notice(notice, width))]
    else:
        lines += body[: max(height - len(lines) - min(len(notices), _LEAST_NOTICES), 0)]
        lines += _last(notices, width, height - len(lines))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines if height is None else lines[:height])


def trend(values: Sequence[float]) -> str:
    """The last values as bars from the lowest to the highest. Equal values are in the middle."""
    values = values[-_TREND:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def _headline(state: RunState, now: float) -> Text:
    line = Text(one_line(state.facts.name), "bold")
    where = state.phase
    if state.facts.steps and state.step:
        where = f"step {min(state.step, state.facts.steps)} of {state.facts.steps}, {where}"
    elif state.startup and not state.step:
        where = f"{where}, {state.startup},"
    since = state.phase_began
    if state.ended is not None:
        where = "ended" if state.phase == "done" else f"ended in {where}"
    elif since is not None:
        where += f" for {shown_s(now - since)}"
        if (wait := state.waits_for) and wait.get("filtered"):
            where += f", {wait['have']:g} of {wait['want']:g} groups there, {wait['filtered']:g} scored alike"
    return line.append(one_line(f": {where}"), "")


def _times(state: RunState, now: float) -> Text:
    parts = []
    if state.began is not None:
        parts.append(f"{shown_s((state.ended or now) - state.began)} since its start")
    if state.ended is None and (left := state.left_s(now)) is not None:
        parts.append(f"about {shown_s(left)} left, until {shown_time(now + left)}")
    if usd := state.usd(now):
        parts.append(f"${usd:.2f} so far")
    return Text(", ".join(parts) or "waiting for its first sign", "dim")


def _figures(state: RunState, width: int) -> Iterator[Text]:
    """The last step's figures, each with its trend, and the solver's k of n over all steps."""
    trained = [step for step in state.metrics.values() if is_training(step)]
    if not trained or state.facts.method not in COLUMNS:
        return
    cells = []
    for name, key in columns_of(state.facts.method, state.metrics).items():
        values = [step[key] for step in state.metrics.values() if key in step]
        if values:
            label = one_line(name)
            bad = key in (ALARMS, "drzero/failures/share", "drzero/rollout/token_drift_rate") and values[-1]
            cell = Text(f"{label:<17}").append(f"{values[-1]:>7.3g} ", "bold red" if bad else "bold")
            cells.append(cell.append(f"{trend(values):<{_TREND}}", "cyan"))
    columns = 2 if width >= _TWO_COLUMNS else 1
    rows = -(-len(cells) // columns)
    for row in range(rows):
        yield Text("  ").join(cells[row::rows])
    if solved := k_of_n(state.metrics):
        counts = [f"{name.replace('_of_', '/')} {count:.0f}" for name, count in solved.items()]
        line = Text("solver right     ").append(trend([0.0, *solved.values()])[1:], "cyan")
        yield line.append(f" {'  '.join(counts)}")


def _components(state: RunState) -> Iterator[Text]:
    """A line for the state and usage of each part, and one for the host."""
    for name, condition in state.components.items():
        usage = state.usage.get(name, {})
        if condition == "starting" and name in state.usage and "state" not in usage:
            condition = "running"  # a main command has no health check
        style = "green" if condition in _WELL else "bold red"
        line = Text(f"{one_line(name):<11}").append(f"{one_line(condition):<10}", style)
        if usage and condition not in ("stopped", "ended", "dead", "gone"):
            line.append(f"CPU {usage.get('cpu_share', 0.0):>4.1f}{usage.get('rss_mb', 0) / 1024:>6.1f} GiB")
            if usage.get("gpu_mb"):
                line.append(f", GPU {usage['gpu_mb'] / 1024:.1f} GiB")
        yield line
    if host := state.usage.get("host"):
        parts = [f"load {host.get('load', 0.0):.1f}"]
        if host.get("memory_free_mb") is not None:
            parts.append(f"{host['memory_free_mb'] / 1024:.1f} GiB of memory free")
        if host.get("disk_free_gb") is not None:
            parts.append(f"{host['disk_free_gb']:.0f} GB of disk free")
        parts += [
            f"GPU {number}: {gpu.get('busy_percent', 0)} % busy, {(gpu.get('used_mb') or 0) / 1024:.0f} GiB"
            for number, gpu in enumerate(host.get("gpus") or ())
        ]
        yield Text(f"{'host':<11}{', '.join(parts)}")


def _last(notices: Sequence[Notice], width: int, room: int) -> list[Text]:
    lines: list[Text] = []
    for notice in reversed(notices):
        own = _notice(notice, width, room + 1)
        if len(lines) + len(own) > room:
            return lines or own[:room]
        lines = [*own, *lines]
    return lines


def _notice(notice: Notice, width: int, most: int | None = None) -> list[Text]:
    """A notice on as many lines as it needs, or its first `most`."""
    head = f"{shown_time(notice.time)} {notice.component:<10} "
    indent = min(_INDENT, width // 4)
    body = notice.text.replace("\n", " ")
    text = Text(head + (body if most is None else body[: most * width]), _STYLES[notice.level])
    text.stylize("dim", 0, 8)
    first, *rest = text.wrap(_CONSOLE, max(width - indent, 1)) or [Text()]
    return [first, *(Text(" " * indent).append_text(line) for line in rest)][:most]
