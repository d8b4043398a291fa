"""Counts the samples in veRL's replay buffer (veRL 0.9.1), `rollouts_per_prompt` to a group (prompt)."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from drzero.ops.telemetry import StatusFile

COUNTERS_FILE = "flow_counters.json"
_TERMINAL = ("finished", "failure")
_EVICTED = {
    "stale": "training/off_policy/evicted_samples",
    "failed": "training/rollout_failure/evicted_samples",
    "filtered": "training/filter_groups/evicted_samples",
}

Listing = Mapping[str, Mapping[str, Mapping[str, Any]]]  # TransferQueue's tags by partition and key


@dataclass(frozen=True)
class Partition:
    """The groups of one partition, as listed at one moment."""

    status: Counter[str]  # groups by veRL's status: pending, running, finished, failure
    oldest_s: Mapping[str, float]  # age of the oldest `working` and `waiting` group
    rows_of_working: int  # finished samples of working groups
    steps_of_waiting: Sequence[int]  # the steps at which waiting groups were submitted

    @property
    def working(self) -> int:
        """Groups that are pending or running."""
        return sum(self.status.values()) - self.waiting

    @property
    def waiting(self) -> int:
        """Finished and failed groups, which can be sampled, evicted or filtered."""
        return sum(self.status[status] for status in _TERMINAL)


class GroupClock:
    """Remembers how long groups have been working or waiting, because veRL's tags carry no time."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[bool, float]] = {}
        self._failing: set[str] = set()
        self.failures = 0  # failed groups seen so far, each counted once

    def update(self, tags: Mapping[str, Mapping[str, Any]], now: float) -> Partition:
        """Read one listing of a partition, made at `now`."""
        groups = {key: tag for key, tag in tags.items() if tag.get("is_prompt", False)}
        terminal = {key: tag.get("status") in _TERMINAL for key, tag in groups.items()}
        known = self._since
        self._since = {
            key: known[key] if key in known and known[key][0] == ended else (ended, now)
            for key, ended in terminal.items()
        }
        failing = {key for key, tag in groups.items() if tag.get("status") == "failure"}
        self.failures += len(failing - self._failing)
        self._failing = failing
        oldest: dict[str, float] = {}
        for ended, since in self._since.values():
            place = "waiting" if ended else "working"
            oldest[place] = max(oldest.get(place, 0.0), now - since)
        rows = [key.split("_", 1)[0] for key, tag in tags.items() if not tag.get("is_prompt", False)]
        return Partition(
            status=Counter(str(tag.get("status")) for tag in groups.values()),
            oldest_s=oldest,
            rows_of_working=sum(terminal.get(group) is False for group in rows),
            steps_of_waiting=[int(groups[key]["global_steps"]) for key, ended in terminal.items() if ended],
        )


@dataclass
class _Counts:
    """In groups until the trainer judges rows."""

    submitted: int = 0
    taken: int = 0
    stale: int = 0
    failed: int = 0
    filtered: int = 0
    replaced_now: int = 0  # groups evicted and replaced in a call of `sample` that is still running
    judged: int = 0  # expected rows, whether they arrived or not
    accepted: int = 0
    invalid: int = 0
    missing: int = 0  # rows of sampled groups that were never written
    validated: int = 0
    validation_submitted: int = 0


@dataclass(eq=False, kw_only=True)
class FlowCounters:
    """The counts of one start of the trainer, whose thread calls the methods."""

    path: Path
    mode: str
    rollouts_per_prompt: int
    behind_limit: int | None = None  # how many steps a group may be behind before it is dropped, if limited
    capacity: int | None = None  # rows that TransferQueue has room for, if bounded
    filters: bool = False  # whether the synchronous buffer evicts groups by choice
    listing: Callable[[], Listing | None] = lambda: tq.kv_list()

    def __post_init__(self) -> None:
        self._file = StatusFile(self.path)
        self._lock = threading.Lock()
        self._counts = _Counts()
        # Partition, wanted groups, since. A call that raises stays: veRL never says what it evicted.
        self._call: tuple[str, int, float] | None = None
        self._failed_before = 0  # failures seen when the call began
        self._behind: list[int] = []
        self._step = 0
        self._first_at: float | None = None
        self._took_s: dict[str, float] = {}
        self._clocks = {"train": GroupClock(), "val": GroupClock()}
        self._ended = False

    def submitted(self, groups: int) -> None:
        """Count groups given to the rollout."""
        with self._lock:
            self._first_at = self._first_at or (time.time() if groups else None)
            self._counts.submitted += groups

    def replaced(self, groups: int) -> None:
        """Count additional groups. During a call of `sample` they replace evicted ones."""
        with self._lock:
            # Synchronous filtering submits two for one, and reports its evictions when it returns.
            if self._call and self.mode != "sync":
                self._counts.replaced_now += groups

    def judged(self, expected: int, rows: int, accepted: int) -> None:
        """Count a batch: `rows` of `expected` rows arrived, and `accepted` of them will be trained on."""
        with self._lock:
            counts = self._counts
            counts.judged += expected
            counts.accepted += accepted
            counts.invalid += rows - accepted
            counts.missing += max(expected - rows, 0)

    @contextmanager
    def sampling(self, partition: str, want: int, step: int) -> Iterator[None]:
        """Mark the body as a call of `sample` that waits for `want` groups."""
        began = time.time()
        with self._lock:
            self._step = step
            self._call = partition, want, began
            self._failed_before = self._clocks["train"].failures
            if partition == "val":
                self._counts.validation_submitted += want
        yield
        with self._lock:
            self._call = None
            self._took_s["sampled_s"] = round(time.time() - began, 3)

    def sampled(
        self, partition: str, taken: int, metrics: Mapping[str, Any], batch: KVBatchMeta | None
    ) -> None:
        """Count a call of `sample`: groups taken, and groups evicted according to veRL's metrics."""
        with self._lock:
            counts = self._counts
            if partition == "val":
                counts.validated += taken
                return
            evicted = {name: int(metrics.get(key, 0)) for name, key in _EVICTED.items()}
            # A group may be both stale and filtered, but its replacement counts once.
            total = counts.replaced_now or sum(evicted.values())
            counts.stale += evicted["stale"]
            counts.failed += evicted["failed"]
            counts.filtered += max(total - evicted["stale"] - evicted["failed"], 0)
            counts.filtered += int(metrics.get("training/filter_groups/discarded_surplus_samples", 0))
            counts.replaced_now = 0
            if taken and not counts.taken and self._first_at is not None:
                self._took_s["warmup_s"] = round(time.time() - self._first_at, 2)
            counts.taken += taken
            if batch is not None:
                self._behind = [self._step - int(tag["global_steps"]) for tag in batch.tags]

    @contextmanager
    def writing(self, every_s: float = 5.0) -> Iterator[None]:
        """Write the file during the body and at its end. Restored groups count as submitted."""
        # Counting must never end the run, for example with a full disk or a closing queue.
        with suppress(Exception):
            restored = (self.listing() or {}).get("train", {})
            self.submitted(sum(bool(tag.get("is_prompt", False)) for tag in restored.values()))
        end = threading.Event()

        def write_until_end() -> None:
            last = False
            while not last:
                last = end.wait(every_s)
                with suppress(Exception):
                    self.write()

        thread = threading.Thread(target=write_until_end, name="flow", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended = True
            end.set()
            thread.join(5.0)

    def write(self) -> None:
        """Update the file. Raises OSError."""
        self._file.write(self.record(time.time()))

    def record(self, now: float) -> dict[str, Any]:
        """The content of the file."""
        began, submitted = time.monotonic(), self._counts.submitted  # before the listing that may show them
        listing = self.listing() or {}
        listed_s = round(time.monotonic() - began, 4)
        train, val = (self._clocks[name].update(listing.get(name, {}), now) for name in ("train", "val"))
        # Asynchronous modes store prompts as rows too, to resume them after a restart.
        with_prompts = self.mode != "sync"
        tags = [tag for part in listing.values() for tag in part.values()]
        rows = sum(with_prompts or not tag.get("is_prompt", False) for tag in tags)
        with self._lock:
            waiting, now_failed, now_evicted = None, *self._evicted_now(train, submitted)
            if self._call:
                partition, want, since = self._call
                have = train.waiting if self.mode == "sync" else train.status["finished"]
                point, have = ("validation", val.waiting) if partition == "val" else ("buffer", have)
                waiting = {"point": point, "have": have, "want": want, "since": since}
                waiting["filtered"] = now_evicted - now_failed if self.filters else 0
            return {
                "time": now,
                "points": self._points(train, val, rows, now_failed, now_evicted),
                "samples": self._samples(train, now_failed, now_evicted),
                "waiting": waiting,
                "warmup": self._counts.taken == 0,
                "ended": self._ended,
                "about": {"step": self._step, "mode": self.mode, "listed_s": listed_s, **self._took_s}
                | self._staleness(train),
            }

    def _evicted_now(self, train: Partition, submitted: int) -> tuple[int, int]:
        """Groups evicted so far in the present call of `sample`: those that failed, and all."""
        counts, failures = self._counts, self._clocks["train"].failures - train.status["failure"]
        if self.mode != "sync":
            # Until `sample` returns, only the failures seen tell its failed groups from others.
            return min(max(failures - counts.failed, 0), counts.replaced_now), counts.replaced_now
        if not (self.filters and self._call and self._call[0] == "train"):
            return 0, 0
        # veRL reports evictions when it returns, and only it removes groups from the queue.
        evicted = max(submitted - self._known(train), 0)
        return min(max(failures - self._failed_before, 0), evicted), evicted

    def _known(self, train: Partition) -> int:
        """Groups that are in the queue or have left it."""
        counts = self._counts
        left = counts.taken + counts.stale + counts.failed + counts.filtered
        return left + train.working + train.waiting

    def _points(
        self, train: Partition, val: Partition, rows: int, now_failed: int, now_evicted: int
    ) -> dict[str, Any]:
        counts, clocks = self._counts, self._clocks
        # Groups with equal rewards are left out by choice, which is not the buffer's fault.
        now_filtered = now_evicted - now_failed if self.filters else 0
        out = counts.taken + counts.filtered + now_filtered
        evicted = counts.stale + counts.failed + now_evicted - now_filtered
        left_rollout = out + evicted + train.waiting
        taken_rows = counts.taken * self.rollouts_per_prompt
        # Failed groups show in a listing, or later as missing rows. Neither count ever falls.
        lost_groups = counts.failed + math.ceil(counts.missing / self.rollouts_per_prompt)
        working, waiting = train.oldest_s.get("working"), train.oldest_s.get("waiting")
        errors, lost = max(clocks["train"].failures, lost_groups), counts.invalid + counts.missing
        points = {
            "prompts": _point(train.working, counts.submitted, left_rollout, working, errors=errors),
            "buffer": _point(train.waiting, left_rollout, out, waiting, dropped=evicted),
            "trainer": _point(taken_rows - counts.judged, taken_rows, counts.accepted, dropped=lost),
        }
        points["prompts"]["work"], points["buffer"]["role"] = train.rows_of_working, "queue"
        if self.capacity is not None:
            points["TransferQueue"] = _point(rows, 0, 0, capacity=self.capacity, role="store")
        if counts.validation_submitted:
            age, work = val.oldest_s.get("working"), val.waiting + val.rows_of_working
            asked, errors = counts.validation_submitted, clocks["val"].failures
            points["validation"] = _point(val.working, asked, counts.validated, age, errors=errors, work=work)
        return points

    def _samples(self, train: Partition, now_failed: int, now_evicted: int) -> dict[str, Any]:
        counts, each = self._counts, self.rollouts_per_prompt
        in_trainer = counts.taken * each - counts.judged
        # Groups are in the queue a moment before veRL's call for them returns, and stay if it raises.
        submitted = max(counts.submitted, self._known(train)) * each
        failed = (counts.failed + train.status["failure"]) * each + counts.missing
        # A filtering buffer has few stale groups, and tells them apart when it returns.
        name = "filtered" if self.filters else "stale"
        dropped = {"stale": counts.stale, "filtered": counts.filtered}
        dropped[name] += now_evicted - now_failed
        return {
            "asked": submitted,
            "produced": submitted - train.working * each + train.rows_of_working - failed,
            "accepted": counts.accepted,
            "invalid": counts.invalid,
            "failed": (counts.failed + now_failed) * each + counts.missing,
            **{name: groups * each for name, groups in dropped.items()},
            "in_flight": (train.working + train.waiting) * each + in_trainer,
            # Until a filtering call ends, the sum is made to fit.
            "settled": not (self.mode == "sync" and self.filters and self._call),
        }

    def _staleness(self, train: Partition) -> dict[str, Any]:
        """Lag in steps of the waiting groups and of the last batch. Empty in sync mode."""
        if self.mode == "sync":
            return {}
        behind = [self._step - step for step in train.steps_of_waiting]
        staleness = {
            "limit": self.behind_limit,
            "waiting": {str(steps): count for steps, count in sorted(Counter(behind).items())},
            "waiting_max": max(behind, default=0),
            "trained_mean": round(fmean(self._behind), 3) if self._behind else 0.0,
            "trained_max": max(self._behind, default=0),
            "evicted": self._counts.stale,
        }
        return {"staleness": staleness}


def _point(depth: int, came: int, out: int, age_s: float | None = None, **extra: Any) -> dict[str, Any]:
    """How many it holds, and how many came in and left."""
    return {"depth": depth, "oldest_age_s": age_s, "in": came, "out": out, "dropped": 0, "errors": 0, **extra}
