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

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from pipeline.metrics import read_metrics
from pipeline.preflight.context import CheckContext
from pipeline.preflight.model_shape import ModelShape
from pipeline.rates import RATES_DATE
from pipeline.settings.schema import pace_keys
from verl_ext.checkpoints import saved_step

Range = tuple[float, float]

FILLED: Range = (0.2, 0.8)
PLAYED: Range = (0.05, 0.4)
TRAINED: Range = (0.3, 1.0)
DECODING: Range = (0.10, 0.02)
"""Fast end first, because work is divided by this share of the peak."""
TRAINING: Range = (0.40, 0.15)
OVERHEAD_S: Range = (15, 90)
STARTUP_S: Range = (300, 1200)
MERGE_S: Range = (60, 1800)
# On a CPU: operations per second, not shares, as measured on two cores; and the rest of a step.
CPU_DECODING: Range = (30e9, 10e9)
CPU_TRAINING: Range = (90e9, 40e9)
CPU_OVERHEAD_S: Range = (5, 30)
CPU_STARTUP_S: Range = (40, 240)
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
    rate = ctx.machine.usd_per_hour
    if ctx.stage == "merge":
        return Estimate(*MERGE_S, "assumed: a merge reads and writes the weights once", rate)
    if ctx.trains:
        return _training(ctx, rate)
    shape = ctx.shape(ctx.config.solver.model_path) if ctx.serves_model else None
    conversations = _conversations(ctx)
    if shape is None or conversations is None:
        return None
    tokens = conversations * ctx.config.solver.max_context_tokens
    time = _add(_startup(ctx), _generation(ctx, shape, tokens, PLAYED))
    return Estimate(*time, f"assumed: {conversations:,} conversations", rate)


def _training(ctx: CheckContext, rate: float) -> Estimate | None:
    config = ctx.config
    steps = max(0, config.trainer.total_training_steps - _steps_done(ctx))
    measured = _measured_steps(config)
    if measured:
        step, source = measured, "measured: the steps of an earlier start"
    else:
        assumed = _step(ctx)
        if assumed is None:
            return None
        step, source = assumed, "assumed: no earlier run of this model, batch and machine"
    time = _add(_startup(ctx), _times(step, steps), _validation(ctx, steps))
    return Estimate(*time, f"{source}; {steps} steps of {step[0]:.0f} to {step[1]:.0f} s", rate)


def _steps_done(ctx: CheckContext) -> int:
    """Steps already done when the run starts: its own, or those of the run that it continues."""
    config, before = ctx.config, ctx.config.get("continue_from")
    if done := saved_step(Path(config.run.dir)) or saved_step(Path(before or "/nonexistent")):
        return done
    # In a loop, the last iteration's challenger will have finished by then.
    comes = before is not None and ctx.is_to_come(before)
    return max(0, config.trainer.total_training_steps - config.steps_per_iteration) if comes else 0


def _measured_steps(config: DictConfig) -> Range | None:
    """Shortest and longest step of an earlier start, without its first one, which compiles and loads."""
    folder = Path(config.run.dir)
    iteration = config.iteration
    before = folder.with_name(folder.name.replace(f"iter{iteration}", f"iter{iteration - 1}"))
    for place in dict.fromkeys((folder, before)):
        if _is_comparable(place, config):
            seconds = [
                step["timing_s/step"] for step in read_metrics(place).values() if "timing_s/step" in step
            ]
            if len(seconds) > 2:
                return min(seconds[1:]), max(seconds[1:])
    return None


def _is_comparable(folder: Path, config: DictConfig) -> bool:
    if not (folder / "resolved.yaml").is_file():
        return False
    before = OmegaConf.load(folder / "resolved.yaml")
    return all(OmegaConf.select(before, key) == OmegaConf.select(config, key) for key in pace_keys())


def _step(ctx: CheckContext) -> Range | None:
    config = ctx.config
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    solver = ctx.shape(config.solver.model_path)
    if shape is None:
        return None
    batch, data = config.data.train_batch_size, config.data
    rows = batch * config.actor_rollout_ref.rollout.n
    parts = [_generation(ctx, shape, rows * data.max_response_length, FILLED)]
    if config.method == "hrpo" and solver is not None:
        played = batch * config.solver.attempts * config.solver.max_context_tokens
        parts.append(_generation(ctx, solver, played, PLAYED))
    parts.append(_update(ctx, shape, rows * (data.max_prompt_length + data.max_response_length)))
    return _add(*parts, OVERHEAD_S if ctx.machine.gpu else CPU_OVERHEAD_S)


def _generation(ctx: CheckContext, shape: ModelShape, tokens: float, share: Range) -> Range:
    operations = _times(share, 2 * shape.parameters * tokens)
    return _over(operations, _speed(ctx, DECODING, CPU_DECODING))


def _update(ctx: CheckContext, shape: ModelShape, tokens: float) -> Range:
    factor = 8 if ctx.config.actor_rollout_ref.model.enable_gradient_checkpointing else 6
    operations = _times(TRAINED, factor * shape.parameters * tokens)
    return _over(operations, _speed(ctx, TRAINING, CPU_TRAINING))


def _validation(ctx: CheckContext, steps: int) -> Range:
    """Validations every `test_freq` steps, after the last, and before the first if configured."""
    config, trainer = ctx.config, ctx.config.trainer
    shape = ctx.shape(config.actor_rollout_ref.model.path)
    if trainer.test_freq <= 0 or shape is None:
        return 0.0, 0.0
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
                asked += HUB_QUESTIONS if str(source).startswith("hf://") else _lines(Path(source))
            return min(asked, 7 * of_each * len(config.benchmarks)) if of_each else asked
    except (OSError, ValueError):  # a missing or damaged file, which the data checks report
        return None
    return None


def _lines(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _startup(ctx: CheckContext) -> Range:
    return STARTUP_S if ctx.machine.gpu else CPU_STARTUP_S


def _speed(ctx: CheckContext, shares: Range, on_cpu: Range) -> Range:
    gpu = ctx.machine.gpu
    if gpu is None:
        return on_cpu
    return _times(shares, gpu.bf16_tflops * 1e12 * ctx.machine.gpus * ctx.machine.nodes)


def _add(*ranges: Range) -> Range:
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _times(pair: Range, factor: float) -> Range:
    return pair[0] * factor, pair[1] * factor


def _over(work: Range, speed: Range) -> Range:
    """Seconds: the least work at the highest speed, the most work at the lowest."""
    return work[0] / speed[0], work[1] / speed[1]


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def together(estimates: Sequence[Estimate]) -> Estimate:
    """The estimate of stages that run in sequence; raises ValueError for none."""
    if not estimates:
        raise ValueError("no estimates to add")
    time = _add(*((one.low_s, one.high_s) for one in estimates))
    expected = sum(one.expected_s for one in estimates)
    source = f"{len(estimates)} stages together"
    return Estimate(*time, source, estimates[0].usd_per_hour, expected)


def to_dict(estimate: Estimate) -> Mapping[str, object]:
    """The estimate for JSON, seconds and dollars rounded."""
    return {
        "low_s": round(estimate.low_s),
        "expected_s": round(estimate.expected_s),
        "high_s": round(estimate.high_s),
        "low_usd": round(estimate.usd(estimate.low_s), 2),
        "expected_usd": round(estimate.usd(estimate.expected_s), 2),
        "high_usd": round(estimate.usd(estimate.high_s), 2),
        "usd_per_hour": round(estimate.usd_per_hour, 4),
        "rates_of": RATES_DATE,
        "source": estimate.source,
    }
