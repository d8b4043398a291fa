"""Injects faults into real processes and checks that the supervision names the culprit in time.

    python tests/chaos_ops.py                    # every scenario: `make chaos-ops`
    python tests/chaos_ops.py rank solver        # scenarios whose names contain one of the words
    python tests/chaos_ops.py '!challenger'      # all others

Most scenarios are a small run of real parts (tests/faults): the retrieval server, the reference engine's
server with a tiny model, a driver with heartbeats and a rollout worker, gloo ranks. Two are the challenger
itself. Phases have shorter limits than usual, and a stall's goal counts the time after its limit. No process,
port or temporary file may be left. The suite runs a short form (tests/ops/test_ops_faults.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import psutil
from faults.arrangement import (
    LIMITS,
    Outcome,
    SilentServer,
    address,
    judge,
    retrieval_service,
    run_with_fault,
    server_of,
    solver_service,
)
from rich.console import Console
from rich.table import Table

from drzero.ops.records import read_json_lines
from drzero.ops.services.services import ServiceGroup, ServiceSpec
from drzero.ops.watchdog.movement import Patience

DEAD_S, HUNG_S, SILENT_S = 5.0, 20.0, 60.0
"""Goals: a dead process, a hung service, no progress after its limit."""


class World:
    """A tiny corpus and models that scenarios share, made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def model(self) -> Path:
        from tiny_model import save_tiny_model

        return save_tiny_model(self.folder / "tiny")

    @cached_property
    def speaking_model(self) -> Path:
        from tiny_model import save_speaking_model

        return save_speaking_model(self.folder / "speaking")

    @cached_property
    def corpus(self) -> Path:
        from conftest import make_prepared

        return make_prepared(self.folder / "corpus", self.model).corpus


Play = Callable[[World, Path], Outcome]


@dataclass(frozen=True)
class Scenario:
    """A fault, and the expected diagnosis, culprit and time."""

    name: str
    play: Play
    verdict: str
    culprit: str = ""
    """A part of the name."""
    goal_s: float | None = None
    ended: str = ""
    """How the run must end, where that matters."""

    def problems(self, outcome: Outcome) -> list[str]:
        """Compare the outcome with the expectation."""
        taken = outcome.seconds if outcome.after_limit is None else outcome.after_limit
        found = [f"left: {left}" for left in outcome.left]
        if outcome.verdict != self.verdict:
            found.append(f"verdict {outcome.verdict!r}, not {self.verdict!r}")
        if self.culprit not in outcome.culprit:
            found.append(f"culprit {outcome.culprit!r}, not {self.culprit!r}")
        if self.goal_s is not None and taken > self.goal_s:
            found.append(f"{taken:.1f} s, not {self.goal_s:g}")
        if self.ended and self.ended != outcome.ended:
            found.append(f"ended with {outcome.ended!r}, not {self.ended!r}")
        return found


# Small runs -------------------------------------------------------------------------------------------------


def driver(fault: str, *arguments: str) -> Play:
    """A fault of the driver's own, with no service."""
    return lambda world, folder: run_with_fault(folder, "driver.py", ["--fault", fault, *arguments])


def ranks(fault: str, start_s: float = 25.0) -> Play:
    """A fault among two gloo ranks, whose start may be silent for this long."""
    limits = replace(LIMITS, fixed={"start-up": start_s})
    return lambda world, folder: run_with_fault(folder, "ranks.py", ["--fault", fault], limits=limits)


def with_retrieval(signum: signal.Signals, fault: str = "", restarts: int = 0) -> Play:
    """The real retrieval server, which gets a signal in the second step."""
    return _with_service(
        "retrieval", signum, lambda world, folder: retrieval_service(folder, world.corpus, fault, restarts)
    )


def with_solver(signum: signal.Signals, fault: str = "") -> Play:
    """The reference engine's server, which gets a signal in the second step."""
    return _with_service("solver", signum, lambda world, folder: solver_service(folder, world.model, fault))


def _with_service(name: str, signum: signal.Signals, made: Callable[[World, Path], ServiceSpec]) -> Play:
    def play(world: World, folder: Path) -> Outcome:
        service = made(world, folder)
        arguments = [f"--{name}", address(service), "--pause", "2"]
        # The limit is far: a dead or hung service must be known long before.
        limits = replace(LIMITS, cold_start_s=90, floor_s=90)
        return run_with_fault(folder, "driver.py", arguments, [service], _sender(name, signum), limits=limits)

    return play


def _sender(name: str, signum: signal.Signals) -> Callable[[ServiceGroup], None]:
    return lambda group: server_of(group, name).send_signal(signum)


def silent_tool(world: World, folder: Path) -> Outcome:
    """A tool server that accepts and never answers, called without a deadline."""
    with SilentServer() as url:
        return run_with_fault(folder, "driver.py", ["--fault", "no-deadline", "--silent", url])


def full_disk(world: World, folder: Path) -> Outcome:
    """A checkpoint on a tmpfs that is too small for it."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, b"size=2m"):
        raise Skipped(f"mounting a tmpfs is refused: {os.strerror(ctypes.get_errno())}")
    try:
        return run_with_fault(folder, "driver.py", ["--fault", "disk-full", "--disk", str(disk)])
    finally:
        libc.umount(str(disk).encode())


def undisturbed(world: World, folder: Path) -> Outcome:
    """Both real services and a driver that works: no alarm, and the cost of watching."""
    services = [retrieval_service(folder, world.corpus), solver_service(folder, world.model)]
    urls = ["--retrieval", address(services[0]), "--solver", address(services[1])]
    arguments = [*urls, "--steps", "6", "--work", "40000000"]
    return run_with_fault(folder, "driver.py", arguments, services, limits=Patience())


class Skipped(Exception):
    """The machine does not allow the scenario."""


# The challenger itself --------------------------------------------------------------------------------------


def challenger(strike: Callable[[psutil.Process], None] | None, *overrides: str) -> Play:
    """The real stage with a tiny model. `strike` gets its process in the rollout of step 1."""

    def play(world: World, folder: Path) -> Outcome:
        run = folder / "tiny"
        arguments = [
            *("hardware=cpu", "model=demo-policy", f"base_model={world.speaking_model}"),
            "hop_ratio=[4,3,2,1]",  # of the world's prompts
            *(f"paths.corpus={world.corpus}", f"paths.checkpoints={folder}", "run.name=tiny"),
            *("trainer.total_training_steps=2", "data.train_batch_size=4", *overrides),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "drzero.cli", "challenger", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).resolve().parent.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            watched = psutil.Process(process.pid)
            seen: set[psutil.Process] = set()
            struck = strike is None
            while process.poll() is None:
                seen.update(watched.children(recursive=True))
                if not struck and _is_in_rollout(run):
                    (run / "fault.json").write_text(f'{{"time": {time.time()}}}')
                    strike(watched)  # type: ignore[misc]
                    struck = True
                time.sleep(0.5)
        outcome = Outcome(ended=f"exit {process.returncode}")
        judge(outcome, run)
        outcome.left = [f"process {p.pid}" for p in seen if p.is_running() and p.status() != "zombie"]
        return outcome

    return play


def _is_in_rollout(run: Path) -> bool:
    return any(beat["phase"] == "rollout" for beat in read_json_lines(run / "heartbeats.jsonl"))


def kill_retrieval(stage: psutil.Process) -> None:
    """SIGKILL to the challenger's retrieval server."""
    _titled(stage, "drzero: retrieval").kill()


def stop_rollout_worker(stage: psutil.Process) -> None:
    """SIGSTOP to the process that plays the rollouts."""
    _titled(stage, "ray::AgentLoopWorker").suspend()


def _titled(stage: psutil.Process, title: str) -> psutil.Process:
    """The process of that title below the stage's own, never another run's."""
    return next(p for p in stage.children(recursive=True) if title in " ".join(p.cmdline()))


SCENARIOS = (
    Scenario("retrieval killed", with_retrieval(signal.SIGKILL), "crash", "retrieval", DEAD_S, "ServiceDied"),
    Scenario(
        "retrieval killed, restarted",
        with_retrieval(signal.SIGKILL, restarts=2),
        *("crash", "retrieval", DEAD_S, "exit 0"),
    ),
    Scenario("retrieval stopped (SIGSTOP)", with_retrieval(signal.SIGSTOP), *("hung", "retrieval", HUNG_S)),
    Scenario(
        "retrieval answers garbage",
        with_retrieval(signal.SIGUSR1, "garbage"),
        *("retrieval answers garbage", "retrieval", DEAD_S, "ChildFailed"),
    ),
    Scenario(
        "solver's event loop blocked",
        with_solver(signal.SIGUSR1, "block-loop"),
        *("hung", "solver", HUNG_S, "ServiceHung"),
    ),
    Scenario("solver answers 500", with_solver(signal.SIGUSR1, "errors"), "hung", "solver", HUNG_S),
    Scenario(
        "rollout worker killed", driver("kill-worker"), "rollout starvation", "rollout workers", SILENT_S
    ),
    Scenario("rollout worker stopped", driver("stop-worker"), "stopped process", "rollout worker", SILENT_S),
    Scenario(
        "rollout worker's loop blocked",
        driver("block-loop"),
        "event loop blocked",
        "rollout worker",
        SILENT_S,
    ),
    Scenario("tool never answers", silent_tool, "tool call without deadline", "retrieval", SILENT_S),
    Scenario("exception on one rank", ranks("exception"), "exception on some ranks", "rank 1", SILENT_S),
    Scenario("mismatched collective", ranks("mismatch"), "mismatched collectives", "rank 1", SILENT_S),
    Scenario(
        "network between ranks silent", ranks("silence"), *("same-collective time-out", "all ranks", SILENT_S)
    ),
    Scenario(
        "pipeline stages of other shapes",
        # What torch needs for pipelines takes long to import.
        ranks("shapes", start_s=120.0),
        *("shape mismatch between pipeline stages", "rank 0, rank 1", SILENT_S),
    ),
    Scenario("ranks' clean-up deadlock", ranks("clean-up"), "clean-up deadlock", "rank 1", SILENT_S),
    Scenario("initialisation deadlock", ranks("init"), "initialisation deadlock", "rank 1", SILENT_S),
    Scenario(
        "driver's clean-up deadlock",
        driver("clean-up", "--fault-step", "3"),
        *("clean-up deadlock", "trainer", SILENT_S),
    ),
    Scenario("data loader sleeps", driver("data-loader"), "data loader stuck", "data loader", SILENT_S),
    Scenario("disk full", full_disk, "disk full", "trainer", DEAD_S, "ChildFailed"),
    Scenario("out of memory", driver("memory"), "out of memory", "trainer", DEAD_S, "ChildFailed"),
    Scenario("ends after 0 steps", driver("no-steps"), "ended without a step", "trainer", DEAD_S),
    Scenario("slow start", driver("slow-start", "--slow-s", "20"), "none", ended="exit 0"),
    Scenario("undisturbed", undisturbed, "none", ended="exit 0"),
    Scenario(
        "challenger: retrieval killed, restarted",
        challenger(kill_retrieval),
        *("crash", "retrieval", DEAD_S, "exit 0"),
    ),
    Scenario(
        "challenger: rollout worker stopped",
        challenger(
            stop_rollout_worker, "watchdog.policy=stop", "watchdog.cold_start_s=20", "watchdog.floor_s=20"
        ),
        *("stopped process", "rollout worker", SILENT_S, "exit 1"),
    ),
    Scenario("challenger: undisturbed", challenger(None), "none", ended="exit 0"),
)


def play_all(scenarios: list[Scenario], world: World) -> list[tuple[Scenario, Outcome | None, list[str]]]:
    """Play each scenario in a separate folder. The outcome is None if the machine does not allow it."""
    played = []
    for number, scenario in enumerate(scenarios):
        print(f"--- {scenario.name}", flush=True)
        try:
            outcome = scenario.play(world, world.folder / f"scenario_{number}")
            played.append((scenario, outcome, scenario.problems(outcome)))
        except Skipped as reason:
            played.append((scenario, None, [f"skipped: {reason}"]))
    return played


def idle_cost(world: World, seconds: float = 30) -> dict[str, float]:
    """Return the CPU seconds per second of each idle service, nearly all for answering probes."""
    folder = world.folder / "idle"
    services = [retrieval_service(folder, world.corpus), solver_service(folder, world.model)]
    with ServiceGroup(services) as group:
        before = [service.cpu_time().used_s for service in group.services]
        time.sleep(seconds)
        spent = [service.cpu_time().used_s - b for service, b in zip(group.services, before, strict=True)]
    return {spec.name: s / seconds for spec, s in zip(services, spent, strict=True)}


def is_chosen(name: str, words: list[str]) -> bool:
    """Whether a name contains one of the words, if any, and no word that follows a `!`."""
    wanted = [word for word in words if not word.startswith("!")]
    unwanted = [word[1:] for word in words if word.startswith("!")]
    is_wanted = not wanted or any(word in name for word in wanted)
    return is_wanted and not any(word in name for word in unwanted)


def main() -> int:
    """Play the scenarios that the arguments choose, and print a table."""
    words = sys.argv[1:]
    chosen = [scenario for scenario in SCENARIOS if is_chosen(scenario.name, words)]
    with tempfile.TemporaryDirectory(prefix="chaos_ops_") as place:
        world = World(Path(place))
        played = play_all(chosen, world)
        idle = {} if words else idle_cost(world)
    table = Table("scenario", "verdict", "culprit", "s", "after limit", "run", "overhead", "")
    for scenario, outcome, found in played:
        if outcome is None:
            table.add_row(scenario.name, "", "", "", "", "", "", found[0])
            continue
        after = "" if outcome.after_limit is None else f"{outcome.after_limit:.1f}"
        table.add_row(
            *(
                scenario.name,
                outcome.verdict,
                outcome.culprit,
                f"{outcome.seconds:.1f}",
                after,
                outcome.ended,
            ),
            # For a stalled run it would mean nothing.
            f"{outcome.overhead:.2%}" if "undisturbed" in scenario.name else "",
            "; ".join(found) or "as expected",
        )
    console = Console(width=160)
    console.print(table)
    for name, share in idle.items():
        console.print(f"idle {name}, probed: {share:.2%} of a core")
    wrong = sum(bool(found) for _, outcome, found in played if outcome)
    console.print(f"{len(played)} scenarios, {wrong} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
