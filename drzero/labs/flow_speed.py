"""Whether the queues are fast enough: rows a second at full speed against what the declared run needs.

    need = needed("solver", ["hardware=8xh100", "model=qwen2.5-7b"])     # rows a step over its shortest step
    for said in judge(speed, need): …

What is measured is in `verl_ext.trainer.flow_speed`. The need is B × n rows over the shortest step of
preflight's estimate (docs/preflight.md), which is measured where an earlier start of the run has steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from drzero.ops.notices import Level
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import step_time
from drzero.preflight.machine import declared_machine
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.overrides import key_of

MARGIN = 2.0
"""The queues should be at least this many times as fast as the run needs."""
BUSY = 0.8
"""The share of a core from which a process of one thread is what the others wait for."""
MOST_BYTES = 256 * 2**20
"""Of a batch that is written at full speed: two of them are in memory, and their copies."""
_OWN = ("flow_test", "flow", "run", "watchdog")
"""Keys of the flow-test's own, which the declared run does not take from it."""


@dataclass(frozen=True)
class Need:
    """What the declared run needs of its queues."""

    stage: str
    prompts: int
    rollouts: int
    prompt_tokens: int
    response_tokens: int
    step_s: float | None
    """Its shortest step; None if too little is known of the model."""
    source: str
    """`measured …` or `assumed …`."""

    @property
    def rows_per_s(self) -> float | None:
        """Rows a second, in and out."""
        return self.prompts * self.rollouts / self.step_s if self.step_s else None

    def __str__(self) -> str:
        rows = f"{self.stage}, {self.prompts} prompts × {self.rollouts} rollouts"
        if self.rows_per_s is None:
            return f"{rows}: its step cannot be estimated, as the model's sizes are unknown here"
        return f"{self.rows_per_s:.3g} rows/s: {rows} in {self.step_s:.0f} s at least ({self.source})"


def needed(stage: str, overrides: Sequence[str]) -> Need:
    """What the run of a stage needs that these overrides declare; raises what composing it raises."""
    shared = [word for word in overrides if key_of(word).partition(".")[0] not in _OWN]
    config = resolve(compose_stage(stage, shared))
    ctx = CheckContext(
        config,
        stage,
        declared_machine(config, starting=False),
        starting=False,
        ahead=True,
        readings=Readings(),
    )
    step, source = step_time(ctx)
    data = config.data
    return Need(
        stage=stage,
        prompts=data.train_batch_size,
        rollouts=config.actor_rollout_ref.rollout.n,
        prompt_tokens=data.max_prompt_length,
        response_tokens=data.max_response_length,
        step_s=None if step is None else float(step[0]),
        source=source,
    )


def full_speed(config: DictConfig, need: Need) -> dict[str, int] | None:
    """The batch to write and take at full speed, as `verl_ext.trainer.flow_speed.Load` has it.

    The declared run's rows, and as many of its prompts as `MOST_BYTES` and half of the queue's room hold.
    None where nothing is to be measured: without seconds for it, or for a provoked fault.
    """
    if not config.flow_test.speed_s or config.flow_test.provoke != "none":
        return None
    room = config.transfer_queue.backend.SimpleStorage.total_storage_size
    # Eight tensors of 8 bytes a token at most (`verl_ext.trainer.flow_speed.made_row`).
    row_bytes = 64 * (need.prompt_tokens + need.response_tokens)
    rows = min(MOST_BYTES // row_bytes, room // 4 if room else MOST_BYTES)
    return {
        "prompts": max(1, min(need.prompts, rows // need.rollouts)),
        "rollouts": need.rollouts,
        "prompt_tokens": need.prompt_tokens,
        "response_tokens": need.response_tokens,
    }


def judge(speed: Mapping[str, Any], need: Need) -> list[tuple[Level, str]]:
    """What to print of a measurement, with its level; a warning below `MARGIN` names the cause."""
    size = f"{speed['row_tokens']} tokens, {speed['row_bytes'] / 1e6:.2f} MB"
    batch = f"{speed['prompts']} prompts × {speed['rollouts']}"
    busy = speed["busy"]
    said: list[tuple[Level, str]] = [
        (
            "info",
            f"full speed, both at once: {speed['in']:.4g} rows/s in, {speed['out']:.4g} out (alone "
            f"{speed['in_alone']:.4g} and {speed['out_alone']:.4g}); rows of {size}, {batch} at a time",
        ),
        (
            "info",
            f"a put took {speed['put_s'] * 1000:.3g} ms; of a core each were busy: "
            + ", ".join(f"{part} {busy[part]:.0%}" for part in _PARTS if part in busy)
            + f"; of the machine's {speed['cores']} cores {busy['machine']:.0%}",
        ),
    ]
    rate = min(speed["in"], speed["out"])
    if need.rows_per_s is None:
        return [*said, ("warning", f"whether that is enough is unknown: {need}")]
    factor = rate / need.rows_per_s
    if factor >= MARGIN:
        return [*said, ("info", f"the run needs {need}; the queues are {factor:.3g} times as fast")]
    slower = "the queues are slower" if factor < 1 else f"the queues are only {factor:.2g} times as fast"
    return [*said, ("warning", f"the run needs {need}; {slower}. {cause(speed)}")]


_PARTS = ("controller", "storage", "consumer", "producer")


def cause(speed: Mapping[str, Any]) -> str:
    """What keeps the rows back, by which process is busy, and what to do."""
    busy = {"controller": 0.0, "storage": 0.0, "consumer": 0.0, "producer": 0.0} | dict(speed["busy"])
    alone = f"{speed['in_alone'] / speed['in']:.1f} times as fast alone"
    if busy["controller"] >= BUSY:
        return (
            "Lock contention: every put and take waits for the one thread of TransferQueue's controller, "
            f"which is busy {busy['controller']:.0%} of the time (puts are {alone}). Hold fewer rows in it: "
            "a smaller num_warmup_batches or data.train_batch_size"
        )
    if busy["storage"] >= BUSY:
        return (
            "Lock contention: rows wait for the one thread of a storage unit, which is busy "
            f"{busy['storage']:.0%} of the time (puts are {alone}). Raise "
            "transfer_queue.backend.SimpleStorage.num_data_storage_units"
        )
    if busy["machine"] >= 0.9:
        return f"All {speed['cores']} cores of this machine are busy: measure on the run's own machine"
    if busy["consumer"] >= BUSY:
        return "What takes the rows is busy itself, as the ranks of a run are not: reading is its limit"
    if busy["producer"] >= BUSY:
        return "The test's own workers are busy: measure with more of them (flow_test.workers)"
    return "Nothing that takes part is busy: they wait for memory, or for a network between them"
