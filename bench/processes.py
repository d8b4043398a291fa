"""Child processes under measurement: start, readiness, CPU time and memory of each, orderly stop."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_S = 300.0
STOP_S = 40.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The same for every peer: each process computes a query or batch with one thread."""


@dataclass
class Server:
    """A running server: its address and its processes, the first one listening."""

    url: str
    process: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """The listening process, then its children."""
        return [self.process, *self.process.children(recursive=True)]

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time so far of the listening process, and of its children together."""
        parent, *children = (_cpu(process) for process in self.processes())
        return parent, sum(children)


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def cpu_seconds(pid: int) -> float:
    """Return the CPU time so far of one process."""
    return _cpu(psutil.Process(pid))


def python(module: str, *args: object, **options: Any) -> "subprocess.Popen[bytes]":
    """Start `python -m module args` in a new process group, with the common environment."""
    command = [sys.executable, "-m", module, *map(str, args)]
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, start_new_session=True, **options)


@contextmanager
def server(module: str, args: Sequence[object], port: int, log: Path) -> Iterator[Server]:
    """Run a server until the body ends. Raises SystemExit with its last lines if it does not start."""
    with log.open("wb") as stream:
        process = python(module, *args, "--port", port, stdout=stream, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(process, url, log)
        yield Server(url, psutil.Process(process.pid))
    finally:
        stop(process)


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            body = json.dumps({"queries": ["warm up"], "topk": 3, "return_scores": True}).encode()
            request = urllib.request.Request(f"{url}/retrieve", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    lines = log.read_text(errors="replace").splitlines()[-15:]
    raise SystemExit("\n".join([f"error: no server at {url} (exit code {process.poll()}):", *lines]))


def stop(process: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, then SIGKILL to the whole group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
