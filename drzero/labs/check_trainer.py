"""Send one row through a stage's trainer by veRL's `trainer.val_only` (`check-services --with-trainer`).

    drzero check-services challenger --with-trainer hardware=cpu

Worth: finds an engine or queue that never answers, before a paid run. Tests `verl_ext/trainer` and
`verl_ext/rollout`. Can go when smoke runs as fast on every stage.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf, open_dict

from drzero.labs.trial import HEARTBEATS, VALIDATED, Step, run_trial
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
}  # who answers each kind of call


class HopMissing(RunFailed):
    """The trainer ended well without a hop that every prompt takes."""


def check_with_trainer(config: DictConfig, specs: Sequence[AnySpec]) -> list[Step]:
    """Run one prompt of a prepared config. Raises HopMissing, else as `run_trial`."""
    folder = Path(config.run.dir)
    run_trial(config, specs, _only_validate)
    hops = list(read_hops(folder))
    if missing := {"generation", "buffer"} - {hop.name for hop in hops}:
        text = f"the trainer ended well, but recorded no {' and no '.join(sorted(missing))}: see trainer.log"
        EventLog(folder / "logs" / EVENTS_FILE).add("exit", "trainer", text, code=1)
        raise HopMissing(text)
    return hops


def _only_validate(config: DictConfig) -> None:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    row = next(pq.ParquetFile(config.data.train_files).iter_batches(1))  # preflight has checked for one
    with pq.ParquetWriter(folder / ROW_FILE, row.schema) as file:
        file.write_batch(row)
    with open_dict(config):
        config.data.val_files = str(folder / ROW_FILE)
        config.trainer.val_before_train = config.trainer.val_only = True
        config.trainer.validation_data_dir = str(folder / VALIDATED)
        config.trainer.logger = ["file"]
        OmegaConf.update(config, "actor_rollout_ref.rollout.val_kwargs.n", 1)


def read_hops(folder: Path) -> Iterator[Step]:
    """The prompt's hops in order, from the files of the run."""
    beats = {beat["phase"]: float(beat["time"]) for beat in reversed(read_json_lines(folder / HEARTBEATS))}
    workers = read_workers(folder / PROGRESS, time.time())
    counters: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        counters = json.loads((folder / COUNTERS_FILE).read_text(encoding="utf-8"))
    about = counters.get("about", {})
    if {"start-up", "validation"} <= beats.keys():
        took = beats["validation"] - beats["start-up"]
        yield Step("start-up", "trainer", took, "engines, workers and weights are ready")
    if "listed_s" in about:
        yield Step("queue", "TransferQueue", about["listed_s"], "listed all it holds once")
    for kind, component in _CALLS.items():
        yield from _calls(kind, component, workers, _score(folder))
    if "sampled_s" in about:
        found = bool(counters.get("points", {}).get("validation", {}).get("out"))
        late = about["sampled_s"] - sum(_seconds(workers, kind) for kind in ("rollout", "reward"))
        outcome = f"found the sample {max(late, 0.0):.1f} s after its reward (it polls every 2 s)"
        yield Step("buffer", "replay buffer", about["sampled_s"], outcome if found else "none came", ok=found)


def _calls(kind: str, component: str, workers: Sequence[Worker], score: str) -> Iterator[Step]:
    """A failed or open call makes the hop fail."""
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
    yield Step(kind, component, seconds, ", ".join(parts), ok=not failed and not ages)


def _seconds(workers: Sequence[Worker], kind: str) -> float:
    return sum(worker.seconds.get(kind, 0.0) for worker in workers)


def _score(folder: Path) -> str:
    rows = [row for path in sorted((folder / VALIDATED).glob("*.jsonl")) for row in read_json_lines(path)]
    return f"reward {float(rows[-1]['score']):.3f}" if rows else ""
