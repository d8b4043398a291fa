"""The state of a run, read from the files it appends to.

    files = RunFiles(folder, RunFacts("demo", "hrpo", steps=4))
    files.poll()            # reads new lines, returns the steps and events among them

A run that has just begun may have none of these files.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from omegaconf import DictConfig

from drzero.ops import records
from drzero.ops.notices import STARTUP_KIND
from drzero.ops.records import JsonTail, Record, of_last_start
from drzero.preflight.machine import declared_machine
from drzero.recipe.metrics import MetricsTail, Steps, add_step

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
_RECENT = 5  # Steps whose mean time predicts the end. The first ones compile and fill caches.
_LAST_BYTES = 1 << 17


@dataclass(frozen=True)
class RunFacts:
    """Facts from a run's config."""

    name: str
    method: str | None = None  # hrpo, grpo or environment. None for a stage that does not train.
    steps: int = 0
    usd_per_hour: float = 0.0

    @classmethod
    def of(cls, config: DictConfig) -> Self:
        """Read them from a stage's config."""
        price = declared_machine(config, starting=True).usd_per_hour
        steps = config.trainer.total_training_steps if "trainer" in config else 0
        return cls(config.run.name, config.get("method"), steps, price)


UP = ("healthy", "running", "starting")


@dataclass
class RunState:
    """A run's present start, and the metrics of all its steps. Times are Unix seconds."""

    facts: RunFacts
    began: float | None = None
    ended: float | None = None  # when the main command ended, if it has
    last_event: float | None = None
    beats: list[Record] = field(default_factory=list)
    metrics: Steps = field(default_factory=dict)
    components: dict[str, str] = field(default_factory=dict)  # state by component
    usage: dict[str, Record] = field(default_factory=dict)
    """The last sample of each component, and of the host."""
    startup: str = ""  # what the main command's start is doing
    waits_for: Record | None = None  # the batch that the trainer waits for, as the flow monitor saw it last

    @property
    def last_sign(self) -> float | None:
        """When the run last wrote anything down."""
        times = [self.last_event, *(record["time"] for record in (*self.beats[-1:], *self.usage.values()))]
        return max((float(time) for time in times if time is not None), default=None)

    @property
    def phase(self) -> str:
        """The trainer's phase."""
        return str(self.beats[-1]["phase"]) if self.beats else "start-up"

    @property
    def step(self) -> int:
        """The step the trainer is in, 0 before the first."""
        return int(self.beats[-1]["step"]) if self.beats else 0

    @property
    def phase_began(self) -> float | None:
        """When that phase began."""
        return float(self.beats[-1]["time"]) if self.beats else self.began

    def close(self) -> None:
        """Mark what was up as stopped: nothing outlives the block that runs it, and Ctrl-C leaves no word."""
        up = [name for name, condition in self.components.items() if condition in UP]
        self.components.update(dict.fromkeys(up, "stopped"))
        if up and self.ended is None:
            self.ended = time.time()

    def left_s(self, now: float) -> float | None:
        """Expected seconds to the end of the last step. None until this start has finished a step."""
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
        """What this start has cost, by the declared machine's price."""
        seconds = (self.ended or now) - self.began if self.began is not None else 0.0
        return seconds / 3600 * self.facts.usd_per_hour


class RunFiles:
    """Follows the files of a run. Counted from `since`, by default from its last start."""

    def __init__(self, folder: Path, facts: RunFacts, since: float | None = None) -> None:
        self.state = RunState(facts)
        self._since = since
        self._metrics = MetricsTail(folder)
        self._event_tail = JsonTail(folder / "logs" / records.EVENTS_FILE, records.EventLine)
        self._beats = JsonTail(folder / records.HEARTBEATS, records.BeatLine)
        self._samples = _last_of(folder / records.SAMPLES_FILE, records.SampleLine)
        self._flow = _last_of(folder / records.FLOW_FILE, records.FlowLine)
        self._events: list[Record] = []
        self._changed: dict[str, float] = {}

    def poll(self) -> tuple[list[int], list[Record]]:
        """Read new lines. Returns the steps and the events among them."""
        state, since = self.state, self._since or 0.0
        events = [event for event in self._event_tail.read() if event["time"] >= since]
        self._events += events
        if events:
            self._replay(of_last_start(self._events))
        if self._since is None:
            since = state.began or 0.0
        state.beats += [beat for beat in self._beats.read() if beat["time"] >= since]
        self._take_samples([sample for sample in self._samples.read() if sample["time"] >= since])
        for snapshot in self._flow.read():
            state.waits_for = snapshot.get("waiting") if snapshot["time"] >= since else None
        logged = list(self._metrics.stream())
        for step, metrics in logged:
            add_step(state.metrics, step, metrics)
        state.metrics = dict(sorted(state.metrics.items()))
        return [step for step, _ in logged], events

    def _replay(self, start: list[Record]) -> None:
        state = self.state
        if state.began != start[0]["time"]:
            state.began, state.beats, state.usage = start[0]["time"], [], {}
        ends = [event["time"] for event in start if event["kind"] in ("exit", "end")]
        state.ended, state.last_event = ends[-1] if ends else None, start[-1]["time"]
        last = {str(event["component"]): event for event in start if event["kind"] in _STATES}
        starting = [str(event["text"]) for event in start if event["kind"] == STARTUP_KIND]
        state.startup = starting[-1] if starting else ""
        state.components = {name: _STATES[event["kind"]] for name, event in last.items()}
        self._changed = {name: event["time"] for name, event in last.items()}
        self._take_samples([*state.usage.values()])

    def _take_samples(self, samples: Sequence[Record]) -> None:
        for sample in samples:
            component = str(sample["component"])
            self.state.usage[component] = sample
            # A sample older than the component's last event does not know its state.
            if "state" in sample and sample["time"] > self._changed.get(component, 0.0):
                self.state.components[component] = str(sample["state"])


def _last_of(path: Path, of: Any) -> JsonTail:
    """Of a long run only the end: it may have records of days."""
    offset = 0
    with suppress(OSError):
        offset = max(path.stat().st_size - _LAST_BYTES, 0)
    return JsonTail(path, of, offset)


def shown_s(seconds: float) -> str:
    """Seconds as a clock shows them: 0:42, 7:02, 1:07:02."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_time(at: float) -> str:
    """A Unix time as the local clock shows it."""
    return time.strftime("%H:%M:%S", time.localtime(at))
