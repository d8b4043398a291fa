"""Report an agent's runs: a table, the failures by cause, and their records.

for fault in faults(bench, max_pause_s=1.0): …         # must be fixed before it trains
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from drzero.labs.agents.runs import AgentRun, Bench
from drzero.recipe.tables import console, new_table
from environments.agent.contract import total

_SHOWN_CAUSES = 10
_SHOWN_RUNS = 8
_CALL_FIELDS = ("path", "status", "seconds", "tokens_in", "tokens_out", "request", "answer")


def faults(bench: Bench, max_pause_s: float | None) -> Iterator[str]:
    """One line for each fault. Pauses of the event loop count above `max_pause_s`, None for never."""
    if bench.failed:
        yield failed_share(bench.runs)
    if max_pause_s is not None and bench.pause.seconds > max_pause_s:
        yield f"the event loop was blocked for {bench.pause.seconds:.1f} s at {bench.pause.place}"
    for place, left in bench.left_open.items():
        openers = _openers(bench, left)
        yield f"{len(left)} connections to {_address(place)} were left open{openers}: close the client"
    for name in dict.fromkeys(bench.tasks_left):
        yield f"{bench.tasks_left.count(name)} tasks were left running: {name}"


def unexplained(bench: Bench, max_pause_s: float | None) -> str | None:
    """What to know of an event loop that was late though no line was seen to hold it; None if it was not."""
    if max_pause_s is None or bench.latest_s <= max_pause_s or bench.pause.seconds > max_pause_s:
        return None
    return (
        f"the event loop was late by {bench.latest_s:.1f} s, and no line of the agent was seen to hold it: "
        "an import, C code or a busy machine. Run it again on an idle one"
    )


def failed_share(runs: Sequence[AgentRun]) -> str:
    """How many runs failed, and the commonest cause."""
    failed = [run for run in runs if run.failure is not None]
    causes = by_cause(failed)
    (cause, those), *_ = causes.items()
    kinds = ":" if len(causes) == 1 else f", of {len(causes)} kinds; most often"
    place = f" ({those[0].failure.place})" if those[0].failure and those[0].failure.place else ""
    return f"{len(failed)} of {len(runs)} runs failed{kinds} {cause}{place}"


def by_cause(failed: Sequence[AgentRun]) -> dict[str, list[AgentRun]]:
    """The failed runs by cause, commonest first. Numbers and ids in messages do not matter."""
    groups: defaultdict[str, list[AgentRun]] = defaultdict(list)
    for run in failed:
        assert run.failure is not None
        groups[re.sub(r"\b[0-9a-f]{8,}\b|\d+", "N", run.failure.cause)].append(run)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return {runs[0].failure.cause: runs for runs in ordered if runs[0].failure is not None}


def print_runs(
    runs: Sequence[AgentRun], seconds: float, figures: Iterable[tuple[str, str]], title: str
) -> None:
    """Print how the runs ended with further figures, then the failures."""
    out = console()
    table = new_table(title, "", "", show_header=False)
    good, failed = ([run for run in runs if (run.failure is None) is well] for well in (True, False))
    rate = f", {len(runs) / seconds:.2g} a second" if seconds else ""
    table.add_row("finished", f"{len(good)} of {len(runs)} in {seconds:.1f} s{rate}")
    table.add_row("failed", str(len(failed)))
    table.add_row("latency", _percentiles([run.seconds for run in good]))
    for name, value in figures:
        table.add_row(name, value)
    if good:
        rewards = [total(run.returned) for run in good]
        mean = sum(rewards) / len(rewards)
        table.add_row("reward", f"{min(rewards):g} to {max(rewards):g}, mean {mean:.3g}")
    out.print(table)
    if not failed:
        return
    table = new_table("failed", ">runs", "cause", "where", "run")
    for cause, those in list(by_cause(failed).items())[:_SHOWN_CAUSES]:
        assert those[0].failure is not None
        table.add_row(str(len(those)), cause, those[0].failure.place or "–", _numbers(those))
    out.print(table)


def watched(bench: Bench) -> Iterator[tuple[str, str]]:
    """Lines of the table that only a recorder and a watched event loop can give."""
    totals, runs = bench.totals, len(bench.runs)
    without = f"; {totals.without_usage} answers did not say" if totals.without_usage else ""
    failed = f", {totals.failed} of them without an answer of 200" if totals.failed else ""
    yield "model calls", f"{totals.calls}, {totals.calls / runs:.3g} a run{failed}"
    yield (
        "tokens a run",
        f"{totals.tokens_in / runs:.4g} read, {totals.tokens_out / runs:.4g} written{without}",
    )
    yield "most at once", f"{bench.most_at_once} runs, {totals.most_in_flight} calls in flight"
    paused = f"{bench.pause.seconds:.1f} s at {bench.pause.place}" if bench.pause.place else "none seen"
    unseen = " (by an import, C code or a busy machine)" if bench.latest_s > bench.pause.seconds + 1 else ""
    yield "longest pause", f"{paused}; the event loop was late by {bench.latest_s:.1f} s at most{unseen}"
    left = [f"{len(c)} to {_address(p)}{_openers(bench, c)}" for p, c in bench.left_open.items()]
    yield "left open", "; ".join(left) or "no connection"
    if bench.tasks_left:
        yield "left running", ", ".join(dict.fromkeys(bench.tasks_left))


def _percentiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return "–"
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99])
    return f"p50 {p50:.2f} s, p95 {p95:.2f} s, p99 {p99:.2f} s"


def _address(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def _openers(bench: Bench, left: Sequence[Any]) -> str:
    runs = sorted({run for one in left if (run := bench.totals.run_of_port.get(one.port)) is not None})
    if not runs:
        return ""
    more = "" if len(runs) <= _SHOWN_RUNS else f" and {len(runs) - _SHOWN_RUNS} more"
    return f" (the model's, by runs {', '.join(map(str, runs[:_SHOWN_RUNS]))}{more})"


def _numbers(runs: Sequence[AgentRun]) -> str:
    shown = ", ".join(str(run.number) for run in runs[:_SHOWN_RUNS])
    return shown if len(runs) <= _SHOWN_RUNS else f"{shown}, …"


def record(run: AgentRun) -> dict[str, Any]:
    """A failed run as JSON, with its model calls."""
    assert run.failure is not None
    return {
        "run": run.number,
        "item": run.item,
        "data": run.data,
        "seconds": round(run.seconds, 3),
        "cause": run.failure.cause,
        "place": run.failure.place,
        "trace": run.failure.trace,
        "returned": repr(run.returned)[:200] if run.returned is not None else None,
        "calls": [
            {name: getattr(call, name) for name in _CALL_FIELDS} | {"seconds": round(call.seconds, 3)}
            for call in run.calls
        ],
    }
