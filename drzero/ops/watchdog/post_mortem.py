"""Why a run ended, from its events, heartbeats, resource samples, logs and flow.

Events take precedence over logs, because a dead service leaves errors in every other log.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from drzero.ops.causes import Cause, first_cause
from drzero.ops.notices import shortened
from drzero.ops.records import OUT_OF_TIME, SAMPLE_ENDS, Record, RunRecords
from drzero.ops.services.external import SILENT
from drzero.ops.watchdog.collect import error_lines

_RESUMES = "rerun it: it resumes at its last checkpoint"
_FAILURES = {"crash", "hung", SILENT}  # kinds of events of failed services


@dataclass(frozen=True)
class Death:
    """How a run ended."""

    state: str  # finished, failed, stalled, out of time (by itself), cut off (killed, no error logged)
    sentence: str
    culprit: str | None = None
    first_error: str | None = None
    advice: str = ""
    evidence: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)


def examine(place: Path | RunRecords, causes: Sequence[Cause] = ()) -> Death:
    """Examine a run, or a folder as a training run's. `causes` belong to its recipe."""
    run = place if isinstance(place, RunRecords) else RunRecords(place)
    folder = run.folder
    events = run.last_start
    flow, symptoms = _flow(run.flow, since=events[0]["time"] if events else 0.0)
    # Services come first, because the main command uses them.
    offsets = {
        event["component"]: int(event.get("offset", 0)) for event in events if event["kind"] == "start"
    }
    mains = {event["component"] for event in events if "offset" in event}
    paths = sorted(
        (folder / "logs").glob("*.log"), key=lambda path: (path.stem in (mains or {"trainer"}), path.stem)
    )
    errors = {path.stem: lines for path in paths if (lines := error_lines(path, offsets.get(path.stem, 0)))}
    # Without a main command, result.json is a stage's only sign of success.
    ended_well = any(event["kind"] == "exit" and event.get("code") == 0 for event in events) or (
        bool(events) and not mains and (folder / "result.json").is_file()
    )
    facts = _facts(run, ended_well)
    if stopped := next((event for event in events if event["kind"] == OUT_OF_TIME), None):
        advice = "rerun it with more time: it resumes from there"
        death = Death("out of time", str(stopped["text"]), advice=advice)
    elif blamed := _blamed(events, ended_well):
        death = _from_event(blamed, errors, causes, events)
    elif ended_well:
        death = Death("finished", "the run ended without an error")
    elif errors:
        death = _from_logs(errors, causes)
    elif events and not mains and events[-1]["kind"] == "stopped":
        text = "the stage stopped its services in order and left no result: the reason is on its console"
        death = Death("failed", text, advice="read its console; a loop keeps it in evolve/logs/")
    else:
        scarce = _scarce(run.samples)
        where = f" in {facts['phase']}" if "phase" in facts else ""
        death = Death(
            "cut off",
            f"the run ended{where} without an error: killed from outside (SIGKILL, a limit), or the host "
            "failed" + (f"; {scarce[0]}" if scarce else ""),
            advice=_RESUMES,
            evidence=tuple(scarce),
        )
    if death.state != "finished":
        death = replace(death, evidence=(*map(shortened, death.evidence), *symptoms))
    first_error = death.first_error and shortened(death.first_error)
    return replace(death, first_error=first_error, facts=facts | flow | death.facts)


def _blamed(events: Sequence[Record], ended_well: bool) -> Record | None:
    """The event that ended the run: a service that never came back, or a stall after which nothing moved."""
    blamed, of_services = None, _FAILURES - {SILENT} if ended_well else _FAILURES
    ready = {event["component"]: place for place, event in enumerate(events) if event["kind"] == "ready"}
    moves = [place for place, event in enumerate(events) if event["kind"] in ("progress", "exit")]
    for place, event in enumerate(events):
        kind, is_back = event["kind"], ready.get(event["component"], -1) > place
        if (kind in of_services and not is_back) or (kind == "exit" and event.get("code")):
            return event
        if kind == "stall" and not (moves and moves[-1] > place):
            blamed = event
        if kind == "end" and blamed is None:
            blamed = event
    return blamed


def _from_event(
    event: Record, errors: dict[str, list[str]], causes: Sequence[Cause], events: Sequence[Record]
) -> Death:
    if event.get("from_outside"):
        return Death("cut off", f"the run was {event['text']}", advice=_RESUMES)
    component, sentence = str(event["component"]), str(event["text"])
    own = errors.get(component, [])
    line, cause = first_cause([*own, sentence], causes) or (None, None)
    if event["kind"] in _FAILURES:
        sentence = f"{component} {sentence}"
    if cause and cause.name not in sentence:
        sentence += f"; cause: {cause.name}"
    failures = [f"{e['kind']} of {e['component']}: {e['text']}" for e in events if e["kind"] in _FAILURES]
    return Death(
        "stalled" if event["kind"] == "stall" else "failed",
        sentence,
        event.get("culprit") or (cause and cause.culprit) or component,
        line or event.get("first_error") or (own[0] if own else None),
        event.get("advice") or (cause.advice if cause else "read the log of the culprit"),
        tuple(event.get("evidence") or failures),
        {"report": str(event["report"])} if event.get("report") else {},
    )


def _from_logs(errors: dict[str, list[str]], causes: Sequence[Cause]) -> Death:
    for component, lines in errors.items():
        if found := first_cause(lines, causes):
            line, cause = found
            culprit, evidence = cause.culprit or component, (f"{component}: {line}",)
            return Death("failed", f"{culprit}: {cause.name}", culprit, line, cause.advice, evidence)
    component, lines = next(iter(errors.items()))
    text = f"{component} failed for an unknown reason: {lines[0]}"
    return Death("failed", text, component, lines[0], f"read {component}.log around that line")


def _facts(run: RunRecords, ended_well: bool) -> dict[str, str]:
    # A trainer that fails is done too, so the phase before counts.
    beats = [beat for beat in run.beats if ended_well or beat["phase"] != "done"]
    samples, facts = run.samples, {}
    if beats:
        last = beats[-1]
        facts["phase"] = f"{last['phase']} of step {last['step']}"
        facts["since"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
        if samples:
            facts["in that phase"] = f"{max(samples[-1]['time'] - last['time'], 0):.0f} s to the last sample"
    peaks: dict[str, int] = {}
    for sample in samples:
        if "rss_mb" in sample:
            peaks[sample["component"]] = max(peaks.get(sample["component"], 0), sample["rss_mb"])
    if peaks:
        facts["peak memory"] = ", ".join(f"{name} {mb} MB" for name, mb in peaks.items())
    restarts = Counter(event["component"] for event in run.last_start if event["kind"] == "restart")
    if restarts:
        facts["restarts"] = ", ".join(f"{name} {count}" for name, count in restarts.items())
    if run.unreadable:
        facts["unreadable"] = ", ".join(f"{name}: {what}" for name, what in run.unreadable.items())
    return facts


def _scarce(samples: Sequence[Record]) -> list[str]:
    hosts = [sample for sample in samples if sample["component"] == "host"]
    if not hosts:
        return []
    recent = [host for host in hosts if host["time"] >= hosts[-1]["time"] - 60]
    memory = min((host["memory_free_mb"] for host in recent if host.get("memory_free_mb")), default=None)
    disk = recent[-1].get("disk_free_gb")
    found = []
    if memory is not None and memory < 500:
        found.append(f"only {memory} MB of memory were free in the last minute: probably out of memory")
    if disk is not None and disk < 0.5:
        found.append(f"only {disk:.2f} GB of the disk were free: probably full")
    return found


def _flow(stream: Sequence[Record], since: float) -> tuple[dict[str, str], list[str]]:
    records = [record for record in stream if record["time"] >= since]
    if not records:
        return {}, []
    last = records[-1]
    facts = {"warm-up": _warmup(last), "held last": _held(last), "samples": _samples(last)}
    found = [symptom for record in records for symptom in record["symptoms"]]
    texts = {f"{one['check']}, {one['point']}": one["text"] for one in found}
    seen = Counter(f"{one['check']}, {one['point']}" for one in found)
    total = len(records)
    symptoms = [f"{name}: {texts[name]} (in {n} of {total} snapshots)" for name, n in seen.most_common()]
    return {name: text for name, text in facts.items() if text}, symptoms


def _warmup(last: Record) -> str:
    if not last.get("samples"):  # nothing was requested, as in a validation
        return ""
    if not last.get("warmup"):
        took = last.get("about", {}).get("warmup_s")
        return "" if took is None else f"complete after {took:.1f} s"
    waiting = last.get("waiting")
    have = f": {waiting['have']:g} of {waiting['want']:g} in {waiting['point']}" if waiting else ""
    return f"never complete{have}" if last["samples"].get("asked") else ""


def _held(last: Record) -> str:
    return ", ".join(
        f"{name} {point['depth']:g}" + (f"/{point['capacity']:g}" if point.get("capacity") else "")
        for name, point in last["points"].items()
        if point.get("depth")
    )


def _samples(last: Record) -> str:
    samples = last.get("samples") or {}
    if not samples.get("asked"):
        return ""
    counts = {name: samples[name] for name in SAMPLE_ENDS if samples.get(name)}
    ends = " + ".join(f"{name.replace('_', ' ')} {count:g}" for name, count in counts.items())
    return f"asked {samples['asked']:g} = {ends or 'nothing yet'}"
