"""Notices that a run stands still, finds out why, and says so in one line and one page.

    watchdog = Watchdog(plan, services, trainer)        # a thread of its own
    …
    if watchdog.verdict: …                              # told with every stall, and as long as it lasts

Every two seconds it asks in which phase the run is and when anything was last finished there
(`ops.heartbeats`, `ops.progress`, the services' own counters). Past the phase's limit it collects stacks and
facts, reads them (`ops.reading`) and writes the page beside the logs. A gap between two looks, in which the
machine was suspended or gave nobody any time, is no silence. What then happens is the policy: only
report, stop, or stop and start again. Samples of resources are taken in the same thread.

Whatever goes wrong in here is a line on the console: the watchdog is never the cause of an ended run. It
needs the run's file system and the GPU's driver itself, so whoever runs it asks now and then whether it still
looks (`tell_if_stuck`).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ops import collect
from ops.events import EventLog
from ops.heartbeats import PhaseClock, PhaseLimits
from ops.logs import say
from ops.oom import OomWatch
from ops.process import Child
from ops.progress import finished, read_workers
from ops.reading import HUNG_SERVICE, UNKNOWN, Landmarks, Situation, Verdict, read
from ops.report import last_line, stall_report
from ops.samples import SAMPLES_FILE, Sampler, disk_free_gb
from ops.services import Service, ServiceGroup

Policy = Literal["report", "stop", "resume"]

_LOOK_S = 2.0
_GAP_S = 30.0
"""Between the ends of two looks: more than any look takes."""
_STUCK_S = 60.0
_BEFORE_S = 60.0
"""How far before the last sign of progress an error may lie to be the cause of a stall, at least."""
_AGAIN_S = 600.0
"""Between two reports on a stall that lasts, where the policy lets the run go on: its stacks may be others by
then, and whoever looks at the console now has not seen the first."""
_DUMP_S = 8.0
_HUNG_DUMP_S = 3.0
"""For the stacks of a hung service: it is known to be hung 16 s after it began, and 20 are allowed."""


@dataclass(frozen=True, kw_only=True)
class WatchPlan:
    """How a run is watched, as data."""

    folder: Path
    """The run's folder; samples go there, reports into its logs/."""
    heartbeats: Path
    progress: Path
    """The folder of the workers' files."""
    limits: PhaseLimits = field(default_factory=PhaseLimits)
    counted_phases: frozenset[str] = frozenset()
    """Phases in which finished work of workers and services is progress."""
    writing_phases: Mapping[str, str] = field(default_factory=dict)
    """Phases in which growing folders are progress: their pattern below `folder`."""
    landmarks: Landmarks = field(default_factory=Landmarks)
    policy: Policy = "report"
    native: bool = False
    """Whether stacks have C frames, for which each process is paused for a moment."""
    sample_every_s: float = 5.0
    streams: tuple[Path, ...] = ()
    """JSON lines that others write about the run (queues, buffers); the last line of each is shown."""
    flight: Path | None = None
    """Where torch's Flight Recorders listen for the wish to be dumped."""
    must_begin: bool = True
    """Whether an end without an error and without any phase but the start is a failure."""


class Watchdog:
    """Watches one main command and its services until it is closed."""

    def __init__(self, plan: WatchPlan, services: ServiceGroup, main: Child, events: EventLog) -> None:
        """Begin watching."""
        self.plan = plan
        self.verdict: Verdict | None = None
        """Of the stall that lasts; None while there is progress."""
        self.report: Path | None = None
        self.sampler = Sampler(plan.folder / SAMPLES_FILE)
        self.oom = OomWatch()
        self.clock = PhaseClock(plan.heartbeats, plan.limits, time.time())
        self._services, self._main, self._events = services, main, events
        self._done: dict[str, float] = {}
        self._lines = NewLines(main.spec.log_path)
        self._written = 0
        self._stalled_at = 0.0
        """The last progress before the stall that was told."""
        self._told_at = 0.0
        self._looking_since: float | None = None
        self._looked: float | None = None
        self._told_stuck = False
        self._sample_at = 0.0
        self._failure = ""
        self._oom_before = 0
        self._remembered: deque[tuple[float, dict[str, int]]] = deque([(0.0, {})], maxlen=2)
        self._end = threading.Event()
        services.on_hung = self.why_it_hangs
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, with a last sample."""
        self._end.set()
        self._thread.join(_DUMP_S + _LOOK_S)
        self._services.on_hung = lambda service: None
        self.oom.close()

    def roots(self) -> dict[str, int]:
        """The keepers' pids by component."""
        return {child.spec.name: child.pid for child in self._children()}

    def why_it_hangs(self, service: Service) -> str | None:
        """Read a hung service's own stacks, before it is ended."""
        try:
            stacks = collect.run_stacks({service.spec.name: service.pid}, _HUNG_DUMP_S, native=False)
            situation = replace(
                self._situation(time.time()), stacks=stacks, errors=collect.telling_errors([service])
            )
            facts = [fact for fact in situation.services if fact.name == service.spec.name]
            situation = replace(situation, services=facts, workers=())
            verdict = read(situation, self.plan.landmarks)
            self._write(situation, verdict, 0.0, "hang")
            # That it hangs is known already.
            return None if verdict.pattern in (HUNG_SERVICE, UNKNOWN) else verdict.sentence
        except Exception as error:  # a reason less in a message; see the module's last sentence
            return f"(its stacks could not be read: {error!r})"

    def tell_if_stuck(self) -> None:
        """Say so, once, where a look does not come to its end; called by another thread than its own."""
        since = self._looking_since
        if since is None:
            self._told_stuck = False
        elif not self._told_stuck and time.monotonic() - since > _STUCK_S:
            self._told_stuck = True
            say(
                "watchdog",
                f"cannot look at the run any more: {self.plan.folder} or the GPUs' driver has not answered "
                f"for {_STUCK_S:.0f} s, so nothing would be told of a stall",
            )

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_S):
            self._looking_since = time.monotonic()
            try:
                self._look(time.time())
                self._failure = ""
            except Exception as error:  # see the module's last sentence
                if self._failure != repr(error):
                    self._failure = repr(error)
                    say("watchdog", f"cannot watch: {error!r}")
            self._looking_since, self._looked = None, time.time()

    def _look(self, now: float) -> None:
        if self._looked is not None and now - self._looked > _GAP_S:
            self.clock.forgive(now - self._looked)
        if now >= self._sample_at:
            self._sample_at = now + self.plan.sample_every_s
            self.sampler.sample(self.roots(), now)
        self.clock.read()
        if self._has_progressed():
            self.clock.progressed(now)
        silent, limit = self.clock.silent_s(now), self.clock.limit_s()
        if silent < _LOOK_S:
            self._remember(now)
        if self.verdict is None and silent > limit:
            self._stalled_at = self.clock.last_progress
            self._stall(now)
        elif self.verdict is not None and self.clock.last_progress > self._stalled_at:
            self.verdict = None
            say("watchdog", f"progress again in {self.clock.beat.phase} of step {self.clock.beat.step}")
            self._events.add("progress", self._main.spec.name, "progress again")
        elif self.verdict is not None and now - self._told_at >= _AGAIN_S:
            self._stall(now)

    def _remember(self, now: float) -> None:
        """Note where the logs end while all is well: an error that the run got over is not the cause later.

        The older of two notes counts, since the cause may come some time before the last sign of progress.
        """
        self._oom_before = self.oom.kills()
        if now - self._remembered[-1][0] >= _BEFORE_S:
            sizes = {
                child.spec.name: child.spec.log_path.stat().st_size
                for child in self._children()
                if child.spec.log_path.exists()
            }
            self._remembered.append((now, sizes))

    def _has_progressed(self) -> bool:
        """Whether anything was finished since the last look, as far as the phase counts."""
        phase = self.clock.beat.phase
        if phase in self.plan.landmarks.start_phases:
            # Nothing counts yet; what loads or compiles says something new now and then.
            return self._lines.have_come()
        if pattern := self.plan.writing_phases.get(phase):
            size = _size(self.plan.folder, pattern)
            has_grown, self._written = size > self._written, size
            return has_grown
        if phase not in self.plan.counted_phases:
            return False
        done = finished(read_workers(self.plan.progress, time.time()))
        for service in self._services.services:
            if service.monitor:
                done[f"service {service.spec.name}"] = service.monitor.health.worked
        before, self._done = self._done, done
        return any(count > before.get(kind, 0.0) for kind, count in done.items())

    def _stall(self, now: float) -> None:
        began, self._told_at = time.monotonic(), now
        if self.plan.flight:
            collect.trigger_flight_recorders(self.plan.flight)
        situation = replace(
            self._situation(now), stacks=collect.run_stacks(self.roots(), _DUMP_S, self.plan.native)
        )
        verdict = read(situation, self.plan.landmarks)
        self.report = self._write(situation, verdict, time.monotonic() - began, "stall")
        say(
            "watchdog",
            f"no progress for {situation.silent_s:.0f} s in {situation.phase} of step {situation.step}: "
            f"{verdict.sentence}. Culprit: {verdict.culprit}. Report: {self.report}",
        )
        self._events.add(
            "stall",
            verdict.culprit,
            verdict.sentence,
            pattern=verdict.pattern,
            advice=verdict.advice,
            evidence=list(verdict.evidence),
            phase=situation.phase,
            step=situation.step,
            silent_s=round(situation.silent_s, 1),
            limit_s=round(situation.limit_s, 1),
            collected_s=round(time.monotonic() - began, 1),
            report=str(self.report),
        )
        self.verdict = verdict

    def _situation(self, now: float) -> Situation:
        """All but the stacks."""
        children = self._children()
        pids = {process.pid for tree in self.sampler.processes.values() for process in tree}
        return Situation(
            phase=self.clock.beat.phase,
            step=self.clock.beat.step,
            silent_s=self.clock.silent_s(now),
            limit_s=self.clock.limit_s(),
            services=collect.service_facts(self._services.services),
            workers=read_workers(self.plan.progress, now, pids),
            errors=collect.telling_errors(children, self._remembered[0][1]),
            disk_free_gb=disk_free_gb(self.plan.folder),
            oom_kills=self.oom.kills() - self._oom_before,
        )

    def _write(self, situation: Situation, verdict: Verdict, seconds: float, kind: str) -> Path:
        """Write the page; on a full disk there is none."""
        logs = self.plan.folder / "logs"
        path = logs / f"{kind}_{len(list(logs.glob(f'{kind}_*.md'))) + 1:03d}.md"
        streams = {path.name: last_line(path) for path in self.plan.streams}
        page = stall_report(situation, verdict, self.plan.landmarks, self.sampler.last, streams, seconds)
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            say("watchdog", f"{path} cannot be written ({error.strerror})")
        return path

    def _children(self) -> list[Child]:
        return [*self._services.services, self._main]


class NewLines:
    """Whether a log says anything new: a line that only comes again, such as a warning, is not."""

    _WHEN = re.compile(rb"\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d([.,]\d+)?")
    _MOST = 100_000

    def __init__(self, path: Path) -> None:
        """Read `path` from its present end on."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._seen: set[int] = set()

    def have_come(self) -> bool:
        """Whether a line has come since the last call that never came before, but for its time."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
            self._offset += len(new)
            # A progress bar is one long line that is rewritten.
            lines = {hash(self._WHEN.sub(b"", line)) for line in re.split(rb"[\r\n]+", new) if line}
            fresh = lines - self._seen
            self._seen = fresh if len(self._seen) > self._MOST else self._seen | fresh
            return bool(fresh)
        return False


def _size(folder: Path, pattern: str) -> int:
    """Bytes in all files below the folders of that pattern; of what goes away meanwhile nothing."""
    total = 0
    for place in folder.glob(pattern):
        for root, _, names in os.walk(place):
            for name in names:
                with suppress(OSError):
                    total += os.stat(os.path.join(root, name)).st_size
    return total
