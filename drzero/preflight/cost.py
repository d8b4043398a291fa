"""The estimate of a stage's time and cost: a range, and whether it was measured or assumed.

Measured times come from an earlier start or the last iteration, with the same model, batch and machine.
Otherwise they are assumed, by arithmetic over tokens with the shares below, which are guesses from practice.
With P weights, generating a token takes 2P operations, training on one 6P (8P with gradient checkpointing):

    generated   rows × FILLED × response         at DECODING of the GPUs' bfloat16 peak
    attempts    questions × n × PLAYED × context at DECODING
    trained     rows × TRAINED × (prompt + response) at TRAINING
    and OVERHEAD_S a step (weights to the engine, searches, data), STARTUP_S once
    a merge     MERGE_BYTES × weights                at DISK, and MERGE_STARTUP_S

Each is a (low, high) pair, so the ends may differ by a factor of ten. Measured steps narrow the range. The
expected value is the geometric mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from data.benchmarks import HUB_PREFIX, choose_questions, load_benchmark, split_name
from data.errors import DataError
from drzero.checkpoints.reading import read_settings
from drzero.preflight.context import CheckContext
from drzero.preflight.inputs import question_fields
from drzero.preflight.model_shape import ModelShape
from drzero.recipe.errors import CheckError
from drzero.recipe.gpu_prices import RATES_DATE
from drzero.recipe.gpu_split import pools
from drzero.recipe.metrics import read_metrics
from drzero.recipe.settings.schema import pace_keys
from verl_ext.checkpoints import saved_step

Range = np.ndarray  # the low and the high end

FILLED = np.array((0.2, 0.8))
PLAYED = np.array((0.05, 0.4))
TRAINED = np.array((0.3, 1.0))
DECODING = np.array((0.10, 0.02))  # fast end first, because work is divided by this share of the peak
TRAINING = np.array((0.40, 0.15))
OVERHEAD_S = np.array((3, 60))
STARTUP_S = np.array((90, 900))
MERGE_STARTUP_S = np.array((20, 120))
MERGE_BYTES = 6  # a weight is read in float32 and written in bfloat16
DISK = np.array((500e6, 50e6))  # bytes a second; a volume over a network is at the slow end
# On a CPU: operations per second, as measured on two cores, and the rest of a step.
CPU_DECODING = np.array((30e9, 10e9))
CPU_TRAINING = np.array((90e9, 40e9))
CPU_OVERHEAD_S = np.array((5, 30))
CPU_STARTUP_S = np.array((40, 240))
HUB_QUESTIONS = 51_000  # questions assumed for a benchmark file on the hub, as in the seven published ones


@dataclass(frozen=True)
class Estimate:
    """A range of seconds, its price, and its source."""

    low_s: float
    high_s: float
    source: str
    usd_per_hour: float
    summed_s: float | None = None  # the expected seconds of several stages in sequence

    @property
    def expected_s(self) -> float:
        """The geometric mean, or the sum over several stages."""
        return math.sqrt(self.low_s * self.high_s) if self.summed_s is None else self.summed_s

    def usd(self, seconds: float) -> float:
        """The cost of so many seconds."""
        return seconds / 3600 * self.usd_per_hour

    def __str__(self) -> str:
        time = f"{hours(self.low_s)} to {hours(self.high_s)}"
        if not self.usd_per_hour:
            return f"{time}, {self.source}"
        money = f"${self.usd(self.low_s):,.0f} to ${self.usd(self.high_s):,.0f}"
        rate = f"${self.usd_per_hour:.2f}/h, rates of {RATES_DATE}"
        return f"{time}, {money} ({rate}), {self.source}"


def estimate(ctx: CheckContext) -> Estimate | None:
    """A stage's estimate; None if too little is known."""
    config = ctx.config
    if ctx.stage == "merge":
        shape = ctx.shape(config.base_model)
        if shape is None:
            return None
        time = MERGE_STARTUP_S + MERGE_BYTES * shape.parameters / DISK
        source = "assumed: a merge reads and writes the weights once"
    elif ctx.trains:
        steps = max(0, config.trainer.total_training_steps - _steps_done(ctx))
        step, source = step_time(ctx)
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


def step_time(ctx: CheckContext) -> tuple[Range | None, str]:
    """A training step's seconds and their source; None if too little is known."""
    if (measured := _measured_steps(ctx.config)) is not None:
        return measured, "measured: the steps of an earlier start"
    parts = step_parts(ctx)
    step = None if parts is None else sum(parts.values(), np.zeros(2))
    return step, "assumed: no earlier run of this model, batch and machine"


def _steps_done(ctx: CheckContext) -> int:
    """Steps done when the run starts, by itself or by the run it continues."""
    config, before = ctx.config, ctx.config.get("continue_from")
    if done := saved_step(Path(config.run.dir)) or saved_step(Path(before or "/nonexistent")):
        return done
    # In a loop, the last iteration's challenger will have finished by then.
    comes = before is not None and ctx.is_of_the_loop(before)
    return max(0, config.trainer.total_training_steps - config.steps_per_iteration) if comes else 0


def _measured_steps(config: DictConfig) -> Range | None:
    """Shortest and longest step of an earlier start, without the first, which compiles and loads."""
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


def step_parts(ctx: CheckContext) -> dict[str, Range] | None:
    """The assumed seconds of a step: policy rollouts, solver attempts, update, and the rest.

    None if the model is unknown.
    """
    config, data = ctx.config, ctx.config.data
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    solver = ctx.shape(config.solver.model_path)
    if shape is None:
        return None
    rows = data.train_batch_size * config.actor_rollout_ref.rollout.n
    training, sampling = (pools(config)[place] for place in (0, -1))
    parts = {"rollouts": _generation(ctx, shape, rows * data.max_response_length, FILLED, sampling)}
    if config.method == "hrpo" and solver is not None:
        played = data.train_batch_size * config.solver.attempts * config.solver.max_context_tokens
        parts["attempts"] = _generation(ctx, solver, played, PLAYED)
    per_weight = 8 if config.actor_rollout_ref.model.enable_gradient_checkpointing else 6
    tokens = TRAINED * rows * (data.max_prompt_length + data.max_response_length)
    parts["update"] = per_weight * shape.parameters * tokens / _speed(ctx, TRAINING, CPU_TRAINING, training)
    return parts | {"rest": OVERHEAD_S if ctx.machine.gpu else CPU_OVERHEAD_S}


def _generation(
    ctx: CheckContext, shape: ModelShape, tokens: float, share: Range, gpus: int | None = None
) -> Range:
    return share * 2 * shape.parameters * tokens / _speed(ctx, DECODING, CPU_DECODING, gpus)


def _validation(ctx: CheckContext, steps: int) -> Range:
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
    """Conversations of a stage without training; None if its files are unreadable."""
    config = ctx.config
    try:
        if ctx.stage == "synthesize":
            rows = pq.read_metadata(config.data.train_files).num_rows
            return int(math.ceil(rows / config.partitions) * config.samples)
        if ctx.stage == "preview":
            return int(config.rows * (1 + config.solver.attempts))
        if ctx.plays:
            return config.num_examples or None
        if ctx.stage == "evaluate":
            return sum(_questions(config, str(source)) for source in config.benchmarks)
    except (DataError, OSError, ValueError, KeyError, TypeError):  # the data checks report such a file
        return None
    return None


def _questions(config: DictConfig, source: str) -> int:
    of_each = config.questions_per_benchmark
    if split_name(source)[1].startswith(HUB_PREFIX):  # not downloaded for an estimate
        return int(min(HUB_QUESTIONS, 7 * of_each) if of_each else HUB_QUESTIONS)
    found = load_benchmark(source, question_fields(config))
    asked = [q for q in found if config.hops is None or q.hop is None or q.hop in config.hops]
    return len(choose_questions(asked, of_each, config.data.seed))


def _startup(ctx: CheckContext) -> Range:
    return STARTUP_S if ctx.machine.gpu else CPU_STARTUP_S


def _speed(ctx: CheckContext, shares: Range, on_cpu: Range, gpus: int | None = None) -> Range:
    """FLOP/s of so many GPUs of each machine, by default of all."""
    gpu = ctx.machine.gpu
    if gpu is None:
        return on_cpu
    return shares * gpu.bf16_tflops * 1e12 * (gpus or ctx.machine.gpus) * ctx.machine.nodes


def hours(seconds: float) -> str:
    """Seconds as text, such as `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def together(estimates: Sequence[Estimate]) -> Estimate:
    """The estimate of one or more stages in sequence."""
    low, high, expected = (
        sum(seconds) for seconds in zip(*((e.low_s, e.high_s, e.expected_s) for e in estimates), strict=True)
    )
    measured = sum(estimate.source.startswith("measured") for estimate in estimates)
    source = f"{len(estimates)} stages together, {measured or 'none'} of them measured"
    return Estimate(low, high, source, estimates[0].usd_per_hour, expected)
