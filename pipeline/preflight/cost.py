"""The estimate of a stage's time and cost: a range, and whether its step time was measured or assumed.

Measured: the step times of an earlier start of the same run, or of the last iteration's, with the same model,
batch and machine. Assumed otherwise: arithmetic over tokens, with the shares below, which are guesses from
practice. With P weights, generating a token takes 2P operations, training on one 6P (8P with gradient
checkpointing):

    generated   rows × FILLED × response         at DECODING of the GPUs' bfloat16 peak
    attempts    questions × n × PLAYED × context at DECODING
    trained     rows × TRAINED × (prompt + response) at TRAINING
    and OVERHEAD_S a step (weights to the engine, searches, data), STARTUP_S once

Each is a (low, high) pair, so the range is wide: its ends may differ by a factor of ten. It narrows to the
spread of the measured steps once some exist. The expected value is the geometric mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from pipeline.checkpoints.reading import read_settings
from pipeline.errors import CheckError
from pipeline.metrics import read_metrics
from pipeline.preflight.context import CheckContext
from pipeline.preflight.model_shape import ModelShape
from pipeline.rates import RATES_DATE
from pipeline.settings.schema import pace_keys
from verl_ext.checkpoints import saved_step

Range = np.ndarray
"""Two numbers: the low end, and the high one."""

FILLED = np.array((0.2, 0.8))
PLAYED = np.array((0.05, 0.4))
TRAINED = np.array((0.3, 1.0))
DECODING = np.array((0.10, 0.02))
"""Fast end first, because work is divided by this share of the peak."""
TRAINING = np.array((0.40, 0.15))
OVERHEAD_S = np.array((15, 90))
STARTUP_S = np.array((300, 1200))
MERGE_S = np.array((60, 1800))
# On a CPU: operations per second, not shares, as measured on two cores; and the rest of a step.
CPU_DECODING = np.array((30e9, 10e9))
CPU_TRAINING = np.array((90e9, 40e9))
CPU_OVERHEAD_S = np.array((5, 30))
CPU_STARTUP_S = np.array((40, 240))
HUB_QUESTIONS = 51_000
"""Questions assumed for a benchmark file on the hub: those of the seven published ones."""


@dataclass(frozen=True)
class Estimate:
    """A range of seconds, its price, and its source."""

    low_s: float
    high_s: float
    source: str
    """`measured …` or `assumed …`."""
    usd_per_hour: float
    summed_s: float | None = None
    """The expected seconds of several stages in sequence."""

    @property
    def expected_s(self) -> float:
        """The geometric mean; of several stages, the sum of theirs."""
        return math.sqrt(self.low_s * self.high_s) if self.summed_s is None else self.summed_s

    def usd(self, seconds: float) -> float:
        """The cost of so many seconds."""
        return seconds / 3600 * self.usd_per_hour

    def __str__(self) -> str:
        time = f"{_hours(self.low_s)} to {_hours(self.high_s)}"
        if not self.usd_per_hour:
            return f"{time}, {self.source}"
        money = f"${self.usd(self.low_s):,.0f} to ${self.usd(self.high_s):,.0f}"
        rate = f"${self.usd_per_hour:.2f}/h, rates of {RATES_DATE}"
        return f"{time}, {money} ({rate}), {self.source}"


def estimate(ctx: CheckContext) -> Estimate | None:
    """The estimate of a stage; None if too little is known."""
    config = ctx.config
    if ctx.stage == "merge":
        time, source = MERGE_S, "assumed: a merge reads and writes the weights once"
    elif ctx.trains:
        steps = max(0, config.trainer.total_training_steps - _steps_done(ctx))
        step, source = _measured_steps(config), "measured: the steps of an earlier start"
        if step is None:
            step, source = _step(ctx), "assumed: no earlier run of this model, batch and machine"
        if step is None:
            return None
        time = _startup(ctx) + steps * step + _validation(ctx, steps)
        source += f"; {steps} steps of {step[0]:.0f} to {step[1]:.0f} s"
    else:
        shape = ctx.shape(config.solver.model_path) if ctx.serves_model else None
        conversations = _conversations(ctx)
        if shape is None or conversations is None:
            return None
        tokens = conversations * config.solver.max_context_tokens
        time = _startup(ctx) + _generation(ctx, shape, tokens, PLAYED)
        source = f"assumed: {conversations:,} conversations"
    low_s, high_s = time.tolist()
    return Estimate(low_s, high_s, source, ctx.machine.usd_per_hour)


def _steps_done(ctx: CheckContext) -> int:
    """Steps already done when the run starts: its own, or those of the run that it continues."""
    config, before = ctx.config, ctx.config.get("continue_from")
    if done := saved_step(Path(config.run.dir)) or saved_step(Path(before or "/nonexistent")):
        return done
    # In a loop, the last iteration's challenger will have finished by then.
    comes = before is not None and ctx.is_of_the_loop(before)
    return max(0, config.trainer.total_training_steps - config.steps_per_iteration) if comes else 0


def _measured_steps(config: DictConfig) -> Range | None:
    """Shortest and longest step of an earlier start, without its first one, which compiles and loads."""
    folder = Path(config.run.dir)
    iteration = config.iteration
    before = folder.with_name(folder.name.replace(f"iter{iteration}", f"iter{iteration - 1}"))
    for place in dict.fromkeys((folder, before)):
        try:
            earlier = read_settings(place, pace_keys())
        except CheckError:  # the check of the run's start reports it
            continue
        if earlier != {key: OmegaConf.select(config, key) for key in pace_keys()}:
            continue
        steps = read_metrics(place).values()
        seconds = [step["timing_s/step"] for step in steps if "timing_s/step" in step]
        if len(seconds) > 2:
            return np.array((min(seconds[1:]), max(seconds[1:])))
    return None


def _step(ctx: CheckContext) -> Range | None:
    config, data = ctx.config, ctx.config.data
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    solver = ctx.shape(config.solver.model_path)
    if shape is None:
        return None
    rows = data.train_batch_size * config.actor_rollout_ref.rollout.n
    time = _generation(ctx, shape, rows * data.max_response_length, FILLED)
    if config.method == "hrpo" and solver is not None:
        played = data.train_batch_size * config.solver.attempts * config.solver.max_context_tokens
        time += _generation(ctx, solver, played, PLAYED)
    per_weight = 8 if config.actor_rollout_ref.model.enable_gradient_checkpointing else 6
    tokens = TRAINED * rows * (data.max_prompt_length + data.max_response_length)
    time += per_weight * shape.parameters * tokens / _speed(ctx, TRAINING, CPU_TRAINING)
    return time + (OVERHEAD_S if ctx.machine.gpu else CPU_OVERHEAD_S)


def _generation(ctx: CheckContext, shape: ModelShape, tokens: float, share: Range) -> Range:
    return share * 2 * shape.parameters * tokens / _speed(ctx, DECODING, CPU_DECODING)


def _validation(ctx: CheckContext, steps: int) -> Range:
    """Validations every `test_freq` steps, after the last, and before the first if configured."""
    config, trainer = ctx.config, ctx.config.trainer
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    if trainer.test_freq <= 0 or shape is None:
        return np.zeros(2)
    try:
        rows = pq.read_metadata(config.data.val_files).num_rows
    except (OSError, ValueError, TypeError):  # no file yet
        rows = config.data.train_batch_size
    times = math.ceil(steps / trainer.test_freq) + bool(trainer.val_before_train)
    return _generation(ctx, shape, times * rows * config.data.max_response_length, FILLED)


def _conversations(ctx: CheckContext) -> int | None:
    """The number of conversations of a stage without training; None if its files are unreadable."""
    config = ctx.config
    try:
        if ctx.stage == "synthesize":
            rows = pq.read_metadata(config.data.train_files).num_rows
            return int(math.ceil(rows / config.partitions) * config.samples)
        if ctx.stage == "evaluate":
            of_each, asked = config.questions_per_benchmark, 0
            for source in config.benchmarks:
                if str(source).startswith("hf://"):
                    asked += HUB_QUESTIONS
                elif str(source).endswith(".parquet"):
                    asked += pq.read_metadata(source).num_rows
                else:
                    with Path(source).open("rb") as file:
                        asked += sum(1 for _ in file)
            return min(asked, 7 * of_each * len(config.benchmarks)) if of_each else asked
    except (OSError, ValueError):  # a missing or damaged file, which the data checks report
        return None
    return None


def _startup(ctx: CheckContext) -> Range:
    return STARTUP_S if ctx.machine.gpu else CPU_STARTUP_S


def _speed(ctx: CheckContext, shares: Range, on_cpu: Range) -> Range:
    gpu = ctx.machine.gpu
    if gpu is None:
        return on_cpu
    return shares * gpu.bf16_tflops * 1e12 * ctx.machine.gpus * ctx.machine.nodes


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def together(estimates: Sequence[Estimate]) -> Estimate:
    """The estimate of stages that run in sequence, at least one."""
    low, high, expected = (
        sum(seconds) for seconds in zip(*((e.low_s, e.high_s, e.expected_s) for e in estimates), strict=True)
    )
    return Estimate(low, high, f"{len(estimates)} stages together", estimates[0].usd_per_hour, expected)
