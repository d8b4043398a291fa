"""The estimate of a stage's time and cost: a range, and what it rests on (docs/preflight.md).

An assumed one is arithmetic over tokens with the shares below, which are guesses from practice.
With P weights, generating a token takes 2P operations, training on one 6P (8P with gradient checkpointing):

    generated   rows × FILLED × response         at DECODING of the GPUs' bfloat16 peak
    attempts    questions × n × PLAYED × context at DECODING
    trained     rows × TRAINED × (prompt + response) at TRAINING
    and OVERHEAD_S a step (weights to the engine, searches, data), STARTUP_S once
    a merge     MERGE_BYTES × weights                at DISK, and MERGE_STARTUP_S

Each is a (low, high) pair. The ends of an assumed one may differ by a factor of ten, of the others by three
at most. The expected value is the geometric mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from omegaconf import DictConfig

from data.benchmarks import HUB_PREFIX, choose_questions, load_benchmark, split_name
from data.errors import DataError
from drzero.preflight.context import CheckContext
from drzero.preflight.earlier import find_earlier
from drzero.preflight.inputs import question_fields
from drzero.preflight.model_shape import ModelShape
from drzero.recipe.gpu_prices import RATES_DATE
from drzero.recipe.gpu_split import pools
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
# On a CPU: operations per second, and the rest of a step. Two cores that were idle gave 60e9 and 200e9.
CPU_DECODING = np.array((80e9, 25e9))
CPU_TRAINING = np.array((250e9, 80e9))
CPU_OVERHEAD_S = np.array((3, 20))
CPU_STARTUP_S = np.array((40, 240))
HUB_QUESTIONS = 51_000  # questions assumed for a benchmark file on the hub, as in the seven published ones


SPREAD = np.array((1 / math.sqrt(3), math.sqrt(3)))
"""How far the time may be from an earlier run's, scaled by operations over the peak."""
NARROWER = "run three steps to narrow it: drzero {} … run.name=trial trainer.total_training_steps=3"
_MEASURED_AS = {"rollouts": "sampling", "attempts": "sampling"}  # veRL's timing_s/gen has both


@dataclass(frozen=True)
class Estimate:
    """A range of seconds, its price, and what it rests on."""

    low_s: float
    high_s: float
    basis: str
    usd_per_hour: float
    run: str = ""  # the earlier run that it rests on
    detail: str = ""
    advice: str = ""  # what would narrow the range
    summed_s: float | None = None  # the expected seconds of several stages in sequence

    @property
    def expected_s(self) -> float:
        """The geometric mean, or the sum over several stages."""
        return math.sqrt(self.low_s * self.high_s) if self.summed_s is None else self.summed_s

    @property
    def source(self) -> str:
        """What it rests on, with the counts behind it."""
        return "; ".join(filter(None, (f"{self.basis} {self.run}".rstrip(), self.detail)))

    def usd(self, seconds: float) -> float:
        """The cost of so many seconds."""
        return seconds / 3600 * self.usd_per_hour

    @property
    def range(self) -> str:
        """Time, and its price if the machine has one."""
        time = f"{hours(self.low_s)} to {hours(self.high_s)}"
        if not self.usd_per_hour:
            return time
        return f"{time}, ${self.usd(self.low_s):,.0f} to ${self.usd(self.high_s):,.0f}"

    def __str__(self) -> str:
        rate = f" (${self.usd_per_hour:.2f}/h, rates of {RATES_DATE})" if self.usd_per_hour else ""
        return f"{self.range}{rate}, {'; '.join(filter(None, (self.source, self.advice)))}"


@dataclass(frozen=True)
class Pace:
    """Seconds of a stage's parts, of a training a step's, and what they rest on."""

    parts: dict[str, Range]
    basis: str = "assumed: no earlier run of this model and engine"
    run: str = ""
    measured_step: Range | None = None

    @property
    def step(self) -> Range:
        """Seconds of a training step."""
        if self.measured_step is not None:
            return self.measured_step
        return sum((part for name, part in self.parts.items() if name != "start-up"), np.zeros(2))


def estimate(ctx: CheckContext) -> Estimate | None:
    """A stage's estimate; None if too little is known."""
    pace = pace_of(ctx)
    if pace is None:
        return None
    time, detail, advice = sum(pace.parts.values(), np.zeros(2)), "", ""
    if ctx.trains:
        steps = max(0, ctx.config.trainer.total_training_steps - _steps_done(ctx))
        time = pace.parts["start-up"] + steps * pace.step + _validation(ctx, steps, pace.parts["rollouts"])
        detail = f"{steps} steps of {pace.step[0]:.0f} to {pace.step[1]:.0f} s"
        advice = "" if pace.measured_step is not None else NARROWER.format(ctx.stage)
    elif ctx.stage != "merge":
        detail = f"{_conversations(ctx):,} conversations"
    low_s, high_s = time.tolist()
    return Estimate(low_s, high_s, pace.basis, ctx.machine.usd_per_hour, pace.run, detail, advice)


def pace_of(ctx: CheckContext) -> Pace | None:
    """A stage's pace, by an earlier run if there is one; None if too little is known."""
    parts = _assumed_parts(ctx)
    if parts is None or ctx.stage == "merge":
        return None if parts is None else Pace(parts, "assumed: a merge reads and writes the weights once")
    earlier = find_earlier(ctx)
    past = _assumed_parts(earlier.ctx) if earlier else None
    if earlier is None or past is None:
        return Pace(parts)
    for name, seconds in earlier.seconds.items():
        named = [part for part in parts if _MEASURED_AS.get(part, part) == name]
        then = sum(_middle(past[part]) for part in past if _MEASURED_AS.get(part, part) == name)
        parts |= {part: _middle(parts[part]) * seconds / then * SPREAD for part in named}
    if not earlier.is_same:
        rule = "by weights and tokens" + (" over the GPUs' bfloat16 peak" if ctx.machine.gpu else "")
        return Pace(parts, f"scaled {rule} from", f"{earlier.name} ({earlier.ctx.machine})")
    mean = sum(seconds for name, seconds in earlier.seconds.items() if name != "start-up")
    steps = None if earlier.steps is None else np.clip(earlier.steps, *(mean * SPREAD))
    return Pace(parts, "measured in", earlier.name, steps)


def _assumed_parts(ctx: CheckContext) -> dict[str, Range] | None:
    start = {"start-up": STARTUP_S if ctx.machine.gpu else CPU_STARTUP_S}
    if ctx.stage == "merge":
        if (shape := ctx.shape(ctx.config.base_model)) is None:
            return None
        return {"start-up": MERGE_STARTUP_S, "files": MERGE_BYTES * shape.parameters / DISK}
    if ctx.trains:
        parts = step_parts(ctx)
        return None if parts is None else start | parts
    shape = ctx.shape(ctx.config.solver.model_path) if ctx.serves_model else None
    conversations = _conversations(ctx)
    if shape is None or conversations is None:
        return None
    tokens = conversations * ctx.config.solver.max_context_tokens
    return start | {"conversations": _generation(ctx, shape, tokens, PLAYED)}


def _middle(of: Range) -> float:
    """The geometric mean of the ends."""
    return float(math.sqrt(of[0] * of[1]))


def _steps_done(ctx: CheckContext) -> int:
    """Steps done when the run starts, by itself or by the run it continues."""
    config, before = ctx.config, ctx.config.get("continue_from")
    if done := saved_step(Path(config.run.dir)) or saved_step(Path(before or "/nonexistent")):
        return done
    # In a loop, the last iteration's challenger will have finished by then.
    comes = before is not None and ctx.is_of_the_loop(before)
    return max(0, config.trainer.total_training_steps - config.steps_per_iteration) if comes else 0


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


def _validation(ctx: CheckContext, steps: int, rollouts: Range) -> Range:
    """Seconds of all validations, whose rows take as long as a step's `rollouts`."""
    config, trainer = ctx.config, ctx.config.trainer
    if trainer.test_freq <= 0:
        return np.zeros(2)
    try:
        rows = pq.read_metadata(config.data.val_files).num_rows
    except (OSError, ValueError, TypeError):  # no file yet
        rows = config.data.train_batch_size
    times = math.ceil(steps / trainer.test_freq) + bool(trainer.val_before_train)
    return times * rows / (config.data.train_batch_size * config.actor_rollout_ref.rollout.n) * rollouts


def _conversations(ctx: CheckContext) -> int | None:
    """Conversations of a stage without training; None if its files are unreadable."""
    config = ctx.config
    try:
        if ctx.stage == "synthesize":
            rows = pq.read_metadata(config.data.train_files).num_rows
            return int(math.ceil(rows / config.partitions) * config.samples)
        if ctx.stage == "preview":
            return int(config.rows * (1 + config.solver.attempts))
        if ctx.plays and ctx.stage == "evaluate":
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


def together(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """The estimate of several stages in sequence. Some may be unknown."""
    known = [one for one in estimates if one is not None]
    if not known:
        return None
    low, high, expected = (
        sum(seconds) for seconds in zip(*((e.low_s, e.high_s, e.expected_s) for e in known), strict=True)
    )
    runs: dict[str, list[str]] = {}
    for one in known:
        runs.setdefault(one.basis.partition(":")[0], []).append(one.run.partition(" ")[0])
    told = (
        f"{'all' if len(names) == len(known) else len(names)} {basis} {', '.join(dict.fromkeys(names))}"
        for basis, names in runs.items()
    )
    basis = f"{len(known)} of {len(estimates)} stages, {', '.join(map(str.rstrip, told))}"
    unknown = "the others need the output of earlier stages" if len(known) < len(estimates) else ""
    advice = next((one.advice for one in known if one.advice), "")
    return Estimate(low, high, basis, known[0].usd_per_hour, "", unknown, advice, expected)
