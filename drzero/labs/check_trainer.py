"""`drzero check-services STAGE --with-trainer`: one prompt through the stage's own trainer, no update.

    drzero check-services challenger --with-trainer hardware=cpu
    drzero check-services train --with-trainer env=wordle hardware=cpu

It is veRL's own validation-only run (`trainer.val_only`) of the stage's config, whose validation file is the
first row of its training file: the trainer, its engines and workers start as in a run, one prompt is queued,
rolled out, rewarded, found by the replay buffer and read, and all ends without an update or a checkpoint. It
takes the memory of a run. Each hop's time is what the run's own telemetry wrote: heartbeats, the workers'
progress files, the trainer's counters.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf, open_dict

from drzero.labs.trial import HEARTBEATS, VALIDATED, run_trial
from drzero.ops.errors import RunFailed
from drzero.ops.flow.workers import Worker, finished, read_workers
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE, read_json_lines
from drzero.ops.services.services import AnySpec
from drzero.stages.flow import COUNTERS_FILE
from drzero.stages.watch import PROGRESS

ROW_FILE = "check.parquet"
_CALLS = {
    "rollout": "rollout workers",
    "generation": "rollout engine",
    "search": "retrieval",
    "environment": "the environment's own code",
    "completion": "solver",
    "reward": "reward workers",
}
"""The kinds of calls that workers write down, and who answers them."""


class HopMissing(RunFailed):
    """The trainer ended well, and a hop that every prompt takes was not seen."""


@dataclass(frozen=True)
class Hop:
    """One hop of the prompt; `seconds` of each call, the mean of several."""

    name: str
    component: str
    seconds: float
    outcome: str
    ok: bool = True


def check_with_trainer(config: DictConfig, specs: Sequence[AnySpec]) -> list[Hop]:
    """Run one prompt of a prepared config through its trainer; returns the hops, which a failure also leaves.

    Raises what `run_trial` raises, and HopMissing.
    """
    folder = Path(config.run.dir)
    run_trial(config, specs, _only_validate)
    hops = list(read_hops(folder))
    if missing := {"generation", "buffer"} - {hop.name for hop in hops}:
        unseen = " and ".join(sorted(missing))
        text = f"the trainer ended well, and wrote nothing of {unseen}: see trainer.log"
        EventLog(folder / "logs" / EVENTS_FILE).add("exit", "trainer", text, code=1)
        raise HopMissing(text)
    return hops


def _only_validate(config: DictConfig) -> None:
    """Make the run a validation of one row."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    batches = pq.ParquetFile(config.data.train_files).iter_batches(1)
    row = next(batches)  # preflight has checked that there is one
    with pq.ParquetWriter(folder / ROW_FILE, row.schema) as file:
        file.write_batch(row)
    with open_dict(config):
        config.data.val_files = str(folder / ROW_FILE)
        config.trainer.val_before_train = config.trainer.val_only = True
        config.trainer.validation_data_dir = str(folder / VALIDATED)
        config.trainer.logger = ["file"]
        OmegaConf.update(config, "actor_rollout_ref.rollout.val_kwargs.n", 1)


# The hops ---------------------------------------------------------------------------------------------------


def read_hops(folder: Path, now: float | None = None) -> Iterator[Hop]:
    """The hops of the prompt in their order, from what the run has written."""
    beats = {beat["phase"]: float(beat["time"]) for beat in reversed(read_json_lines(folder / HEARTBEATS))}
    workers = read_workers(folder / PROGRESS, now or time.time())
    counters = _counters(folder / COUNTERS_FILE)
    about = counters.get("about", {})
    if {"start-up", "validation"} <= beats.keys():
        took = beats["validation"] - beats["start-up"]
        yield Hop("start-up", "trainer", took, "engines, workers and weights are there")
    if "listed_s" in about:
        yield Hop("queue", "TransferQueue", about["listed_s"], "one listing of all that it holds")
    score = _score(folder)
    for kind, component in _CALLS.items():
        yield from _calls(kind, component, workers, score)
    if "sampled_s" in about:
        found = bool(counters.get("points", {}).get("validation", {}).get("out"))
        late = about["sampled_s"] - sum(_seconds(workers, kind) for kind in ("rollout", "reward"))
        outcome = f"the sample was found, {max(late, 0.0):.1f} s after its reward (it polls every 2 s)"
        yield Hop("buffer", "replay buffer", about["sampled_s"], outcome if found else "none came", ok=found)


def _calls(kind: str, component: str, workers: Sequence[Worker], score: str) -> Iterator[Hop]:
    """The calls of one kind, if there were any: a failed one, or one that is still open, is not ok."""
    done = finished(workers).get(kind, 0.0)
    failed = sum(worker.failed.get(kind, 0.0) for worker in workers)
    ages = [call.age_s for worker in workers for call in worker.calls if call.kind == kind]
    if not (done or failed or ages):
        return
    parts = [f"{done:g} answered"]
    if kind == "generation" and (tokens := finished(workers).get("token")):
        parts.append(f"{tokens:g} tokens")
    if kind == "reward" and score:
        parts.append(score)
    if failed:
        parts.append(f"{failed:g} failed")
    if ages:
        parts.append(f"{len(ages)} not answered after {max(ages):.0f} s")
    seconds = _seconds(workers, kind) / done if done else max(ages, default=0.0)
    yield Hop(kind, component, seconds, ", ".join(parts), ok=not failed and not ages)


def _seconds(workers: Sequence[Worker], kind: str) -> float:
    return sum(worker.seconds.get(kind, 0.0) for worker in workers)


def _counters(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        counters: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return counters
    return {}


def _score(folder: Path) -> str:
    """The reward of the sample, by veRL's dump of its validation."""
    rows = [row for path in sorted((folder / VALIDATED).glob("*.jsonl")) for row in read_json_lines(path)]
    return f"reward {float(rows[-1]['score']):.3f}" if rows else ""
