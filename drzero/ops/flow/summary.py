"""Summarises a run's flow stream: where samples were, their fate, and the symptoms.

facts, symptoms = summarise(RunRecords(folder).flow, since=begun)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from drzero.ops.records import Record

_ENDS = ("accepted", "invalid", "failed", "stale", "filtered", "in_flight", "lost")


def summarise(stream: Sequence[Record], since: float = 0.0) -> tuple[dict[str, str], list[str]]:
    """Return facts by name and a line per symptom, for all starts `since` that unix time."""
    records = [record for record in stream if record["time"] >= since]
    if not records:
        return {}, []
    last = records[-1]
    facts = {"warm-up": _warmup(last), "held last": _held(last), "samples": _samples(last)}
    seen = Counter(
        (symptom["check"], symptom["point"]) for record in records for symptom in record["symptoms"]
    )
    texts = {(s["check"], s["point"]): s["text"] for record in records for s in record["symptoms"]}
    symptoms = [
        f"{check}, {point}: {texts[check, point]} (in {count} of {len(records)} snapshots)"
        for (check, point), count in seen.most_common()
    ]
    return {name: text for name, text in facts.items() if text}, symptoms


def _warmup(last: Mapping[str, Any]) -> str:
    if not last.get("samples"):  # nothing was requested, as in a validation
        return ""
    if not last.get("warmup"):
        took = last.get("about", {}).get("warmup_s")
        return "" if took is None else f"complete after {took:.1f} s"
    waiting = last.get("waiting")
    have = f": {waiting['have']:g} of {waiting['want']:g} in {waiting['point']}" if waiting else ""
    return f"never complete{have}" if last["samples"].get("asked") else ""


def _held(last: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {point['depth']:g}" + (f"/{point['capacity']:g}" if point.get("capacity") else "")
        for name, point in last["points"].items()
        if point.get("depth")
    )


def _samples(last: Mapping[str, Any]) -> str:
    samples = last.get("samples") or {}
    if not samples.get("asked"):
        return ""
    ends = " + ".join(f"{name.replace('_', ' ')} {samples[name]:g}" for name in _ENDS if samples.get(name))
    return f"asked {samples['asked']:g} = {ends or 'nothing yet'}"
