"""A small run for faults: a driver with heartbeats, and a rollout worker.

The worker plays rollouts on an event loop, with real searches and completions if given URLs. The driver waits
for them as veRL's does for its replay buffer. `--fault` strikes in step `--fault-step` and writes its time to
`fault.json`.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue

import httpx
from setproctitle import setproctitle

from drzero.ops.telemetry import Heartbeat, waiting
from search.client import SearchClient

ROLLOUTS = 4


def strike(options):
    """Record that the fault begins now."""
    target = options.folder / "fault.json"
    target.write_text(json.dumps({"time": time.time()}))


def is_struck(options, step, *faults):
    if options.fault in faults and step == options.fault_step:
        strike(options)
        return True
    return False


# The worker -------------------------------------------------------------------------------------------------


async def rollout(options, step, search, http):
    with waiting("rollout"):
        if is_struck(options, step, "block-loop"):
            tokenize_everything()
        if is_struck(options, step, "no-deadline"):
            with waiting("search"):
                await http.post(options.silent, json={}, timeout=None)
        if options.retrieval:
            with waiting("search", 20):
                await search.retrieve([f"who lives in town {step}"])
        if options.solver:
            with waiting("completion", 60):
                await complete(f"{options.solver}/v1/completions", http)
        await asyncio.sleep(0.2)


async def complete(url, http):
    """One completion, retried while the server fails, within a deadline."""
    async with asyncio.timeout(60):
        body = {"prompt": "Who came?", "max_tokens": 8}
        while (await http.post(url, json=body, timeout=60)).status_code != 200:
            await asyncio.sleep(0.5)


def tokenize_everything():
    """A call that never returns, in a coroutine."""
    time.sleep(100_000)


async def work(options):
    search = SearchClient(options.retrieval or "http://127.0.0.1:9", deadline_s=20)
    async with httpx.AsyncClient(trust_env=False) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            step = int(line)
            played = [rollout(options, step, search, http) for _ in range(ROLLOUTS)]
            for one in asyncio.as_completed(played):
                await one
                print("finished", flush=True)


# The driver -------------------------------------------------------------------------------------------------


class Sleepy:
    """A data set whose file does not answer."""

    def __init__(self, options):
        self.options = options

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index >= 2 and self.options.fault == "data-loader":
            if index == 2:
                strike(self.options)
            read_row()
        return index


def read_row():
    time.sleep(100_000)


class Worker:
    """The worker process and its finished rollouts."""

    def __init__(self):
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.finished = SimpleQueue()
        threading.Thread(target=self._read, name="results", daemon=True).start()

    def ask(self, step):
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def _read(self):
        for line in self.process.stdout:
            self.finished.put(line)


def wait_for_batch(worker, patient):
    """Like veRL's replay buffer: poll until the batch is complete."""
    missing = ROLLOUTS
    while missing:
        try:
            worker.finished.get_nowait()
            missing -= 1
        except Empty:
            if not patient and worker.process.poll() is not None:
                raise RuntimeError("TooManyFailures: the rollouts of the step failed") from None
            time.sleep(0.1)


def start(options, beat):
    beat.beat(0, "start-up")
    if options.fault == "slow-start":
        strike(options)
        time.sleep(options.slow_s)
    batches = iter(range(1000))
    if options.fault == "data-loader":
        from torch.utils.data import DataLoader

        batches = iter(DataLoader(Sleepy(options), batch_size=1))
    return Worker(), batches


def train(options):
    beat = Heartbeat(options.folder / "heartbeats.jsonl")
    if options.fault == "no-steps":
        beat.beat(0, "start-up")
        strike(options)
        return
    worker, batches = start(options, beat)
    for step in range(1, options.steps + 1):
        next(batches)
        beat.beat(step, "rollout")
        if step == options.fault_step:
            time.sleep(options.pause)  # time for a fault from outside
        worker.ask(step)
        if is_struck(options, step, "kill-worker"):
            worker.process.kill()
        if is_struck(options, step, "stop-worker"):
            worker.process.send_signal(19)
        wait_for_batch(worker, patient=options.fault in ("kill-worker", "stop-worker"))
        beat.beat(step, "update")
        update(options, step)
        print(f"step {step} done", flush=True)
    worker.process.stdin.close()
    beat.beat(options.steps, "done")
    if is_struck(options, options.steps, "clean-up"):
        close()


def update(options, step):
    total = sum(i * i for i in range(options.work))
    if is_struck(options, step, "memory"):
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        resource.setrlimit(resource.RLIMIT_AS, (4 * size, 4 * size))
        bytearray(1 << 40)
    if is_struck(options, step, "disk-full"):
        with open(os.path.join(options.disk, "checkpoint"), "wb") as file:
            while True:
                file.write(b"x" * (1 << 20))
    time.sleep(0.1 + 0 * total)


def close():
    """Waits for a thread that waits for the driver."""
    never = threading.Event()
    logger = threading.Thread(target=never.wait, name="metrics-writer")
    logger.start()
    logger.join()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fault", default="")
    for name, default in (("steps", 3), ("fault-step", 2), ("slow-s", 20), ("work", 1), ("pause", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("retrieval", "solver", "silent", "disk"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    if options.worker:
        setproctitle("fault: rollout worker")
        asyncio.run(work(options))
    else:
        train(options)


if __name__ == "__main__":
    main()
