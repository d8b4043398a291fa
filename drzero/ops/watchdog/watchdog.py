"""Detects that a run stands still, finds out why, and reports it in one line, one page and one event.

An error here prints a line and never ends the run. The supervisor notices a hanging poll (`warn_if_stuck`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from drzero.ops.console import say
from drzero.ops.flow.snapshot import SUSPENDED_S
from drzero.ops.flow.workers import read_workers
from drzero.ops.process.child import Child
from drzero.ops.process.logs import EventLog
from drzero.ops.process.tree import ZOMBIE
from drzero.ops.records import SAMPLES_FILE
from drzero.ops.resources.cgroup import OomWatch
from drzero.ops.resources.others import largest_others
from drzero.ops.resources.sampler import Sampler, disk_free_gb
from drzero.ops.services.services import Service, ServiceGroup
from drzero.ops.watchdog import collect
from drzero.ops.watchdog.diagnosis import HUNG_SERVICE, UNKNOWN, Diagnosis, Landmarks, Situation, diagnose
from drzero.ops.watchdog.movement import Movement, RollCall, Signs, Stall
from drzero.ops.watchdog.report import last_line, next_page, stall_report
from drzero.ops.watchdog.stacks import Stack

_POLL_S = 2.0
_STUCK_S = 60.0
_DUMP_S = 8.0
_REASON_S = 75.0


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Stacks of a run's processes on other nodes."""

    stacks: tuple[Stack, ...] = ()
    unseen: tuple[str, ...] = ()  # what could not be read and why, one line each


@dataclass(frozen=True, kw_only=True)
class WatchPlan(Signs):
    """How to watch a run: where its movement shows, and what to do about a stall."""

    landmarks: Landmarks = field(default_factory=Landmarks)
    stall_action: Literal["report", "stop", "resume"] = "report"
    native: bool = False  # whether stacks include C frames, which pauses each process for a moment
    sample_every_s: float = 5.0
    streams: tuple[Path, ...] = ()  # JSON-lines files about the run; a page shows the last line of each
    recorder: Path | None = None
    """Folder on this machine with the pipes and dumps of torch's Flight Recorders."""
    flight: Path | None = None  # the run's folder that keeps those dumps
    must_begin: bool = True
    """Whether an exit without an error before any phase except the start counts as a failure."""
    elsewhere: Callable[[float, bool], Elsewhere] = lambda deadline_s, native: Elsewhere()
    """Reads stacks on other nodes, given a deadline in seconds and whether to include C frames."""


class Watchdog(threading.Thread):
    """Watches one main command and its services until you close it."""

    def __init__(self, plan: WatchPlan, services: ServiceGroup, main: Child, events: EventLog) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.plan = plan
        self.diagnosis: Diagnosis | None = None  # of the current stall; None while the run moves
        self.report: Path | None = None  # the page of the last stall
        self.sampler = Sampler(plan.folder / SAMPLES_FILE)
        self.oom = OomWatch()
        marks = plan.landmarks
        self.movement = Movement(plan, main.spec.log_path, marks.waits_on, marks.start_phases)
        self.roll = RollCall()
        self._pids_then: set[int] = set()  # processes of the run when it last moved
        self._services, self._main, self._events = services, main, events
        self._reported_at = 0.0
        self._poll_began: float | None = None
        self._poll_ended: float | None = None
        self._warned_stuck = False
        self._sample_at = 0.0
        self._log_sizes: deque[tuple[float, dict[str, int]]] = deque([(0.0, {})], maxlen=2)
        self._end = threading.Event()
        services.on_hung = self.why_it_hangs
        self.start()

    def close(self) -> None:
        """Stop watching."""
        self._end.set()
        self.join(_DUMP_S + _POLL_S)
        self._services.on_hung = lambda service: None
        self.oom.close()

    def why_it_hangs(self, service: Service) -> str | None:
        """Diagnose a hung service from its stacks before it is killed."""
        name = service.spec.name
        try:
            # A hang is detected within 16 s and must be reported within 20.
            stacks = collect.run_stacks({name: service.pid}, deadline_s=3, native=False)
            now = time.time()
            clock = self.movement.clock
            stall = Stall("phase", name, "", clock.silent_s(now), clock.limit_s())
            situation = self._situation(now, stall, stacks)
            situation = replace(
                situation,
                errors=collect.first_errors([service]),
                services=[fact for fact in situation.services if fact.name == name],
                workers=(),
                flow=None,
            )
            diagnosis = diagnose(situation, self.plan.landmarks)
            self._write(situation, diagnosis, 0.0, "hang")
            return None if diagnosis.pattern in (HUNG_SERVICE, UNKNOWN) else diagnosis.sentence
        except Exception as error:  # a message without a reason; see the module's last paragraph
            return f"(its stacks could not be read: {error!r})"

    def has_begun(self) -> bool:
        """Whether any phase has begun between start and end."""
        self.movement.clock.read()
        marks = self.plan.landmarks
        return not self.movement.clock.entered <= marks.start_phases | marks.end_phases

    def warn_if_stuck(self) -> None:
        """Warn once if the watchdog's own poll hangs. Call this from another thread."""
        began = self._poll_began
        if began is None:
            self._warned_stuck = False
        elif not self._warned_stuck and time.monotonic() - began > _STUCK_S:
            self._warned_stuck = True
            say(
                "watchdog",
                f"can no longer watch the run: {self.plan.folder} or the GPU driver has not answered for "
                f"{_STUCK_S:.0f} s, so a stall would go unreported",
            )

    def run(self) -> None:
        """Poll until closed."""
        failure = ""
        while not self._end.wait(_POLL_S):
            self._poll_began = time.monotonic()
            try:
                self.poll(time.time())
                failure = ""
            except Exception as error:  # see the module's last paragraph
                if failure != repr(error):
                    failure = repr(error)
                    say("watchdog", f"cannot watch: {failure}")
            self._poll_began, self._poll_ended = None, time.time()

    def poll(self, now: float) -> None:
        """Follow and sample the run once, and report a stall or its end."""
        movement = self.movement
        if self._poll_ended is not None and now - self._poll_ended > SUSPENDED_S:
            movement.discount_suspension(now - self._poll_ended, now)
        if now >= self._sample_at:
            self._sample_at = now + self.plan.sample_every_s
            states = {service.spec.name: service.state for service in self._services.services}
            self.sampler.sample({child.spec.name: child.pid for child in self._children()}, now, states)
            self._call_the_roll(now)
        movement.poll(now, self._services.services)
        if movement.clock.silent_s(now) < _POLL_S:
            # Note where the logs end while the run moves: earlier errors do not explain a later stall.
            # Use the older of two notes, because a cause may precede the last movement by a minute.
            self._pids_then = {process.pid for process in self.sampler.processes}
            if now - self._log_sizes[-1][0] >= 60:
                logs = {child.spec.name: child.spec.log_path for child in self._children()}
                sizes = {name: path.stat().st_size for name, path in logs.items() if path.exists()}
                self._log_sizes.append((now, sizes))
        stall = self._lost_worker(now) or movement.stall(now)
        # Report a lasting stall again, because its stacks may have changed.
        if stall and (self.diagnosis is None or now - self._reported_at >= 600):
            self._report(stall, now)
        elif self.diagnosis is not None and stall is None and not movement.is_hidden:
            self.diagnosis = None
            beat = movement.clock.beat
            text = f"the run moves again, in {beat.phase} of step {beat.step}"
            self._events.add("progress", self._main.spec.name, text)

    def _call_the_roll(self, now: float) -> None:
        marks = self.plan.landmarks
        if self.movement.clock.beat.phase not in marks.start_phases | marks.end_phases:
            alive = {p.pid: marks.role_of(p.title) for p in self.sampler.processes if p.state != ZOMBIE}
            self.roll.take({pid: role for pid, role in alive.items() if role in marks.lasting}, now)

    def _lost_worker(self, now: float) -> Stall | None:
        """Ray may log why it killed a worker a minute later: wait for that."""
        stall = self.roll.stall(now)
        if stall and stall.silent_s < _REASON_S and not self._errors_since():
            return None
        return stall

    def _errors_since(self) -> dict[str, str]:
        return collect.first_errors(self._children(), self._log_sizes[0][1])

    def _report(self, stall: Stall, now: float) -> None:
        began, self._reported_at = time.monotonic(), now
        if self.plan.recorder:
            collect.trigger_flight_recorders(self.plan.recorder)
        pids = {child.spec.name: child.pid for child in self._children()}
        stacks = collect.run_stacks(pids, _DUMP_S, self.plan.native)
        there = self.plan.elsewhere(_DUMP_S, self.plan.native)
        situation = self._situation(now, stall, [*stacks, *there.stacks])
        situation = replace(situation, unseen=there.unseen)
        diagnosis = diagnose(situation, self.plan.landmarks)
        self.report = self._write(situation, diagnosis, time.monotonic() - began, "stall")
        if self.plan.recorder and self.plan.flight:
            # The ranks have dumped by now, because collecting the stacks takes longer.
            collect.keep_dumps(self.plan.recorder, self.plan.flight)
        self._events.add(
            "stall",
            diagnosis.culprit,
            diagnosis.sentence,
            pattern=diagnosis.pattern,
            advice=diagnosis.advice,
            evidence=list(diagnosis.evidence),
            phase=situation.phase,
            step=situation.step,
            silent_s=round(stall.silent_s, 1),
            limit_s=round(stall.limit_s, 1),
            collected_s=round(time.monotonic() - began, 1),
            report=str(self.report),
        )
        self.diagnosis = diagnosis

    def _situation(self, now: float, stall: Stall, stacks: list[Stack]) -> Situation:
        beat = self.movement.clock.beat
        return Situation(
            phase=beat.phase,
            step=beat.step,
            stall=stall,
            stacks=stacks,
            services=collect.service_facts([*self._services.services, *self._services.external]),
            workers=read_workers(
                self.plan.progress, now, {*self.sampler.pids, *(stack.pid for stack in stacks)}
            ),
            errors=self._errors_since(),
            flow=self.plan.flow(),
            disk_free_gb=disk_free_gb(self.plan.folder),
            killed=self.oom.named({*self._pids_then, *self.roll.missing}),
            others=largest_others(self.sampler.pids),
        )

    def _write(self, situation: Situation, diagnosis: Diagnosis, seconds: float, kind: str) -> Path:
        path = next_page(self.plan.folder / "logs", kind)
        streams = {path.name: last_line(path) for path in self.plan.streams}
        page = stall_report(situation, diagnosis, self.plan.landmarks, self.sampler.last, streams, seconds)
        try:
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            say("watchdog", f"{path} cannot be written ({error.strerror})")
        return path

    def _children(self) -> list[Child]:
        return [*self._services.services, self._main]
