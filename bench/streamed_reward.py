"""The challenger's reward, as `bench.gpu` times it: streamed, and held back until the step's last rollout.

    python -m bench.gpu sglang-streamed                                  # on one GPU
    python -m bench.gpu --hardware cpu --batch 8 reference-streamed

One run of the challenger stage on the demo, whose steps take turns. *Streamed*: each question is attempted as
soon as its rollout is done, as this recipe does. *Barrier*: the reward waits until the step's last rollout is
done. All else is the same. The first step of each arm is left out.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drzero.ops.records import Record, append_json_lines, read_json_lines
from verl_ext import rewards

STEPS = 8
"""Of a run: four of each arm, of which three count."""
STREAMED, BARRIER = "streamed", "barrier"
FOLDER, ROWS = "DRZERO_BENCH_FOLDER", "DRZERO_BENCH_ROWS"
"""Variables that tell the reward workers where they write, and the rows of a step."""
_EVERY_S = 0.05  # between looks at how many rollouts are done


@dataclass(frozen=True)
class Step:
    """Rollouts and rewards of one step, in seconds from its begin."""

    arm: str
    rollouts: float
    """When the last rollout was done."""
    first: float
    """When the first question's attempts began."""
    took: float
    tokens: int
    """Sampled by the attempts."""


def environment(folder: Path, rows: int) -> dict[str, str]:
    """Variables of a run whose reward is `challenger_score`."""
    folder.mkdir(parents=True)
    return {FOLDER: str(folder), ROWS: str(rows)}


async def challenger_score(*args: Any, **named: Any) -> dict[str, Any]:
    """The recipe's reward of one trajectory; in every other step it waits for the step's last rollout."""
    folder, rows = Path(os.environ[FOLDER]), int(os.environ[ROWS])
    done = time.time()
    arrivals = folder / "arrivals"
    file = os.open(arrivals, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, b".")
    number = os.lseek(file, 0, os.SEEK_CUR) - 1  # where this byte went, whoever else writes
    os.close(file)
    step = number // rows
    while arm_of(step) == BARRIER and arrivals.stat().st_size < (step + 1) * rows:
        await asyncio.sleep(_EVERY_S)
    begun = time.time()
    score = await rewards.challenger_score(*args, **named)
    line = {
        "step": step,
        "done": done,
        "begun": begun,
        "ended": time.time(),
        "tokens": score["attempt_tokens"],
    }
    append_json_lines(folder / f"rewards-{os.getpid()}.jsonl", line)
    return score


def arm_of(step: int) -> str:
    """Steps take turns, from 0."""
    return BARRIER if step % 2 else STREAMED


def tables(folder: Path, beats: Sequence[Record]) -> str:
    """A run's steps and the ratio, from the workers' files and the trainer's heartbeats."""
    steps = read(folder, beats)
    return f"{table(steps)}\n\n{verdict(steps)}"


def read(folder: Path, beats: Sequence[Record]) -> list[Step]:
    """The steps of a run, without the first of each arm."""
    rewarded = [line for path in folder.glob("rewards-*.jsonl") for line in read_json_lines(path)]
    begins = [beat["time"] for beat in beats if beat["phase"] == "rollout"]
    steps = []
    for step, begin in list(enumerate(begins))[2:]:
        lines = [line for line in rewarded if line["step"] == step]
        last, first, end = (
            choose(line[key] for line in lines) - begin
            for choose, key in ((max, "done"), (min, "begun"), (max, "ended"))
        )
        steps.append(Step(arm_of(step), last, first, end, sum(line["tokens"] for line in lines)))
    return steps


def table(steps: Sequence[Step]) -> str:
    """A row for each step, in the order in which they were run."""
    columns = ("arm", "step, s", "last rollout done, s", "first attempt begins, s", "attempts' tokens")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for step in steps:
        times = f"{step.took:.1f} | {step.rollouts:.1f} | {step.first:.1f}"
        lines.append(f"| {step.arm} | {times} | {step.tokens:,} |")
    return "\n".join(lines)


def verdict(steps: Sequence[Step]) -> str:
    """The ratio of the means, and its spread by pairs of neighbours."""
    streamed, barrier = ([step.took for step in steps if step.arm == arm] for arm in (STREAMED, BARRIER))
    pairs = [waited / flowed for flowed, waited in zip(streamed, barrier, strict=False)]
    ratio = statistics.fmean(barrier) / statistics.fmean(streamed)
    return (
        f"**With the barrier a step takes {ratio:.2f} times as long** "
        f"({min(pairs):.2f} to {max(pairs):.2f} by pair)."
    )
