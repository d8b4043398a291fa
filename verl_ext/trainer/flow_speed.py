"""How many rows a second go into TransferQueue and out of it, both at once, as fast as they can (veRL 0.9.1).

    speed = FullSpeed(Load(prompts=64, rollouts=5, prompt_tokens=512, response_tokens=3072), manager, buffer)
    record = speed.run(5.0)             # rates, seconds of a put and a take, busy shares

The rows have the fields and lengths of an agent loop's, and are written by the flow-test's workers by its
protocol. One batch is written while the batch before is taken: chosen by veRL's own buffer, all fields read,
and removed. So the buffer, which polls every two seconds while it waits, never waits here. The first batch is
written and the last one taken alone, which shows what the two cost each other.

TransferQueue answers one request after another in one thread of its controller, and in one of each storage
unit: a lock in all but name. What is measured of it is the processor time of its processes, as a share of one
core, next to that of the producers, of the consumer (this process) and of the whole machine.
"""

import itertools
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import psutil
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

SPEED_FILE = "flow_speed.json"
_PARTS = {
    "controller": "ray::TransferQueueController",
    "storage": "ray::SimpleStorage",
    "producer": "ray::Load",
}
"""Titles of the processes that take part, by what they are called in the record."""


@dataclass(frozen=True)
class Load:
    """A batch as it is written and taken."""

    prompts: int
    rollouts: int
    """Of each prompt."""
    prompt_tokens: int
    response_tokens: int
    partition: str = "speed"
    """Its own: the trainer's counters, which list train and val, never see it."""

    @property
    def rows(self) -> int:
        """Rows of a batch."""
        return self.prompts * self.rollouts

    @property
    def row_bytes(self) -> int:
        """Of the tensors of a row (`made_row`)."""
        return row_bytes(self.prompt_tokens, self.response_tokens)


def row_bytes(prompt_tokens: int, response_tokens: int) -> int:
    """Bytes of a row's tensors (`made_row`): integers of 8 bytes, and two of floats of 4."""
    return 8 * (3 * prompt_tokens + 5 * response_tokens) + 4 * 2 * response_tokens


def made_row(load: Load) -> TensorDict:
    """A row with the tensors that an agent loop writes, of full length."""
    prompt, response = torch.arange(load.prompt_tokens), torch.arange(load.response_tokens)
    both = torch.arange(load.prompt_tokens + load.response_tokens)
    fields = {
        "prompts": prompt,
        "responses": response,
        "response_mask": torch.ones_like(response),
        "loss_mask": torch.ones_like(response),
        "rollout_log_probs": torch.zeros(load.response_tokens),
        "rm_scores": torch.zeros(load.response_tokens),
        "input_ids": both,
        "position_ids": both,
    }
    nested = {
        name: torch.nested.as_nested_tensor([values], layout=torch.jagged) for name, values in fields.items()
    }
    return TensorDict(nested, batch_size=1)


class FullSpeed:
    """Writes and takes batches; `manager` has the workers, `buffer` is the trainer's replay buffer."""

    def __init__(self, load: Load, manager: Any, buffer: Any) -> None:
        self._load, self._manager, self._buffer = load, manager, buffer
        self._numbers = itertools.count()
        self._put_s: list[float] = []

    def run(self, seconds: float) -> dict[str, Any]:
        """Measure for about so long, one round of both at once at least; the queue is empty again then."""
        rows, ends = self._load.rows, time.monotonic() + seconds
        alone_in = self._written(self._begin())
        self._put_s.clear()
        written_s, taken_s = list[float](), list[float]()
        before = _processor_times()
        while not taken_s or time.monotonic() < ends:
            waiting = self._begin()
            taken_s.append(self._take())
            written_s.append(self._written(waiting))
        busy = _busy(before, _processor_times())
        alone_out = self._take()
        return {
            "rows": rows * len(taken_s),
            "prompts": self._load.prompts,
            "rollouts": self._load.rollouts,
            "row_bytes": self._load.row_bytes,
            "row_tokens": self._load.prompt_tokens + self._load.response_tokens,
            "in": rows / fmean(written_s),
            "out": rows / fmean(taken_s),
            "in_alone": rows / alone_in,
            "out_alone": rows / alone_out,
            "put_s": fmean(self._put_s),
            "take_s": fmean(taken_s),
            "busy": busy,
            "cores": len(os.sched_getaffinity(0)),
        }

    def _begin(self) -> list[Any]:
        uids = [f"row{next(self._numbers)}" for _ in range(self._load.prompts)]
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id=self._load.partition, tags=tags)
        calls: list[Any] = self._manager.write(uids, self._load)
        return calls

    def _written(self, calls: Iterable[Any]) -> float:
        """Wait until a batch is written; the seconds from the first worker's begin to the last one's end."""
        begins, ends, put_s = zip(*ray.get(list(calls)), strict=True)
        self._put_s += [seconds for worker in put_s for seconds in worker]
        return float(max(ends) - min(begins))

    def _take(self) -> float:
        """Take a batch that is complete; the seconds that it took."""
        began, partition = time.monotonic(), self._load.partition
        batch, _ = self._buffer.sample(global_steps=1, partition_id=partition, batch_size=self._load.prompts)
        tq.kv_batch_get(keys=batch.keys, partition_id=partition)
        tq.kv_clear(keys=batch.keys, partition_id=partition)
        return time.monotonic() - began


def _processor_times() -> dict[str, Any]:
    """Now, the machine's processor times, and the seconds that each process of this run has used."""
    own = psutil.Process()
    used: dict[tuple[str, int], float] = {("consumer", own.pid): _used(own)}
    for process in own.children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            for part, begins in _PARTS.items():
                if title.startswith(begins):
                    used[part, process.pid] = _used(process)
        except psutil.Error:
            continue  # it has ended
    return {"at": time.monotonic(), "used": used, "machine": psutil.cpu_times()}


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """The share of a core that the busiest process of each part used in between, and of all the machine's."""
    seconds = now["at"] - before["at"]
    shares: dict[str, float] = {}
    for key, used in now["used"].items():
        share = (used - before["used"].get(key, used)) / seconds
        shares[key[0]] = round(max(shares.get(key[0], 0.0), share), 3)
    was, is_ = before["machine"], now["machine"]
    total = sum(is_) - sum(was)
    idle = is_.idle - was.idle + getattr(is_, "iowait", 0.0) - getattr(was, "iowait", 0.0)
    return shares | {"machine": round(1 - idle / total, 3) if total else 0.0}
