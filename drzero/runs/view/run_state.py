"""The state of a run, from the files that it appends to: events, heartbeats, metrics, samples of resources.

    files = RunFiles(folder, RunFacts("demo", "hrpo", steps=4))
    files.poll()            # reads what is new; returns the steps logged since the last poll
    files.state.phase

A missing or half-written file is no error: a run that has just begun has none.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from omegaconf import DictConfig

from drzero.ops.process.logs import EVENTS_FILE, begins_start
from drzero.ops.resources.sampler import SAMPLES_FILE
from drzero.ops.text import is_number
from drzero.preflight.machine import declared_machine
from drzero.recipe.metrics import Steps, add_step

Record = dict[str, Any]

_STATES = {
    "start": "starting",
    "ready": "healthy",
    "restart": "restarting",
    "crash": "dead",
    "hung": "hung",
    "silent": "silent",
    "stopped": "stopped",
    "exit": "ended",
}
"""What an event makes of its component."""
_RECENT = 5
"""Steps whose mean time the expected end is reckoned with: the first ones compile and fill caches."""
_LAST_BYTES = 1 << 17


@dataclass(frozen=True)
class RunFacts:
    """What a run's config says about it."""

    name: str
    method: str | None = None
    """hrpo or grpo; None for a stage that does not train."""
    steps: int = 0
    usd_per_hour: float = 0.0

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Those of a stage's config."""
        price = declared_machine(config, starting=True).usd_per_hour
        steps = config.trainer.total_training_steps if "trainer" in config else 0
        return cls(config.run.name, config.get("method"), steps, price)


@dataclass
class RunState:
    """What is known of a run's present start, and the metrics of all its steps."""

    facts: RunFacts
    began: float | None = None
    """When the start's first event was, in unix seconds."""
    ended: float | None = None
    """When the main command ended, if it has."""
    last_event: float | None = None
    """When the last event was."""
    beats: list[Record] = field(default_factory=list)
    metrics: Steps = field(default_factory=dict)
    components: dict[str, str] = field(default_factory=dict)
    """The state of each part of the run, by name."""
    usage: dict[str, Record] = field(default_factory=dict)
    """The last sample of each part, and of the host."""

    @property
    def last_sign(self) -> float | None:
        """When anything of it was last written down."""
        times = [self.last_event, *(record["time"] for record in (*self.beats[-1:], *self.usage.values()))]
        return max((float(time) for time in times if time is not None), default=None)

    @property
    def phase(self) -> str:
        """What the trainer is doing."""
        return str(self.beats[-1]["phase"]) if self.beats else "start-up"

    @property
    def step(self) -> int:
        """The step it is in; 0 before the first."""
        return int(self.beats[-1]["step"]) if self.beats else 0

    @property
    def phase_began(self) -> float | None:
        """When that phase began."""
        return float(self.beats[-1]["time"]) if self.beats else self.began

    def left_s(self, now: float) -> float | None:
        """Expected seconds until the last step has ended; None before a step of this start has."""
        begins: dict[int, float] = {}
        for beat in self.beats:
            if beat["phase"] == "rollout":
                begins.setdefault(int(beat["step"]), float(beat["time"]))
        times = [begins[step + 1] - began for step, began in begins.items() if step + 1 in begins]
        # The first step is logged before the second one begins.
        logged = (self.metrics.get(step, {}).get("timing_s/step") for step in begins)
        times = times or [seconds for seconds in logged if seconds is not None]
        if not times or self.phase in ("done", "out-of-time"):
            return None
        each, step = fmean(times[-_RECENT:]), max(begins)
        of_this = 0.0 if step in self.metrics else max(each - (now - begins[step]), 0.0)
        return each * (self.facts.steps - step) + of_this

    def usd(self, now: float) -> float:
        """What this start has cost until now, by the declared machine's price."""
        seconds = (self.ended or now) - self.began if self.began is not None else 0.0
        return seconds / 3600 * self.facts.usd_per_hour


class JsonTail:
    """What is new in a JSON-lines file that others append to; a line that is cut off waits for its rest."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        """Of what is there already only the last bytes are read, if `last_bytes` is given."""
        self._path = path
        self._offset = 0
        if last_bytes is not None:
            with suppress(OSError):
                self._offset = max(path.stat().st_size - last_bytes, 0)

    def read(self) -> list[Record]:
        """The records since the last call."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # written again from its beginning
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole, end, _ = data.rpartition(b"\n")
        self._offset += len(whole + end)
        records = []
        for line in whole.split(b"\n"):
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records


class RunFiles:
    """Follows the files of a run; `since` is when the start began that counts, by default the last one."""

    def __init__(self, folder: Path, facts: RunFacts, since: float | None = None) -> None:
        self.state = RunState(facts)
        self._metrics = folder / "metrics"
        self._attempts: dict[Path, JsonTail] = {}
        self._events = JsonTail(folder / "logs" / EVENTS_FILE)
        self._beats = JsonTail(folder / "heartbeats.jsonl")
        self._samples = JsonTail(folder / SAMPLES_FILE, _LAST_BYTES)
        self._since = since
        self._last: Record = {}
        self._opened: Record = {}
        self._changed_at: dict[str, float] = {}
        """When an event last changed the state of each component: an older sample does not know it."""

    def poll(self) -> tuple[list[int], list[Record]]:
        """Read what is new; returns the steps logged since, and the events."""
        events = [event for event in self._events.read() if self._counts(event)]
        for event in events:
            self._take(event)
        began = self.state.began if self._since is None else self._since
        self.state.beats += [
            beat
            for beat in self._beats.read()
            if {"time", "step", "phase"} <= beat.keys() and beat["time"] >= (began or 0.0)
        ]
        for sample in self._samples.read():
            if "component" in sample and sample.get("time", 0.0) >= (began or 0.0):
                self.state.usage[str(sample["component"])] = sample
                if "state" in sample and sample["time"] > self._changed_at.get(sample["component"], 0.0):
                    self.state.components[str(sample["component"])] = str(sample["state"])
        return self._new_steps(), events

    def _counts(self, event: Mapping[str, Any]) -> bool:
        if not {"time", "kind"} <= event.keys():
            return False
        return self._since is None or bool(event["time"] >= self._since)

    def _take(self, event: Record) -> None:
        state, kind, component = self.state, event.get("kind"), str(event.get("component"))
        if not self._last or begins_start(event, self._last, self._opened):
            state.began, state.ended = event["time"], None
            state.components, state.usage, state.beats = {}, {}, []
        self._last, state.last_event = event, event["time"]
        if kind == "start":
            self._opened = event
        if kind in _STATES:
            state.components[component] = _STATES[kind]
            self._changed_at[component] = event["time"]
        if kind in ("exit", "end"):
            state.ended = event["time"]

    def _new_steps(self) -> list[int]:
        new = []
        for path in sorted(self._metrics.glob("attempt_*.jsonl")):
            for record in self._attempts.setdefault(path, JsonTail(path)).read():
                if "step" in record and isinstance(record.get("data"), dict):
                    # A metric that is no number, such as the NaN of nothing, is in the file as null.
                    data = {name: value for name, value in record["data"].items() if is_number(value)}
                    add_step(self.state.metrics, int(record["step"]), data)
                    new.append(int(record["step"]))
        self.state.metrics = dict(sorted(self.state.metrics.items()))
        return new


def shown_s(seconds: float) -> str:
    """Seconds as a clock shows them: 0:42, 7:02, 1:07:02."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_time(at: float) -> str:
    """A unix time as the local clock shows it."""
    return time.strftime("%H:%M:%S", time.localtime(at))
