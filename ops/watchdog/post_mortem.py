"""Why a run ended, read from what it left: events, heartbeats, resource samples and logs.

    death = examine(folder, causes)
    print(death.sentence)

The supervision's own events take precedence over the logs: a service that died has its consequences in every
other log. Without events (an older run, a run of another program) only the logs are read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.causes import Cause, find_cause
from ops.process.logs import EVENTS_FILE, OUT_OF_TIME, read_json_lines
from ops.resources.sampler import SAMPLES_FILE
from ops.watchdog.collect import error_lines

_LITTLE_DISK_GB = 0.5
_LITTLE_MEMORY_MB = 500
_RECENT_S = 60.0

_FINISHED, _FAILED, _STALLED, _CUT_OFF = "finished", "failed", "stalled", "cut off"
_OUT_OF_TIME = "out of time"


@dataclass(frozen=True)
class Death:
    """How a run ended."""

    state: str
    """finished, failed, stalled, out of time (ended itself before a set time), cut off (ended without an
    error: killed from outside, or the machine)."""
    sentence: str
    culprit: str | None = None
    first_error: str | None = None
    advice: str = ""
    evidence: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)


def examine(
    folder: Path,
    causes: Sequence[Cause] = (),
    heartbeats: str = "heartbeats.jsonl",
    result: str = "result.json",
) -> Death:
    """Read what a run left in `folder`; `causes` are those that only its recipe knows.

    `result` is the file that a stage writes last: the only sign of success of a stage that has services and
    no main command.
    """
    logs = folder / "logs"
    events = _last_start(read_json_lines(logs / EVENTS_FILE))
    beats = read_json_lines(folder / heartbeats)
    samples = read_json_lines(folder / SAMPLES_FILE)
    errors = _errors(logs, events)
    facts = _facts(beats, samples, events)
    blamed = _blamed(events)
    ended_well = any(event["kind"] == "exit" and event.get("code") == 0 for event in events)
    if stopped := next((event for event in events if event["kind"] == OUT_OF_TIME), None):
        advice = "rerun it with more time: it resumes from there"
        return Death(_OUT_OF_TIME, str(stopped["text"]), advice=advice, facts=facts)
    if blamed is not None:
        return _from_event(blamed, errors, causes, facts, events)
    has_main = any("offset" in event for event in events)
    if ended_well or (events and not has_main and (folder / result).is_file()):
        return Death(_FINISHED, "the run ended without an error", facts=facts)
    if errors:
        return _from_logs(errors, causes, facts)
    if events and not has_main and events[-1]["kind"] == "stopped":
        text = "the stage ended its services in order and left no result: the reason is on its console"
        return Death(_FAILED, text, advice="see there; for a stage of a loop, in evolve/logs/", facts=facts)
    scarce = _scarce(samples)
    where = f" in {facts['phase']}" if "phase" in facts else ""
    return Death(
        _CUT_OFF,
        f"the run ended{where} without an error: killed from outside (SIGKILL, a limit), or the host failed"
        + (f"; {scarce[0]}" if scarce else ""),
        evidence=tuple(scarce),
        advice="rerun it: it resumes at its last checkpoint",
        facts=facts,
    )


def _last_start(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of the last start of the run: those from the first `start` after the last end."""
    begin = 0
    for place, event in enumerate(events):
        earlier = events[place - 1]["kind"] if place else "stopped"
        if event["kind"] == "start" and earlier in ("stopped", "end", "exit", "cost"):
            begin = place
    return events[begin:]


def _blamed(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The event that ended the run; a stall only if the run never moved again."""
    restarted = {event["component"] for event in events if event["kind"] == "ready"}
    blamed = None
    for place, event in enumerate(events):
        later = events[place + 1 :]
        if event["kind"] in ("crash", "hung"):
            is_back = event["component"] in restarted and any(
                e["kind"] == "ready" and e["component"] == event["component"] for e in later
            )
            if not is_back:
                return event
        if event["kind"] == "exit" and event.get("code"):
            return event
        if event["kind"] == "stall" and not any(e["kind"] in ("progress", "exit") for e in later):
            blamed = event
        if event["kind"] == "end" and blamed is None:
            blamed = event
    return blamed


def _from_event(
    event: dict[str, Any],
    errors: dict[str, list[str]],
    causes: Sequence[Cause],
    facts: dict[str, str],
    events: Sequence[dict[str, Any]],
) -> Death:
    if event.get("from_outside"):
        advice = "rerun it: it resumes at its last checkpoint"
        return Death(_CUT_OFF, f"the run was {event['text']}", advice=advice, facts=facts)
    component = str(event["component"])
    own = errors.get(component, [])
    first_error = event.get("first_error") or (own[0] if own else None)
    known = next(((line, c) for line in [*own, str(event["text"])] if (c := find_cause(line, causes))), None)
    culprit = event.get("culprit") or (known and known[1].culprit) or component
    sentence = f"{component} {event['text']}" if event["kind"] in ("crash", "hung") else str(event["text"])
    if known and known[1].name not in sentence:
        sentence += f"; cause: {known[1].name}"
    failures = [
        f"{e['kind']} of {e['component']}: {e['text']}" for e in events if e["kind"] in ("crash", "hung")
    ]
    return Death(
        _STALLED if event["kind"] == "stall" else _FAILED,
        sentence,
        culprit,
        known[0] if known else first_error,
        event.get("advice") or (known[1].advice if known else "read the log of the culprit"),
        tuple(event.get("evidence") or failures),
        facts | ({"report": str(event["report"])} if event.get("report") else {}),
    )


def _from_logs(errors: dict[str, list[str]], causes: Sequence[Cause], facts: dict[str, str]) -> Death:
    """The component whose errors show a cause; of several a service before the main command that used it."""
    for component, lines in errors.items():
        for line in lines:
            if cause := find_cause(line, causes):
                culprit = cause.culprit or component
                evidence = (f"{component}: {line}",)
                return Death(
                    _FAILED, f"{culprit}: {cause.name}", culprit, line, cause.advice, evidence, facts
                )
    component, lines = next(iter(errors.items()))
    text = f"{component} failed for a reason that is in no table: {lines[0]}"
    return Death(_FAILED, text, component, lines[0], f"read {component}.log around that line", (), facts)


def _errors(logs: Path, events: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Error lines by component; services first, the main command, which uses them, last."""
    offsets = {e["component"]: int(e.get("offset", 0)) for e in events if e["kind"] == "start"}
    mains = {event["component"] for event in events if "offset" in event} or {"trainer"}
    paths = sorted(logs.glob("*.log"), key=lambda path: (path.stem in mains, path.stem))
    found = {path.stem: error_lines(path, offsets.get(path.stem, 0)) for path in paths}
    return {name: lines for name, lines in found.items() if lines}


def _facts(
    beats: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> dict[str, str]:
    facts = {}
    if beats:
        last = beats[-1]
        facts["phase"] = f"{last['phase']} of step {last['step']}"
        facts["since"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
    if beats and samples:
        facts["in that phase"] = f"{max(samples[-1]['time'] - beats[-1]['time'], 0):.0f} s to the last sample"
    peaks: dict[str, int] = {}
    for sample in samples:
        if "rss_mb" in sample:
            peaks[sample["component"]] = max(peaks.get(sample["component"], 0), sample["rss_mb"])
    if peaks:
        facts["peak memory"] = ", ".join(f"{name} {mb} MB" for name, mb in peaks.items())
    restarts = [event["component"] for event in events if event["kind"] == "restart"]
    if restarts:
        facts["restarts"] = ", ".join(f"{name} {restarts.count(name)}" for name in dict.fromkeys(restarts))
    return facts


def _scarce(samples: Sequence[dict[str, Any]]) -> list[str]:
    """What had nearly run out when the last samples were taken."""
    hosts = [sample for sample in samples if sample["component"] == "host"]
    if not hosts:
        return []
    recent = [host for host in hosts if host["time"] >= hosts[-1]["time"] - _RECENT_S]
    memory = min((host["memory_free_mb"] for host in recent if host.get("memory_free_mb")), default=None)
    disk = recent[-1].get("disk_free_gb")
    found = []
    if memory is not None and memory < _LITTLE_MEMORY_MB:
        found.append(f"only {memory} MB of memory were free in the last minute: probably out of memory")
    if disk is not None and disk < _LITTLE_DISK_GB:
        found.append(f"only {disk:.2f} GB of the disk were free: probably full")
    return found
