"""Runs a small run with a fault under the real supervision and reports who was blamed, and when."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from drzero.ops.process.child import ChildError, Command
from drzero.ops.process.logs import EventLog
from drzero.ops.process.ports import reserve_port
from drzero.ops.records import EVENTS_FILE, SAMPLES_FILE, read_json_lines
from drzero.ops.services.health import HealthCheck
from drzero.ops.services.services import ServiceGroup, ServiceSpec
from drzero.ops.supervisor import run_supervised
from drzero.ops.watchdog.diagnosis import Landmarks
from drzero.ops.watchdog.movement import Patience
from drzero.ops.watchdog.watchdog import WatchPlan
from drzero.stages.watch import CAUSES

HERE = Path(__file__).resolve().parent
LIMITS = Patience(cold_start_s=8, floor_s=8, factor=2, fixed={"start-up": 60, "done": 8})
"""Short, so that a scenario takes seconds. Goals count the time after them."""

LONGEST_S = 150
"""A scenario without a diagnosis by then has failed."""

LANDMARKS = Landmarks(
    batch_wait=(("wait_for_batch", "driver.py"),),
    waits_on={"buffer": ("rollout",), "rollout": ("search", "completion")},
    answered_by={"search": "retrieval", "completion": "solver", "rollout": "rollout workers"},
    tools=frozenset({"search"}),
    roles=((r"fault: rollout worker", "rollout worker"), (r"fault: rank", "rank")),
    causes=CAUSES,
)


@dataclass
class Outcome:
    """The outcome of a scenario."""

    verdict: str = "none"
    culprit: str = "none"
    sentence: str = ""
    seconds: float = 0.0
    """From the fault to the diagnosis."""
    after_limit: float | None = None
    """The part after the phase's limit, if there was one."""
    ended: str = ""
    """How the run ended."""
    left: list[str] = field(default_factory=list)
    """Processes, ports and temporary files that should not be there."""
    supervision_cpu_s: float = 0.0
    run_cpu_s: float = 0.0

    @property
    def overhead(self):
        """CPU seconds of the supervision divided by the run's."""
        return self.supervision_cpu_s / self.run_cpu_s if self.run_cpu_s else 0.0


def retrieval_service(folder, corpus, fault="", restarts=0):
    """The real retrieval server over a tiny collection."""
    port = reserve_port(None)
    arguments = (
        *("--chroma-path", str(corpus / "chromadb"), "--collection", "corpus"),
        *("--embedder", "packaged-minilm", "--device", "cpu", "--port", str(port)),
    )
    work = ("retrieval_index_seconds_count", "retrieval_cache_hits_total")
    return _service("retrieval", folder, port, "search.server", arguments, work, fault, restarts)


def solver_service(folder, model, fault="", restarts=0):
    """The real reference engine's server with a tiny model."""
    port = reserve_port(None)
    arguments = ("--model", str(model), "--port", str(port), "--max-seq-len", "256")
    work = ("engine_generated_tokens_total",)
    return _service("solver", folder, port, "verl_ext.engine.api_server", arguments, work, fault, restarts)


def _service(name, folder, port, module, arguments, work, fault, restarts):
    url = f"http://127.0.0.1:{port}"
    start = (str(HERE / "service.py"), fault, module) if fault else ("-m", module)
    return ServiceSpec(
        name=name,
        command=(sys.executable, *start, *arguments),
        log_path=folder / "logs" / f"{name}.log",
        health_url=f"{url}/health",
        liveness=HealthCheck(url=f"{url}/health", metrics_url=f"{url}/metrics", work=work),
        startup_budget_s=300,
        restarts=restarts,
    )


def address(spec):
    return spec.health_url.removesuffix("/health")


def run_with_fault(folder, script, arguments, services=(), strike=None, strike_step=2, limits=LIMITS):
    """Run `script` under the supervision until it ends or the fault is reported, and clean up.

    A thread calls `strike` once, when the driver has reached the rollout of `strike_step`. The driver records
    its own faults when they begin.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    command = (sys.executable, str(HERE / script), "--folder", str(folder), *arguments)
    env = {"DRZERO_PROGRESS_DIR": str(folder / "progress"), "PYTHONUNBUFFERED": "1"}
    main = Command(name="trainer", command=command, log_path=folder / "logs" / "trainer.log", env=env)
    plan = WatchPlan(
        folder=folder,
        heartbeats=folder / "heartbeats.jsonl",
        progress=folder / "progress",
        patience=limits,
        counted_phases=frozenset({"rollout"}),
        landmarks=LANDMARKS,
    )
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    outcome, ended, enough = Outcome(), threading.Event(), threading.Event()
    try:
        events = EventLog(folder / "logs" / EVENTS_FILE)
        with ServiceGroup(services, grace_s=3, events=events) as group:
            helper = threading.Thread(
                target=_attend, args=(folder, group, strike, strike_step, enough, ended), daemon=True
            )
            helper.start()
            outcome.ended = f"exit {run_supervised(main, group, grace_s=3, plan=plan)}"
    except ChildError as error:
        outcome.ended = type(error).__name__
        outcome.sentence = str(error).partition("\n")[0]
    except SystemExit:
        if not enough.is_set():  # not sent by this scenario
            raise
        outcome.ended = "stopped after the diagnosis"
    finally:
        ended.set()
    judge(outcome, folder)
    _find_leftovers(outcome, folder, services, before)
    return outcome


def _attend(folder, group, strike, strike_step, enough, ended):
    """Strike when it is time, and end the run once its stall is diagnosed."""
    deadline = time.monotonic() + LONGEST_S
    while not ended.wait(0.1):
        if strike and any(
            (beat["step"], beat["phase"]) == (strike_step, "rollout")
            for beat in read_json_lines(folder / "heartbeats.jsonl")
        ):
            (folder / "fault.json").write_text(json.dumps({"time": time.time()}))
            strike(group)
            strike = None
        stalls = [event for event in _events(folder) if event["kind"] == "stall"]
        if stalls or time.monotonic() > deadline:
            enough.set()
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _events(folder):
    return read_json_lines(folder / "logs" / "events.jsonl")


def judge(outcome, folder):
    """Find the first event that names a culprit, its time, and the cost of the supervision."""
    last = {sample["component"]: sample for sample in read_json_lines(folder / SAMPLES_FILE)}
    outcome.run_cpu_s = sum(sample.get("cpu_s", 0.0) for sample in last.values())
    outcome.supervision_cpu_s = sum(event["cpu_s"] for event in _events(folder) if event["kind"] == "cost")
    fault = folder / "fault.json"
    struck = json.loads(fault.read_text())["time"] if fault.exists() else None
    for event in _events(folder):
        if event["kind"] not in ("stall", "hung", "crash", "exit") or event.get("code") == 0:
            continue
        outcome.verdict = event.get("pattern") or event["kind"]
        outcome.culprit = event.get("culprit") or event["component"]
        outcome.sentence = event["text"]
        if struck:
            outcome.seconds = event["time"] - struck
            if event["kind"] == "stall":
                outcome.after_limit = event["silent_s"] - event["limit_s"] + event["collected_s"]
        return
    for event in _events(folder):
        if event["kind"] == "end" and struck and outcome.ended == "NothingDone":
            outcome.verdict, outcome.culprit = "ended without a step", "trainer"
            outcome.seconds = event["time"] - struck


def _find_leftovers(outcome, folder, services, before):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
        strangers = [p for p in psutil.process_iter(["cmdline"]) if _is_of(p, folder)]
        if not left and not strangers:
            break
        time.sleep(0.2)
    outcome.left += [f"process {process.pid}" for process in {*left, *strangers}]
    for spec in services:
        host, port = address(spec).removeprefix("http://").split(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                outcome.left.append(f"port {port}")
    outcome.left += [str(path) for pattern in ("*.tmp", "*.partial") for path in folder.rglob(pattern)]


def _is_of(process, folder):
    return str(folder) in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()


def server_of(group, name):
    """The process of a service itself, below its keeper."""
    service = next(service for service in group.services if service.spec.name == name)
    return psutil.Process(service.pid).children()[0]


class SilentServer:
    """Accepts every connection and never answers."""

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._taken = []
        threading.Thread(target=self._accept, daemon=True).start()
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/retrieve"

    def __exit__(self, *_):
        self._listener.close()
        for connection in self._taken:
            connection.close()

    def _accept(self):
        while True:
            try:
                self._taken.append(self._listener.accept()[0])
            except OSError:
                return
