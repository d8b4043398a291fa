"""`drzero agent-bench STAGE mode=rollout`: batches of a stage's prompts through its own trainer, no update.

    drzero agent-bench challenger mode=rollout hardware=cpu
    drzero agent-bench train mode=rollout env=wordle batches=4

It is veRL's own training loop on the stage's config, in which no step is one of the actor's
(`trainer.critic_warmup`), none saves and none validates: data order, agent loops, rewards, queue, prefetch of
an asynchronous mode, group filter, log-probs and advantages are those of a run. Rewards, turns and times are
read from the dump of each batch, what was raised from the workers' progress files.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from drzero.labs.agents.contract import RewardRule
from drzero.labs.agents.runs import Failure, Run
from drzero.labs.trial import DUMPS, HEARTBEATS, prepared, run_trial, stage_services
from drzero.ops.console import set_verbose
from drzero.ops.errors import RunFailed
from drzero.ops.flow.workers import Worker, finished, read_workers
from drzero.ops.records import FLOW_FILE, read_json_lines
from drzero.recipe.compose import compose_stage
from drzero.stages.watch import PROGRESS

RAISING = ("rollout", "reward")
"""The kinds of calls whose failure leaves a rollout without a row."""
FLOW_EVERY_S = 1.0
"""Seconds between two readings of how many rollouts are in flight."""


@dataclass
class Rollouts:
    """What the trainer has done."""

    folder: Path
    title: str
    runs: list[Run] = field(default_factory=list)
    seconds: float = 0.0
    """Of waiting for rollouts, in all batches."""
    figures: list[tuple[str, str]] = field(default_factory=list)
    """Further lines of the table."""
    ended: RunFailed | None = None
    """Why the trainer ended before the last batch."""


def run_rollouts(stage: str, overrides: Sequence[str], batches: int, reward: RewardRule) -> Rollouts:
    """Roll batches of the stage's prompts out.

    Raises PreflightFailed before anything starts, AlreadyRunning, CheckError for the folder of a run, and
    what ended the trainer before a first batch.
    """
    config = compose_stage(stage, ["run.name=agent_bench", *overrides])
    set_verbose(config.verbose)
    config = prepared(config, stage)
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    title = f"{stage}, rollout: {batches} batches of {prompts} prompts × {samples}"
    done = Rollouts(Path(config.run.dir), title)

    try:
        run_trial(config, stage_services(config, stage), partial(without_update, batches=batches))
    except RunFailed as error:
        done.ended = error
    read_rollouts(done, batches * prompts * samples, reward)
    if done.ended and not any(run.seconds for run in done.runs):
        raise done.ended
    return done


def without_update(config: DictConfig, batches: int) -> None:
    """Make the run one of so many batches that changes no weights and saves nothing."""
    with open_dict(config):
        trainer = config.trainer
        trainer.total_training_steps, trainer.critic_warmup = batches, batches + 1
        trainer.save_freq = trainer.test_freq = -1
        trainer.val_before_train, trainer.resume_mode = False, "disable"
        trainer.rollout_data_dir, trainer.logger = str(Path(config.run.dir) / DUMPS), ["file"]
        # A rollout that fails is what this is to find, and a collapse would save.
        config.run.max_failed_share, config.collapse.policy = 1.0, "warn"
        config.flow.every_s = FLOW_EVERY_S


def read_rollouts(done: Rollouts, expected: int, reward: RewardRule) -> None:
    """Add what the trainer wrote in its folder: a run for each rollout, also for those that left no row."""
    rows = _rows(done.folder / DUMPS)
    workers = read_workers(done.folder / PROGRESS, time.time())
    failures = [cause for worker in workers for kind in RAISING for cause in _causes(worker, kind)]
    lost = "the trainer ended before it" if done.ended else "left no row: see trainer.log"
    failures += [lost] * (expected - len(rows) - len(failures))
    done.runs = [
        *(_run(number, row, reward) for number, row in enumerate(rows)),
        *(Run(number, None, None, failure=Failure(c)) for number, c in enumerate(failures, start=len(rows))),
    ]
    beats = read_json_lines(done.folder / HEARTBEATS)
    done.seconds = sum(b["time"] - a["time"] for a, b in pairwise(beats) if a["phase"] == "rollout")
    done.figures = [*_of_rows(rows), *_of_workers(workers), *_at_once(done.folder / FLOW_FILE)]


def _rows(dumps: Path) -> list[dict[str, Any]]:
    """The dumped rows, of a rollout with branches the last, which is its own."""
    lines = [line for path in sorted(dumps.glob("*.jsonl")) for line in read_json_lines(path)]
    return list({line["key"].rpartition("_")[0]: line for line in lines}.values())


def _run(number: int, row: dict[str, Any], rule: RewardRule) -> Run:
    reward = row["reward"]
    cause = rule.fault(reward["score"]) if reward.get("valid", True) else str(reward["reason_invalid"])
    failure = Failure(cause) if cause else None
    return Run(number, None, row if cause else None, row["rollout_s"], reward["score"], failure)


def _causes(worker: Worker, kind: str) -> Iterator[str]:
    for cause, count in worker.causes.get(kind, {}).items():
        yield from repeat(cause, count)


def _of_rows(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    if rows:
        turns = [turn for row in rows for turn in row["trajectory"]["turns"]]
        calls = sum(len(turn["calls"]) for turn in turns)
        yield "calls a run", f"{len(turns) / len(rows):.3g} turns, {calls / len(rows):.3g} tool calls"


def _of_workers(workers: Sequence[Worker]) -> Iterator[tuple[str, str]]:
    done = finished(workers)
    if done.get("rollout"):
        yield "tokens a run", f"{done.get('token', 0.0) / done['rollout']:.4g} written"
    if done.get("reward"):
        seconds = sum(worker.seconds.get("reward", 0.0) for worker in workers)
        yield "reward took", f"{seconds / done['reward']:.2f} s of each, after that"


def _at_once(stream: Path) -> Iterator[tuple[str, str]]:
    points = [record["points"] for record in read_json_lines(stream)]
    most = {
        name: max((one[name]["depth"] or 0 for one in points if name in one), default=0)
        for name in ("rollout", "generation")
    }
    if most["rollout"]:
        seen = f"seen every {FLOW_EVERY_S:g} s"
        yield "most at once", f"{most['rollout']:g} runs, {most['generation']:g} turns in flight, {seen}"
