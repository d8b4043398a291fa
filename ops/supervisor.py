"""Run the main command of a run while its services live, and say whose fault it is when something ends."""

from __future__ import annotations

import os
import time

from ops.causes import first_cause
from ops.collect import error_lines
from ops.events import OUT_OF_TIME
from ops.logs import say
from ops.process import Child, ChildError, Command, describe_exit
from ops.services import ServiceGroup
from ops.watchdog import Watchdog, WatchPlan

_POLL_S = 0.25
_BLAME_S = 1.0  # a service whose end made the command fail may take a moment to be seen as ended


class ChildFailed(ChildError):
    """The main command ended with an error of its own."""


class Unfinished(ChildError):
    """The main command stopped by itself before its work was done (exit code 75, EX_TEMPFAIL): no failure."""


class NothingDone(ChildError):
    """The main command ended without an error and without having begun."""


class Stalled(ChildError):
    """The main command stood still and was stopped; the message names the culprit."""


def run_supervised(
    main: Command, services: ServiceGroup, grace_s: float = 15.0, plan: WatchPlan | None = None
) -> int:
    """Run `main` to its end inside an entered `services` group and return its exit code, 0.

    Whatever ends this function (success, failure, Ctrl-C, SIGTERM), the command's whole process tree is gone
    after it, `grace_s` seconds after SIGTERM at the latest. The services are left to their group. With a
    `plan` the run is watched for stalls (`ops.watchdog`).

    Raises:
        ServiceDied: a service ended first; the command was stopped, as its results could not be trusted.
        ServiceHung: a service stopped working, and its policy allows no restart (any more).
        Unfinished: the command ended with EX_TEMPFAIL, 75: run again it goes on.
        ChildFailed: the command ended with any other code than 0 while all services lived.
        NothingDone: it ended with 0 before it had begun, where the plan says that it must.
        Stalled: it stood still, and the plan's policy is not to only report that.
    """
    events = services.events
    say(main.name, f"starting, log: {main.log_path}")
    child = Child(main, grace_s)
    events.add("start", main.name, "starting", log=str(main.log_path), offset=child.log_offset)
    watchdog = Watchdog(plan, services, child, events) if plan else None
    own_cpu_s = time.process_time()
    try:
        return _until_its_end(child, services, watchdog)
    except BaseException as error:
        from_outside = isinstance(error, KeyboardInterrupt | SystemExit)
        events.add("end", main.name, _told(error), **({"from_outside": True} if from_outside else {}))
        raise
    finally:
        if watchdog:
            watchdog.close()
            spent = time.process_time() - own_cpu_s
            events.add("cost", "supervision", f"{spent:.2f} CPU seconds", cpu_s=round(spent, 2))
        child.stop()


def _told(error: BaseException) -> str:
    """What ended it, in a line."""
    if isinstance(error, KeyboardInterrupt):
        return "ended from outside: Ctrl-C"
    if isinstance(error, SystemExit):
        return (
            f"ended from outside: {describe_exit(error.code) if isinstance(error.code, int) else error.code}"
        )
    return str(error).partition("\n")[0] or type(error).__name__


def _until_its_end(child: Child, services: ServiceGroup, watchdog: Watchdog | None) -> int:
    while True:
        code = child.poll()
        if code == 0:
            return _ended_well(child, services, watchdog)
        services.check()  # first: a command that fails because its service died is not the cause
        if code is not None:
            time.sleep(_BLAME_S)
            services.check()
            if code == os.EX_TEMPFAIL:
                told = f"{child.spec.name!r} stopped before its work was done; run again it goes on"
                services.events.add(OUT_OF_TIME, child.spec.name, told)
                raise Unfinished(told, child)
            raise _failed(child, code, services, watchdog)
        if watchdog:
            watchdog.tell_if_stuck()
        if watchdog and watchdog.plan.policy != "report" and (verdict := watchdog.verdict):
            raise Stalled(
                f"the run stood still and was stopped: {verdict.sentence}. Culprit: {verdict.culprit}. "
                f"{verdict.advice}. Report: {watchdog.report}",
                child,
            )
        time.sleep(_POLL_S)


def _ended_well(child: Child, services: ServiceGroup, watchdog: Watchdog | None) -> int:
    services.events.add("exit", child.spec.name, "ended without an error", code=0)
    if watchdog and watchdog.plan.must_begin:
        watchdog.clock.read()
        marks = watchdog.plan.landmarks
        if watchdog.clock.entered <= marks.start_phases | marks.end_phases:
            raise NothingDone(
                f"{child.spec.name!r} ended without an error and without a single step: its data may be "
                "empty, its last step already behind it, or an exception was swallowed on the way",
                child,
            )
    return 0


def _failed(child: Child, code: int, services: ServiceGroup, watchdog: Watchdog | None) -> ChildFailed:
    """The error of a main command that failed by itself, with the cause that its log shows."""
    told = f"{child.spec.name!r} failed: {describe_exit(code)}{_kernel_says(code, watchdog)}"
    known = watchdog.plan.landmarks.causes if watchdog else ()
    blamed: dict[str, str] = {}
    if found := first_cause(error_lines(child.spec.log_path, child.log_offset), known):
        _, cause = found
        blamed = {"pattern": cause.name, "culprit": cause.culprit or child.spec.name, "advice": cause.advice}
        told += f"\ncause: {cause.name} (culprit: {blamed['culprit']}): {cause.advice}"
    event = told.replace("\n", "; ")
    services.events.add("exit", child.spec.name, event, code=code, first_error=child.first_error, **blamed)
    return ChildFailed(told, child)


def _kernel_says(code: int, watchdog: Watchdog | None) -> str:
    if watchdog is None or code not in (-9, 137):
        return ""
    pids = {process.pid for tree in watchdog.sampler.processes.values() for process in tree}
    why = watchdog.oom.explain(pids)
    return f": {why}" if why else ""
