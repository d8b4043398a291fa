"""What a stage will take, in time and money: a range, and whether its step time was measured or assumed.

Measured: the step times of an earlier start of the same run, or of the last iteration's, with the same model,
batch and machine. Assumed, otherwise: arithmetic over tokens, with shares that are guesses from practice and
stated below. Of P weights, a token that is generated takes 2P operations, one that is trained on 6P (8P with
gradient checkpointing):

    generated   rows × FILLED × response         at DECODING of the GPUs' bfloat16 peak
    attempts    questions × n × PLAYED × context at DECODING
    trained     rows × TRAINED × (prompt + response) at TRAINING
    and OVERHEAD_S a step (weights to the engine, searches, data), STARTUP_S once

Each is a (low, high) pair, so the range is wide: a factor of ten between its ends is no mistake. It narrows
to the spread of the measured steps once some exist. The expected value is the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from pipeline.rates import RATES_DATE
from pipeline.summary import read_metrics, saved_step

if TYPE_CHECKING:
    from pipeline.model_shape import ModelShape
    from pipeline.subject import Subject

Range = tuple[float, float]

FILLED: Range = (0.2, 0.8)
PLAYED: Range = (0.05, 0.4)
TRAINED: Range = (0.3, 1.0)
DECODING: Range = (0.10, 0.02)
"""Fast end first: a share of the peak is what time is divided by."""
TRAINING: Range = (0.40, 0.15)
OVERHEAD_S: Range = (15, 90)
STARTUP_S: Range = (300, 1200)
MERGE_S: Range = (60, 1800)
# A CPU: operations a second, not shares, as measured on two cores; and the rest of a step.
CPU_DECODING: Range = (30e9, 10e9)
CPU_TRAINING: Range = (90e9, 40e9)
CPU_OVERHEAD_S: Range = (5, 30)
CPU_STARTUP_S: Range = (40, 240)
HUB_QUESTIONS = 51_000
"""Of a benchmark file on the hub that is not here to be counted: the seven published ones."""
# Keys that an earlier run must share for its step times to count.
_COMPARABLE = (
    *("base_model", "method", "data.train_batch_size", "data.max_response_length", "compute.type"),
    *("actor_rollout_ref.rollout.n", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.device"),
)


@dataclass(frozen=True)
class Estimate:
    """Seconds, from and to, at a price; and where they come from."""

    low_s: float
    high_s: float
    source: str
    """`measured …` or `assumed …`."""
    usd_per_hour: float
    summed_s: float | None = None
    """What is expected of several, one after the other."""

    @property
    def expected_s(self) -> float:
        """The geometric mean, of several the sum of theirs."""
        return math.sqrt(self.low_s * self.high_s) if self.summed_s is None else self.summed_s

    def usd(self, seconds: float) -> float:
        """What so long costs."""
        return seconds / 3600 * self.usd_per_hour

    def __str__(self) -> str:
        time = f"{_hours(self.low_s)} to {_hours(self.high_s)}"
        if not self.usd_per_hour:
            return f"{time}, {self.source}"
        money = f"${self.usd(self.low_s):,.0f} to ${self.usd(self.high_s):,.0f}"
        rate = f"${self.usd_per_hour:.2f}/h, rates of {RATES_DATE}"
        return f"{time}, {money} ({rate}), {self.source}"


def estimate(subject: Subject) -> Estimate | None:
    """The estimate of a stage; None where nothing is known to reckon with."""
    rate = subject.machine.usd_per_hour
    if subject.stage == "merge":
        return Estimate(*MERGE_S, "assumed: a merge reads and writes the weights once", rate)
    if subject.trains:
        return _training(subject, rate)
    shape = subject.shape(subject.config.solver.model_path) if subject.serves_model else None
    conversations = _conversations(subject)
    if shape is None or conversations is None:
        return None
    tokens = conversations * subject.config.solver.max_context_tokens
    time = _add(_startup(subject), _generation(subject, shape, tokens, PLAYED))
    return Estimate(*time, f"assumed: {conversations:,} conversations", rate)


def _training(subject: Subject, rate: float) -> Estimate | None:
    config = subject.config
    steps = max(0, config.trainer.total_training_steps - _steps_done(subject))
    measured = _measured_steps(config)
    if measured:
        step, source = measured, "measured: the steps of an earlier start"
    else:
        assumed = _step(subject)
        if assumed is None:
            return None
        step, source = assumed, "assumed: no earlier run of this model, batch and machine"
    time = _add(_startup(subject), _times(step, steps), _validation(subject, steps))
    return Estimate(*time, f"{source}; {steps} steps of {step[0]:.0f} to {step[1]:.0f} s", rate)


def _steps_done(subject: Subject) -> int:
    """Steps that are behind the run when it starts: its own, or those of the run that it goes on from."""
    config, before = subject.config, subject.config.get("continue_from")
    if done := saved_step(Path(config.run.dir)) or saved_step(Path(before or "/nonexistent")):
        return done
    # Of a loop, the last iteration's challenger will have gone all its way.
    comes = before is not None and subject.is_to_come(before)
    return max(0, config.trainer.total_training_steps - config.steps_per_iteration) if comes else 0


def _measured_steps(config: DictConfig) -> Range | None:
    """Shortest and longest step of an earlier start, its first step (which compiles and loads) left out."""
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
    return all(OmegaConf.select(before, key) == OmegaConf.select(config, key) for key in _COMPARABLE)


def _step(subject: Subject) -> Range | None:
    config = subject.config
    shape = subject.shape(config.actor_rollout_ref.model.path)
    solver = subject.shape(config.solver.model_path)
    if shape is None:
        return None
    batch, data = config.data.train_batch_size, config.data
    rows = batch * config.actor_rollout_ref.rollout.n
    parts = [_generation(subject, shape, rows * data.max_response_length, FILLED)]
    if config.method == "hrpo" and solver is not None:
        played = batch * config.solver.attempts * config.solver.max_context_tokens
        parts.append(_generation(subject, solver, played, PLAYED))
    parts.append(_update(subject, shape, rows * (data.max_prompt_length + data.max_response_length)))
    return _add(*parts, OVERHEAD_S if subject.machine.gpu else CPU_OVERHEAD_S)


def _generation(subject: Subject, shape: ModelShape, tokens: float, share: Range) -> Range:
    operations = _times(share, 2 * shape.parameters * tokens)
    return _over(operations, _speed(subject, DECODING, CPU_DECODING))


def _update(subject: Subject, shape: ModelShape, tokens: float) -> Range:
    factor = 8 if subject.config.actor_rollout_ref.model.enable_gradient_checkpointing else 6
    operations = _times(TRAINED, factor * shape.parameters * tokens)
    return _over(operations, _speed(subject, TRAINING, CPU_TRAINING))


def _validation(subject: Subject, steps: int) -> Range:
    """Every `test_freq` steps, before the first if asked for, and after the last."""
    config, trainer = subject.config, subject.config.trainer
    shape = subject.shape(config.actor_rollout_ref.model.path)
    if trainer.test_freq <= 0 or shape is None:
        return 0.0, 0.0
    try:
        rows = pq.read_metadata(config.data.val_files).num_rows
    except (OSError, ValueError, TypeError):  # there is none yet
        rows = config.data.train_batch_size
    times = math.ceil(steps / trainer.test_freq) + bool(trainer.val_before_train)
    return _generation(subject, shape, times * rows * config.data.max_response_length, FILLED)


def _conversations(subject: Subject) -> int | None:
    """How many a stage without training has."""
    config = subject.config
    try:
        if subject.stage == "synthesize":
            rows = pq.read_metadata(config.data.train_files).num_rows
            return int(math.ceil(rows / config.partitions) * config.samples)
        if subject.stage == "evaluate":
            of_each, asked = config.questions_per_benchmark, 0
            for source in config.benchmarks:
                asked += HUB_QUESTIONS if str(source).startswith("hf://") else _lines(Path(source))
            return min(asked, 7 * of_each * len(config.benchmarks)) if of_each else asked
    except (OSError, ValueError):  # a file that is not there or none: the data's own finding
        return None
    return None


def _lines(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _startup(subject: Subject) -> Range:
    return STARTUP_S if subject.machine.gpu else CPU_STARTUP_S


def _speed(subject: Subject, shares: Range, on_cpu: Range) -> Range:
    gpu = subject.machine.gpu
    if gpu is None:
        return on_cpu
    return _times(shares, gpu.bf16_tflops * 1e12 * subject.machine.gpus * subject.machine.nodes)


def _add(*ranges: Range) -> Range:
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _times(pair: Range, factor: float) -> Range:
    return pair[0] * factor, pair[1] * factor


def _over(work: Range, speed: Range) -> Range:
    """Least work at the fast end, most at the slow one."""
    return work[0] / speed[0], work[1] / speed[1]


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def together(estimates: Sequence[Estimate]) -> Estimate:
    """One after the other; raises ValueError for none."""
    if not estimates:
        raise ValueError("there is nothing to add up")
    time = _add(*((one.low_s, one.high_s) for one in estimates))
    expected = sum(one.expected_s for one in estimates)
    source = f"{len(estimates)} stages together"
    return Estimate(*time, source, estimates[0].usd_per_hour, expected)


def to_dict(estimate: Estimate) -> Mapping[str, object]:
    """For JSON."""
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
