"""A stall as a Markdown page: the diagnosis first, then everything it was read from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.flow.workers import Worker
from ops.watchdog.diagnosis import Diagnosis, Landmarks, Situation
from ops.watchdog.stacks import Stack, group_stacks

_SHOWN_COUNTERS = 12
_LONGEST_LINE = 64 * 1024


def stall_report(
    situation: Situation,
    diagnosis: Diagnosis,
    landmarks: Landmarks,
    samples: Mapping[str, Mapping[str, Any]],
    streams: Mapping[str, str],
    collected_s: float,
) -> str:
    """The page.

    `samples` are the last resource samples by component, `streams` the last line of each other file that is
    written about the run, `collected_s` is how long the collecting took.
    """
    parts = [
        f"# {diagnosis.pattern}: {diagnosis.culprit}",
        diagnosis.sentence[:1].upper() + diagnosis.sentence[1:] + ".",
        _bullets(diagnosis.evidence),
        f"**What to do:** {diagnosis.advice}." if diagnosis.advice else "",
        "## When",
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}, step {situation.step}, phase *{situation.phase}*, "
        f"{situation.stall.silent_s:.0f} s without progress (limit {situation.stall.limit_s:.0f} s); "
        f"collected in {collected_s:.1f} s.",
        f"{situation.stall.text[:1].upper()}{situation.stall.text[1:]}." if situation.stall.text else "",
        "## Services",
        _services(situation),
        "## Workers",
        _workers(situation.workers),
        "## Resources",
        _resources(samples),
        *(f"## {name}\n\n```\n{line}\n```" for name, line in streams.items() if line),
        "## First errors",
        _bullets(f"{name}: `{line}`" for name, line in situation.errors.items()) or "none in the logs",
        "## Stacks, grouped",
        _groups(situation.stacks, landmarks),
        "## All stacks",
        "\n\n".join(_stack(stack) for stack in situation.stacks) or "no Python process was found",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def last_line(path: Path) -> str:
    """The last whole line of a file, empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _LONGEST_LINE, 0))
            lines = file.read().decode(errors="replace").rpartition("\n")[0].splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _services(situation: Situation) -> str:
    rows = []
    for service in situation.services:
        shown = {
            name: value
            for name, value in service.counters.items()
            if not name.endswith(("_created", "_bucket")) and value
        }
        counters = ", ".join(f"{name} {value:g}" for name, value in list(shown.items())[:_SHOWN_COUNTERS])
        rows.append(
            (service.name, service.state, f"{service.silent_s:.0f} s", service.problem or "", counters)
        )
    return _table(("service", "state", "last work", "problem", "counters"), rows)


def _workers(workers: Sequence[Worker]) -> str:
    rows = []
    for worker in workers:
        open_calls = ", ".join(
            f"{kind} {count} (oldest {age:.0f} s)" for kind, (count, age) in _open(worker).items()
        )
        loop = "–" if worker.loop_silent_s is None else f"{worker.loop_silent_s:.0f} s"
        rows.append(
            (
                f"{worker.pid} {worker.title[:40]}",
                f"{worker.silent_s:.0f} s",
                loop,
                ", ".join(f"{kind} {count:g}" for kind, count in worker.done.items()),
                ", ".join(f"{kind} {count:g}" for kind, count in worker.failed.items()),
                open_calls,
            )
        )
    return _table(("worker", "last sign", "loop silent", "done", "failed", "open"), rows)


def _open(worker: Worker) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = {}
    for one in worker.calls:
        count, age = found.get(one.kind, (0, 0.0))
        found[one.kind] = count + 1, max(age, one.age_s)
    return found


def _resources(samples: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("cpu_share", "cpu_s", "rss_mb", "threads", "read_mb", "write_mb", "gpu_mb")
    rows = [
        (name, *(str(sample[column]) for column in columns))
        for name, sample in samples.items()
        if name != "host"
    ]
    host = samples.get("host", {})
    about = ", ".join(
        f"{key} {value}" for key, value in host.items() if key not in ("time", "component", "gpus")
    )
    gpus = "\n".join(
        f"GPU {place}: {gpu['used_mb']} of {gpu['total_mb']} MB, busy {gpu['busy_percent']} %"
        for place, gpu in enumerate(host.get("gpus", ()))
    )
    return "\n\n".join(
        filter(None, [_table(("component", *columns), rows), f"Host: {about}" if about else "", gpus])
    )


def _groups(stacks: Sequence[Stack], landmarks: Landmarks) -> str:
    lines = []
    for group in group_stacks(stacks):
        who = ", ".join(f"{landmarks.role(stack)} {stack.pid}" for stack in group[:8])
        more = f" and {len(group) - 8} more" if len(group) > 8 else ""
        lines.append(f"{len(group)} × `{group[0].main[0]}`: {who}{more}")
    return _bullets(lines)


def _stack(stack: Stack) -> str:
    head = f"### {stack.component}, pid {stack.pid}, state {stack.state}\n\n`{stack.title[:160]}`"
    if stack.failure:
        return f"{head}\n\n{stack.failure}"
    threads = [
        f"Thread {thread.name} ({'active' if thread.active else 'idle'})\n"
        + "\n".join(f"    {frame}" for frame in thread.frames)
        for thread in stack.threads
    ]
    return f"{head}\n\n```\n" + "\n".join(threads) + "\n```" if threads else head


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "none"
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
