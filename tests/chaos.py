"""Kills the loop at many points and checks that a rerun recovers.

    python tests/chaos.py                 # every stage, six points, two ways in turn: `make chaos`
    python tests/chaos.py synthesize      # one stage

Kills one loop of one iteration on tiny models at a point, reruns it, kills it at the next point, and finally
lets it finish. A kill is SIGKILL to the supervisor or to its whole process tree. At the end:

- the loop is complete, and no process or temporary file is left
- accepted and rejected rows hold each prompt exactly once
- no sample or answer was drawn twice
- trainers resumed at their last checkpoints with an undisturbed run's data

The suite runs a short form (tests/loop/test_evolve.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import psutil
import pyarrow.parquet as pq
from data_order import unbroken_order
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from watch import Watch

from drzero.loop.evolve import LOOP_VARIABLE
from verl_ext.checkpoints import saved_step

ROOT = Path(__file__).resolve().parent.parent
RUN_LIMIT_S = 1800
STEPS = 2
PARTITIONS, SAMPLES = 5, 5
TEMPORARY = ("*.tmp", "*.partial", "*.building", "*.previous")

Way = Literal["supervisor", "tree"]
WAYS: tuple[Way, Way] = ("supervisor", "tree")
Reached = Callable[[Path, float], bool]
"""Whether a stage, seen through its run folder, has reached a point since the given time."""


@dataclass(frozen=True)
class Kill:
    """Where and how to kill."""

    stage: str
    point: str
    way: Way


@dataclass
class Recovery:
    """How a kill went."""

    kill: Kill
    struck: bool
    """Whether the point was reached before the loop or the stage ended."""
    ended_with: int | None = None
    """The loop's exit code where it ended before the kill."""
    saved_step: int = 0
    attempts: int = 0
    """Metrics files of the stage at the kill: one a start of its trainer."""
    watch: Watch = field(default_factory=Watch)


def beat(step: int, phase: str) -> Reached:
    """The trainer has entered a phase of a step."""

    def reached(folder: Path, since: float) -> bool:
        for line in _lines(folder / "heartbeats.jsonl"):
            with suppress(ValueError):  # the last line may be half written
                record = json.loads(line)
                if record["time"] > since and (record["step"], record["phase"]) == (step, phase):
                    return True
        return False

    return reached


def touched(name: str) -> Reached:
    """A file of the run folder, or next to it, has been written."""

    def reached(folder: Path, since: float) -> bool:
        return any(path.stat().st_mtime > since for path in folder.glob(name))

    return reached


def there(name: str) -> Reached:
    """A file of the run folder, or next to it, exists."""
    return lambda folder, since: (folder / name).exists()


def recorded(name: str, share: float) -> Reached:
    """A journal holds this share of its records."""

    def reached(folder: Path, since: float) -> bool:
        journal = folder / name
        # The work is written down nowhere before it is done, so the sizes are those of this harness.
        total = {"samples.jsonl": 12 * SAMPLES, "answers.jsonl": 16}[name]
        return len(_lines(journal)) - 1 >= share * total

    return reached


def both(one: Reached, other: Reached) -> Reached:
    """Both points are reached."""
    return lambda folder, since: one(folder, since) and other(folder, since)


# Six points a stage, struck in this order and in both ways by turns: a kill must find what earlier ones left.
POINTS: dict[str, dict[str, Reached]] = {
    "challenger": {
        "as the services start": touched("logs/retrieval.log"),
        "in the rollout of step 1": beat(1, "rollout"),
        "in the update of step 1": beat(1, "update"),
        "while step 1 is saved": beat(1, "save"),
        "while step 2 is saved": beat(2, "save"),
        "during the export": touched("logs/merger.log"),
    },
    "synthesize": {
        f"at {share:.0%} of the samples": recorded("samples.jsonl", share)
        for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1)
    },
    "solver": {
        "in the first validation": beat(0, "validation"),
        "in the rollout of step 1": beat(1, "rollout"),
        "while step 1 is saved": beat(1, "save"),
        "in the update of step 2": beat(2, "update"),
        "while step 2 is saved": beat(2, "save"),
        "in the last validation": beat(2, "validation"),
    },
    "merge": {
        "as the merger starts": touched("logs/merger.log"),
        "as the merger starts again": touched("logs/merger.log"),
        "while weights are written": touched("../.solver_iter1_hf.building/**/*.safetensors"),
        "while weights are written again": touched("../.solver_iter1_hf.building/**/*.safetensors"),
        "as the export appears": touched("../solver_iter1_hf/*"),
        "with the export there": both(there("../solver_iter1_hf"), touched("../evolve/logs/merge_iter1.log")),
    },
    "evaluate": {
        f"at {share:.0%} of the answers": recorded("answers.jsonl", share)
        for share in (0.1, 0.3, 0.5, 0.6, 0.8, 0.9)
    },
}


def full_matrix(stages: Sequence[str] = tuple(POINTS)) -> list[Kill]:
    """Return every point of every stage, with the two ways in turn."""
    return [
        Kill(stage, point, WAYS[place % 2]) for stage in stages for place, point in enumerate(POINTS[stage])
    ]


class Loop:
    """One loop under attack."""

    def __init__(self, arguments: Sequence[str], checkpoints: Path) -> None:
        self._command = [sys.executable, "-m", "drzero.cli", "evolve", *arguments]
        self.checkpoints = checkpoints
        self.output = checkpoints.parent / f"{checkpoints.name}.out"

    def start(self) -> subprocess.Popen[bytes]:
        """Start or restart it."""
        with self.output.open("ab") as out:
            return subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def strike(self, kill: Kill) -> Recovery:
        """Start the loop and kill it at the point.

        If the stage ends before the point, the kill has missed. The loop is ended anyway, so that the next
        kill finds it running.
        """
        since, process, recovery = time.time(), self.start(), Recovery(kill, struck=False)
        folder = self.checkpoints / f"{kill.stage}_iter1"
        reached, looked = POINTS[kill.stage][kill.point], 0.0
        while process.poll() is None and time.time() < since + RUN_LIMIT_S:
            if time.time() > looked + 1:
                with suppress(psutil.Error):
                    recovery.watch.poll(psutil.Process(process.pid))
                looked = time.time()
            if folder.is_dir() and reached(folder, since):
                with suppress(psutil.Error):
                    recovery.watch.poll(psutil.Process(process.pid))
                recovery.struck = True
                break
            if self.is_complete(kill.stage):
                break
            time.sleep(0.05)
        recovery.ended_with = process.poll()
        if kill.way == "tree" or not recovery.struck:
            _kill_tree(process.pid, self.checkpoints)
        else:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        recovery.saved_step = saved_step(folder)
        recovery.attempts = len(list(folder.glob("metrics/attempt_*.jsonl")))
        return recovery

    def is_complete(self, stage: str) -> bool:
        """Whether the manifest says so."""
        manifest = self.checkpoints / "evolve" / "manifest.json"
        entries = json.loads(manifest.read_text())["stages"] if manifest.is_file() else {}
        return bool(entries.get(f"{stage}_iter1", {}).get("state") == "complete")

    def finish(self) -> int:
        """Run it to its end and return the exit code."""
        return self.start().wait(RUN_LIMIT_S)


def problems(loop: Loop, recoveries: Sequence[Recovery]) -> list[str]:
    """Return the faults of the finished loop."""
    found = [f"{r.kill}: left behind: {left}" for r in recoveries for left in r.watch.alive()]
    left = [path for pattern in TEMPORARY for path in loop.checkpoints.rglob(pattern)]
    found += [f"temporary file left: {path}" for path in left]
    manifest = json.loads((loop.checkpoints / "evolve" / "manifest.json").read_text())
    found += [f"{name} is {e['state']}" for name, e in manifest["stages"].items() if e["state"] != "complete"]
    found += _prompt_problems(loop.checkpoints / "synthesize_iter1")
    answers = [json.loads(line) for line in _lines(loop.checkpoints / "evaluate_iter1" / "answers.jsonl")[1:]]
    asked = Counter((answer["benchmark"], answer["id"]) for answer in answers)
    found += [f"{question} was answered {count} times" for question, count in asked.items() if count > 1]
    for stage in ("challenger", "solver"):
        of_stage = [r for r in recoveries if r.kill.stage == stage]
        found += _training_problems(loop.checkpoints / f"{stage}_iter1", of_stage)
    return found


def _prompt_problems(folder: Path) -> list[str]:
    """Each prompt of the partition once among accepted and rejected rows, each sample once in the journal."""
    config = OmegaConf.load(folder / "resolved.yaml")
    wanted = Counter(_indices(config.data.train_files)[::PARTITIONS])
    accepted = [*_indices(folder / "train.parquet"), *_indices(folder / "val.parquet")]
    rejected = [json.loads(line)["prompt_index"] for line in _lines(folder / "rejects.jsonl")]
    found = []
    if Counter([*accepted, *rejected]) != wanted:
        found.append("accepted and rejected do not hold each prompt once")
    samples = [json.loads(line) for line in _lines(folder / "samples.jsonl")[1:]]
    drawn = Counter((sample["prompt_index"], sample["sample"]) for sample in samples)
    if drawn != Counter((index, sample) for index in wanted for sample in range(SAMPLES)):
        found.append("the journal does not hold each sample of each prompt once")
    return found


def _indices(rows: str | Path) -> list[int]:
    """The number of each row's prompt."""
    column = pq.read_table(rows, columns=["extra_info"]).column("extra_info")
    return [row["index"] for row in column.to_pylist()]


def _training_problems(folder: Path, recoveries: Sequence[Recovery]) -> list[str]:
    """Every start of the trainer went on after the last checkpoint, with the data of an unbroken run."""
    found = []
    for number, path in enumerate(sorted(folder.glob("metrics/attempt_*.jsonl")), start=1):
        earlier = [r for r in recoveries if r.attempts < number]
        saved = earlier[-1].saved_step if earlier else 0
        steps = [json.loads(line)["step"] for line in _lines(path) if line.endswith("}")]
        # A validation of the model as it was saved is logged under the saved step.
        first = next((step for step in steps if step > saved), None)
        # A supervisor's death leaves its trainer some seconds, in which a save may still come to its end.
        late = bool(earlier) and earlier[-1].kill.way == "supervisor"
        if first not in (None, saved + 1, *([saved + 2] if late else [])):
            found.append(f"{path.name} of {folder.name} begins at step {first} after checkpoint {saved}")
    config = cast(DictConfig, OmegaConf.load(folder / "resolved.yaml"))
    n = config.actor_rollout_ref.rollout.n
    for step, batch in enumerate(unbroken_order(config, STEPS), start=1):
        dump = [json.loads(line) for line in _lines(folder / "dumps" / f"step_{step:04d}.jsonl")]
        drawn = Counter((line["doc_id"], line["hop"]) for line in dump)
        if drawn != Counter({key: count * n for key, count in batch.items()}):
            found.append(f"step {step} of {folder.name} drew other data than an undisturbed run")
    return found


def _kill_tree(pid: int, checkpoints: Path) -> None:
    """SIGKILL everything that the run started, until nothing of it runs."""
    mark = (LOOP_VARIABLE, str(checkpoints / "evolve"))
    while True:
        with suppress(psutil.NoSuchProcess):
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        left = [process for process in psutil.process_iter() if _marked(process, *mark)]
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _marked(process: psutil.Process, variable: str, value: str) -> bool:
    with suppress(psutil.Error, OSError):
        return process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE
    return False


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def small_loop(corpus: Path, model: Path, checkpoints: Path) -> list[str]:
    """Return overrides of a loop of one iteration on tiny models, whose questions would fail most gates."""
    gates = ("evidence", "hops", "integrity", "duplicates", "near_duplicates", "contamination")
    return [
        *(
            "hardware=cpu",
            "model=demo-policy",
            "hop_ratio=[4,3,2,1]",
            f"base_model={model}",
            "iterations=1",
            "keep_checkpoints=true",
        ),
        *(f"paths.corpus={corpus}", f"paths.checkpoints={checkpoints}", f"steps_per_iteration={STEPS}"),
        *("stages.challenger.trainer.save_freq=1", "stages.solver.trainer.save_freq=1"),
        *("stages.challenger.data.train_batch_size=4", "stages.solver.data.train_batch_size=2"),
        *(f"stages.synthesize.gates.{gate}=false" for gate in gates),
        *(f"stages.synthesize.partitions={PARTITIONS}", "stages.evaluate.questions_per_benchmark=4"),
        # Few at a time, so that a kill finds some done and some not.
        *("stages.synthesize.solver.concurrency=4", "stages.evaluate.solver.concurrency=2"),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2", "process_env.OMP_NUM_THREADS=1"),
    ]


def attack(loop: Loop, kills: Sequence[Kill]) -> tuple[list[Recovery], list[str]]:
    """Kill the loop at each point in turn, let it finish, and check the rest."""
    recoveries = [loop.strike(kill) for kill in kills]
    codes = [*(recovery.ended_with for recovery in recoveries), loop.finish()]
    said = [line for line in _lines(loop.output) if line.startswith("drzero ")]
    failed = [f"the loop ended with exit code {code}, see {loop.output}: {said}" for code in codes if code]
    return recoveries, failed or problems(loop, recoveries)


def main() -> int:
    """Run the full matrix, or the named stages, and print a table."""
    from conftest import make_prepared
    from tiny_model import save_speaking_model

    with tempfile.TemporaryDirectory(prefix="chaos_") as place:
        folder = Path(place)
        model = save_speaking_model(folder / "speaking")
        prepared = make_prepared(folder / "corpus", model)
        console, started = Console(width=110), time.monotonic()
        loop = Loop(small_loop(prepared.corpus, model, folder / "loop"), folder / "loop")
        recoveries, found = attack(loop, full_matrix(sys.argv[1:] or list(POINTS)))
        table = Table("stage", "point", "way", "struck", "checkpoint then")
        for r in recoveries:
            table.add_row(r.kill.stage, r.kill.point, r.kill.way, str(r.struck), str(r.saved_step or "–"))
        console.print(table)
        for problem in found:
            console.print(f"[red]{problem}")
        struck = sum(recovery.struck for recovery in recoveries)
        minutes = (time.monotonic() - started) / 60
        console.print(
            f"{struck} kills, {len(recoveries) - struck} missed their point, {len(found)} problems, "
            f"{minutes:.0f} minutes"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
