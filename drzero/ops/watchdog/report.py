"""A stall as a Markdown page: the diagnosis first, then the evidence."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drzero.ops.files import open_regular
from drzero.ops.flow.workers import ages
from drzero.ops.watchdog.diagnosis import Diagnosis, Landmarks, Situation
from drzero.ops.watchdog.stacks import Stack, group_stacks


def stall_report(
    situation: Situation,
    diagnosis: Diagnosis,
    landmarks: Landmarks,
    samples: Mapping[str, Mapping[str, Any]],
    streams: Mapping[str, str],
    collected_s: float,
) -> str:
    """Return the page. `samples` are the last ones by component, `streams` the last lines of other files."""
    stall = situation.stall
    silence = f"for {stall.silent_s:.0f} s"
    if stall.kind != "asked":
        silence = f"{stall.silent_s:.0f} s without progress (limit {stall.limit_s:.0f} s)"
    parts = [
        f"# {diagnosis.pattern}: {diagnosis.culprit}",
        diagnosis.sentence[:1].upper() + diagnosis.sentence[1:] + ".",
        _bullets(diagnosis.evidence),
        f"**What to do:** {diagnosis.advice}." if diagnosis.advice else "",
        "## When",
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}, step {situation.step}, phase *{situation.phase}*, "
        f"{silence}; collected in {collected_s:.1f} s.",
        f"{situation.stall.text[:1].upper()}{situation.stall.text[1:]}." if situation.stall.text else "",
        *_facts(situation),
        *_resources(samples),
        *(f"## {name}\n\n```\n{line}\n```" for name, line in streams.items() if line),
        "## First errors",
        _bullets(f"{name}: `{line}`" for name, line in situation.errors.items()) or "none in the logs",
        *_stacks(situation, landmarks),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def next_page(logs: Path, kind: str) -> Path:
    """Return the path of a run's next page of this kind, such as `stall_003.md`."""
    return logs / f"{kind}_{len(list(logs.glob(f'{kind}_*.md'))) + 1:03d}.md"


def grouped(stacks: Sequence[Stack], landmarks: Landmarks) -> list[str]:
    """Describe all processes at the same position in a line, the most common position first."""
    lines = []
    for group in group_stacks(stacks):
        who = ", ".join(
            f"{landmarks.role(stack)} {stack.pid}{f' on {stack.node}' if stack.node else ''}"
            for stack in group[:8]
        )
        more = f" and {len(group) - 8} more" if len(group) > 8 else ""
        lines.append(f"{len(group)} × `{group[0].main[0]}`: {who}{more}")
    return lines


def last_line(path: Path) -> str:
    """Return the last complete line of a file, or an empty string."""
    try:
        with open_regular(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 64 * 1024, 0))
            lines = file.read().decode(errors="replace").rpartition("\n")[0].split("\n")
    except OSError:
        return ""
    return lines[-1]


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _facts(situation: Situation) -> Iterator[str]:
    rows: list[Sequence[str]] = []
    for service in situation.services:
        shown = [
            f"{name} {value:g}"
            for name, value in service.counters.items()
            if value and not name.endswith(("_created", "_bucket"))
        ]
        silent = "–" if service.silent_s is None else f"{service.silent_s:.0f} s"
        rows.append((service.name, service.state, silent, service.problem or "", ", ".join(shown[:12])))
    yield "## Services"
    yield _table(("service", "state", "last work", "problem", "counters"), rows)
    rows = []
    for worker in situation.workers:
        calls = [f"{kind} {len(of)} (oldest {max(of):.0f} s)" for kind, of in ages(worker.calls).items()]
        rows.append(
            (
                f"{worker.pid} {worker.title[:40]}",
                f"{worker.silent_s:.0f} s",
                "–" if worker.loop_silent_s is None else f"{worker.loop_silent_s:.0f} s",
                ", ".join(f"{kind} {count:g}" for kind, count in worker.done.items()),
                ", ".join(f"{kind} {count:g}" for kind, count in worker.failed.items()),
                ", ".join(calls),
            )
        )
    yield "## Workers"
    yield _table(("worker", "last sign", "loop silent", "done", "failed", "open"), rows)


def _resources(samples: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    columns = ("cpu_share", "cpu_s", "rss_mb", "threads", "read_mb", "write_mb", "gpu_mb")
    used = {name: sample for name, sample in samples.items() if name != "host"}
    yield "## Resources"
    yield _table(
        ("component", *columns),
        [(name, *(str(sample[column]) for column in columns)) for name, sample in used.items()],
    )
    if host := samples.get("host"):
        shown = {key: value for key, value in host.items() if key not in ("time", "component", "gpus")}
        yield "Host: " + ", ".join(f"{key} {value}" for key, value in shown.items())
        yield "\n".join(
            f"GPU {place}: {gpu['used_mb']} of {gpu['total_mb']} MB, busy {gpu['busy_percent']} %"
            for place, gpu in enumerate(host["gpus"])
        )


def _stacks(situation: Situation, landmarks: Landmarks) -> Iterator[str]:
    if situation.unseen or any(stack.node for stack in situation.stacks):
        yield "## Other nodes"
        yield "Stacks come from all nodes. Resources and memory are sampled only on the run's own node."
        yield _bullets(situation.unseen)
    yield "## Stacks, grouped"
    yield _bullets(grouped(situation.stacks, landmarks))
    yield "## All stacks"
    if not situation.stacks:
        yield "no Python process was found"
    for stack in situation.stacks:
        there = f" on {stack.node}" if stack.node else ""
        yield f"### {stack.component}, pid {stack.pid}{there}, state {stack.state}"
        yield f"`{stack.title[:160]}`"
        threads = [
            f"Thread {thread.name} ({'active' if thread.active else 'idle'})\n"
            + "\n".join(f"    {frame}" for frame in thread.frames)
            for thread in stack.threads
        ]
        yield stack.failure or ("```\n" + "\n".join(threads) + "\n```" if threads else "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "none"
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
