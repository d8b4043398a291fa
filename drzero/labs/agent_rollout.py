"""Roll out a stage's prompts in veRL's training loop without actor steps (`trainer.critic_warmup`).

    drzero agent-bench train mode=rollout env=wordle batches=4

Nothing is saved or validated. All else matches a run: data order, rewards, queue, log-probs, advantages.

Worth: rates, failures and rewards of real rollouts, before weights change. Tests `verl_ext/rollout`. Can go
when a run can start with an update rate of zero.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from drzero.labs.agents.runs import AgentRun, Failure
from drzero.labs.trial import DUMPS, HEARTBEATS, prepared, run_trial, stage_services
from drzero.ops.console import set_verbose
from drzero.ops.errors import RunFailed
from drzero.ops.flow.workers import Worker, finished, read_workers
from drzero.ops.records import FLOW_FILE, read_json_lines
from drzero.recipe.compose import compose_stage
from drzero.stages.watch import PROGRESS
from environments.agent.contract import RewardRule

RAISING = ("rollout", "reward")  # if one fails, its rollout leaves no row
FLOW_EVERY_S = 1.0


@dataclass
class Rollouts:
    """The trainer's results."""

    folder: Path
    title: str
    runs: list[AgentRun] = field(default_factory=list)
    seconds: float = 0.0  # spent waiting for rollouts, in all batches
    figures: list[tuple[str, str]] = field(default_factory=list)  # further lines of the table
    ended: RunFailed | None = None  # why the trainer ended early


def run_rollouts(stage: str, overrides: Sequence[str], batches: int, reward: RewardRule) -> Rollouts:
    """Raises PreflightFailed, AlreadyRunning, CheckError, or the trainer's error if it made no rollout."""
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
    """Make the run this many batches long, without an update or a save."""
    with open_dict(config):
        trainer = config.trainer
        trainer.total_training_steps, trainer.critic_warmup = batches, batches + 1
        trainer.save_freq = trainer.test_freq = -1
        trainer.val_before_train, trainer.resume_mode = False, "disable"
        trainer.rollout_data_dir, trainer.logger = str(Path(config.run.dir) / DUMPS), ["file"]
        # The bench is to find failed rollouts, and a collapse would save.
        config.run.max_failed_share, config.collapse.policy = 1.0, "warn"
        config.flow.every_s = FLOW_EVERY_S


def read_rollouts(done: Rollouts, expected: int, reward: RewardRule) -> None:
    """Add a run for each rollout, with or without a row."""
    lines = [line for path in sorted((done.folder / DUMPS).glob("*.jsonl")) for line in read_json_lines(path)]
    # The last row of a rollout with branches is its own.
    rows = list({line["key"].rpartition("_")[0]: line for line in lines}.values())
    workers = read_workers(done.folder / PROGRESS, time.time())
    causes = [
        cause
        for worker in workers
        for kind in RAISING
        for cause, count in worker.causes.get(kind, {}).items()
        for _ in range(count)
    ]
    lost = "the trainer ended before it" if done.ended else "left no row: see trainer.log"
    causes += [lost] * (expected - len(rows) - len(causes))
    for number, row in enumerate(rows):
        scored = row["reward"]
        why = None if scored.get("valid", True) else str(scored["reason_invalid"])
        cause = why or reward.fault(scored["score"])
        kept, failure = (row, Failure(cause)) if cause else (None, None)
        done.runs.append(AgentRun(number, None, kept, row["rollout_s"], scored["score"], failure))
    done.runs += [
        AgentRun(n, None, None, failure=Failure(cause)) for n, cause in enumerate(causes, len(rows))
    ]
    beats = read_json_lines(done.folder / HEARTBEATS)
    done.seconds = sum(b["time"] - a["time"] for a, b in pairwise(beats) if a["phase"] == "rollout")
    done.figures = list(_figures(rows, workers, done.folder / FLOW_FILE))


def _figures(
    rows: Sequence[dict[str, Any]], workers: Sequence[Worker], stream: Path
) -> Iterator[tuple[str, str]]:
    if rows:
        turns = [turn for row in rows for turn in row["trajectory"]["turns"]]
        calls = sum(len(turn["calls"]) for turn in turns)
        yield "calls a run", f"{len(turns) / len(rows):.3g} turns, {calls / len(rows):.3g} tool calls"
    done = finished(workers)
    if done.get("rollout"):
        yield "tokens a run", f"{done.get('token', 0.0) / done['rollout']:.4g} written"
    if done.get("reward"):
        seconds = sum(worker.seconds.get("reward", 0.0) for worker in workers)
        yield "reward took", f"{seconds / done['reward']:.2f} s each, after the rollout"
    points = [record["points"] for record in read_json_lines(stream)]
    most = {
        name: max((one[name]["depth"] or 0 for one in points if name in one), default=0)
        for name in ("rollout", "generation")
    }
    if most["rollout"]:
        seen = f"seen every {FLOW_EVERY_S:g} s"
        yield "most at once", f"{most['rollout']:g} runs, {most['generation']:g} turns in flight, {seen}"
