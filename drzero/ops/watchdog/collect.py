"""Collects evidence for a diagnosis within seconds, without touching the run."""

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from drzero.ops.causes import first_cause
from drzero.ops.console import say
from drzero.ops.files import open_regular
from drzero.ops.notices import shown_line
from drzero.ops.process.child import Child
from drzero.ops.process.logs import looks_like_error
from drzero.ops.process.tree import STOPPED, descendants
from drzero.ops.services.external import ExternalService
from drzero.ops.services.health import Health
from drzero.ops.services.services import Service
from drzero.ops.watchdog.diagnosis import ServiceFact
from drzero.ops.watchdog.stacks import Stack, dump_stacks

STAGE = "stage"  # component name of a stage's own process, which supervises the others


def run_stacks(
    roots: Mapping[str, int], deadline_s: float, native: bool, stage: int | None = None
) -> list[Stack]:
    """Return the stacks of Python (or stopped) processes below the keepers `roots` and the pid `stage`."""
    own = [] if stage is None else [stage]
    trees = descendants([*roots.values(), *own])
    found = [(name, process) for name, root in roots.items() for process in trees[root][1:]]
    found += [(STAGE, process) for pid in own for process in trees[pid]]
    wanted = [one for one in found if one[1].is_python or one[1].state == STOPPED]
    return dump_stacks(wanted, deadline_s, native)


def service_facts(services: Iterable[Service | ExternalService]) -> list[ServiceFact]:
    """Return the health of each service."""
    facts = []
    for service in services:
        if service.monitor:
            health = service.monitor.health
        else:
            assert isinstance(service, Service)  # an external service is watched from the start
            health = Health(problem=service.probe(), silent_since=service.started)
        silent_s = time.monotonic() - health.silent_since
        name, counters = service.spec.name, dict(health.counters)
        facts.append(ServiceFact(name, service.state, health.problem, silent_s, counters))
    return facts


def first_errors(children: Sequence[Child], since: Mapping[str, int] | None = None) -> dict[str, str]:
    """Return each log's `first_error` by component, from the byte in `since` on."""
    found = {}
    for child in children:
        name = child.spec.name
        offset = max((since or {}).get(name, 0), child.log_offset)
        if (line := first_error(child.spec.log_path, offset)) is not None:
            found[name] = line
    return found


def first_error(log: Path, offset: int = 0) -> str | None:
    """Return the first line with a known cause, else the first error, from `offset` bytes on."""
    lines = error_lines(log, offset)
    return (first_cause(lines) or lines)[0] if lines else None


def error_lines(path: Path, offset: int = 0) -> list[str]:
    """Return the lines that look like errors from `offset` bytes on, at most in the last MiB."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(offset, os.fstat(file.fileno()).st_size - (1 << 20)))
        data = file.read()
        lines = [line.strip() for line in map(shown_line, data.split(b"\n")) if looks_like_error(line)]
        return lines[:200]
    return []


def trigger_flight_recorders(folder: Path) -> None:
    """Make every rank dump its Flight Recorder now, through torch's pipes in `folder`."""
    for pipe in folder.glob("*.pipe"):
        with suppress(OSError):  # its rank has gone
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1\n")
            finally:
                os.close(descriptor)


def keep_dumps(recorder: Path, kept: Path) -> None:
    """Copy the ranks' dumps into the run's folder `kept`."""
    for dump in recorder.glob("*"):
        copy = kept / dump.name
        try:
            if dump.is_file() and not (copy.exists() and copy.stat().st_mtime >= dump.stat().st_mtime):
                kept.mkdir(exist_ok=True)
                shutil.copyfile(dump, copy)
        except OSError as error:
            say("watchdog", f"{dump} cannot be copied to {kept} ({error.strerror})")
