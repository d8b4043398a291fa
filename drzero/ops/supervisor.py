"""Runs the main command of a run next to its services, and names the culprit when something ends."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from drzero.ops.causes import Cause, first_cause, named
from drzero.ops.cluster.watch import NOTICED_S, NodeLost, NodeWatch
from drzero.ops.process.child import Child, ChildError, Command, describe_exit
from drzero.ops.process.logs import EventLog
from drzero.ops.records import OUT_OF_TIME
from drzero.ops.resources.others import largest_others
from drzero.ops.services.services import ServiceGroup
from drzero.ops.watchdog.collect import error_lines
from drzero.ops.watchdog.diagnosis import FINAL
from drzero.ops.watchdog.watchdog import Watchdog, WatchPlan


class Ended(ChildError):
    """The main command ended without success. `pattern` names the known cause, if any."""

    def __init__(self, message: str, failed: Child, pattern: str = "") -> None:
        super().__init__(message, failed)
        self.pattern = pattern


class ChildFailed(Ended):
    """The main command failed by itself."""


class Unfinished(ChildError):
    """The main command stopped early on purpose (exit code 75, EX_TEMPFAIL). This is no failure."""


class NothingDone(ChildError):
    """The main command exited without an error before it began any work."""


class Stalled(Ended):
    """The main command stalled and was stopped. The message names the culprit."""


def run_supervised(
    main: Command,
    services: ServiceGroup,
    grace_s: float = 15.0,
    plan: WatchPlan | None = None,
    nodes: NodeWatch | None = None,
) -> int:
    """Run `main` to its end inside an entered `services` group and return 0. Its process tree then has ended.

    Raises Unfinished, ChildFailed, NothingDone (if a phase must begin), Stalled (if the stall action is
    `report` only for a lost worker), and the errors of `ServiceGroup.check` and `NodeWatch.check`.
    """
    events = services.events
    child = Child(main, grace_s)
    events.add("start", main.name, "starting", log=str(main.log_path), offset=child.log_offset)
    watchdog = Watchdog(plan, services, child, events) if plan else None
    own_cpu_s = time.process_time()
    try:
        return _until_its_end(child, services, watchdog, nodes)
    except NodeLost as lost:
        events.add("end", main.name, lost.text, culprit=lost.culprit, advice=lost.advice)
        raise
    except BaseException as error:
        from_outside = {"from_outside": True} if isinstance(error, KeyboardInterrupt | SystemExit) else {}
        events.add("end", main.name, _how_it_ended(error), **from_outside)
        raise
    finally:
        if watchdog:
            watchdog.close()
            spent = time.process_time() - own_cpu_s
            events.add("cost", "supervision", f"{spent:.2f} CPU seconds", cpu_s=round(spent, 2))
        child.stop()


@contextmanager
def ending(events: EventLog, component: str, well: str) -> Iterator[None]:
    """Record for the post-mortem how work in this process ends: `well`, or the exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        events.add("end", component, _how_it_ended(error), from_outside=True)
        raise
    except BaseException as error:
        said = " ".join(str(error).split()) or type(error).__name__
        events.add("end", component, said, advice="read the console: it has no log of its own")
        raise
    events.add("exit", component, well, code=0)


def _how_it_ended(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "ended from outside: Ctrl-C"
    if isinstance(error, SystemExit):
        code = error.code
        return f"ended from outside: {describe_exit(code) if isinstance(code, int) else code}"
    return str(error).partition("\n")[0] or type(error).__name__


def _until_its_end(
    child: Child, services: ServiceGroup, watchdog: Watchdog | None, nodes: NodeWatch | None
) -> int:
    while True:
        code = child.poll()
        if code == 0:
            _end_well(child, services, watchdog)
            return 0
        services.check()  # before the command, which may have failed because a service died
        if nodes:
            nodes.check()
        if code is not None:
            time.sleep(1.0)  # a dead service may only be noticed a moment later
            services.check()
            if code == os.EX_TEMPFAIL:
                text = f"{child.spec.name!r} stopped before its work was done; a rerun resumes it"
                services.events.add(OUT_OF_TIME, child.spec.name, text)
                raise Unfinished(text, child)
            if nodes:
                nodes.check(NOTICED_S)
            raise _failed(child, code, services, watchdog)
        if watchdog:
            watchdog.warn_if_stuck()
        found = watchdog.diagnosis if watchdog else None
        if watchdog and found and (watchdog.plan.stall_action != "report" or found.pattern in FINAL):
            raise Stalled(
                f"the run stalled and was stopped: {found.sentence}. Culprit: {found.culprit}. "
                f"{found.advice[:1].upper()}{found.advice[1:]}. Report: {watchdog.report}",
                child,
                found.pattern,
            )
        time.sleep(0.25)


def _end_well(child: Child, services: ServiceGroup, watchdog: Watchdog | None) -> None:
    name = child.spec.name
    services.events.add("exit", name, "ended without an error", code=0)
    if watchdog and watchdog.plan.must_begin and not watchdog.has_begun():
        raise NothingDone(
            f"{name!r} ended without an error and without a single step: its data may be empty, "
            "it may already have reached its last step, or it swallowed an exception",
            child,
        )


def _failed(child: Child, code: int, services: ServiceGroup, watchdog: Watchdog | None) -> ChildFailed:
    ended = describe_exit(code)
    known: tuple[Cause, ...] = ()
    if watchdog:
        ended = watchdog.oom.describe_exit(code, watchdog.sampler.pids)
        known = watchdog.plan.landmarks.causes
    text = f"{child.spec.name!r} failed: {ended}"
    blamed: dict[str, str] = {}
    if found := first_cause([*error_lines(child.spec.log_path, child.log_offset), ended], known):
        _, cause = found
        blamed = {"pattern": cause.name, "culprit": cause.culprit or child.spec.name, "advice": cause.advice}
        name = named(cause, largest_others(watchdog.sampler.pids if watchdog else ()))
        text += f"\ncause: {name} (culprit: {blamed['culprit']})"
    event = text.replace("\n", "; ")
    services.events.add("exit", child.spec.name, event, code=code, first_error=child.first_error, **blamed)
    said = ": ".join(filter(None, [text, blamed.get("advice")]))
    return ChildFailed(said, child, blamed.get("pattern", ""))
