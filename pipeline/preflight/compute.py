"""Checks of the declared machine: its fit to the hardware profile, and the run's time and cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from ops.resources.gpu import Gpus, GpuSample, gpus_here
from pipeline.preflight.context import CheckContext
from pipeline.preflight.cost import Estimate, estimate, together
from pipeline.preflight.finding import Finding, error, note, warning

FIRST_BUILD_S = 1800
"""Seconds that a first start on Modal may take, image build and downloads included."""
MODAL_LIMIT_S = 86400
_SAME_SIZE = 0.95
"""Drivers differ in the GPU memory that they reserve."""
_IDLE_MB = 1500
"""Memory that a driver or a desktop takes on an idle GPU."""
_FEWER_STEPS = "run fewer steps (trainer.total_training_steps)"


def check_compute(ctx: CheckContext) -> Iterator[Finding]:
    """GPUs, machines and time-out of the declared machine must fit the run."""
    config, machine = ctx.config, ctx.machine
    compute, wanted = config.compute, config.machine.gpus
    uses_gpus = config.machine.device != "cpu"
    if machine.is_local or ctx.starting:
        yield from _here(ctx, wanted if uses_gpus else 0)
    if machine.is_local:
        return
    if uses_gpus and machine.gpus != wanted:
        yield error(
            "compute.count",
            compute.count,
            f"the hardware profile wants {wanted} GPUs (machine.gpus), and this machine has {machine.gpus}",
            f"choose another compute= or hardware=, or set machine.gpus={machine.gpus}",
        )
    if not uses_gpus and machine.gpus:
        yield error(
            "compute.type",
            compute.type,
            f"{machine.gpus} × {compute.type} would be paid for and not used: machine.device is cpu",
            "use compute=cpu, or hardware=single_gpu",
        )
    if machine.nodes > 1:
        yield error(
            "machine.nodes",
            machine.nodes,
            "a call on Modal is one machine",
            "set machine.nodes=1, or use compute=local",
        )
    yield from _timeout(ctx)
    yield from _precision(ctx)


def _here(ctx: CheckContext, wanted: int) -> Iterator[Finding]:
    """This machine's GPUs: enough of them and, if the run starts here, as large as declared and free."""
    here = gpus_here() if wanted else 0
    if here >= wanted:
        if ctx.starting and wanted:
            yield from _as_declared(ctx, Gpus().read())
    elif ctx.starting:
        yield error(
            "machine.gpus",
            wanted,
            f"the hardware profile wants {wanted} GPUs, and this machine has {here}",
            "choose another hardware=",
        )
    else:
        yield note(
            "hardware",
            f"{wanted} GPUs",
            f"checked for {ctx.machine}, which this machine is not ({here} GPUs)",
        )


def _as_declared(ctx: CheckContext, found: Sequence[GpuSample]) -> Iterator[Finding]:
    gpu = ctx.machine.gpu
    if gpu is None or not found:  # unknown to NVML
        return
    key = "machine.gpu" if ctx.machine.is_local else "compute.type"
    smallest = min(found, key=lambda one: one.total_mb)
    if smallest.total_mb < _SAME_SIZE * gpu.memory_gib * 1024:
        yield error(
            key,
            gpu.name,
            f"GPU {smallest.index} of this machine has {smallest.total_mb / 1024:.1f} GiB, not the "
            f"{gpu.memory_gib:g} that the memory ledger assumes",
            "set the GPU of this machine (pipeline/rates.py has the names)",
        )
    taken = [one for one in found if one.used_mb > _IDLE_MB]
    if taken:
        listed = ", ".join(f"GPU {one.index}: {one.used_mb / 1024:.1f} GiB" for one in taken)
        pids = sorted({pid for one in taken for pid in one.memory_mb_of})
        whose = f" (pid {', '.join(map(str, pids))})" if pids else ""
        yield warning(
            "GPUs",
            listed,
            f"GPU memory is in use before the run starts{whose}: by an engine that an earlier run left, or "
            "by another program",
            "end it, or wait for it: the ledger assumes empty GPUs",
        )


def _timeout(ctx: CheckContext) -> Iterator[Finding]:
    timeout = ctx.config.compute.timeout
    if timeout is None:
        return
    if not 0 < timeout <= MODAL_LIMIT_S:
        yield error(
            "compute.timeout", timeout, "Modal ends a call after 1 to 86400 seconds", "set it to 86400"
        )
    elif timeout < FIRST_BUILD_S:
        yield warning(
            "compute.timeout",
            timeout,
            "a first start builds the image and downloads models, which may take longer "
            "(FunctionTimeoutError)",
            f"set it to {FIRST_BUILD_S} at least",
        )


def _precision(ctx: CheckContext) -> Iterator[Finding]:
    gpu, config = ctx.machine.gpu, ctx.config
    if gpu is not None and not gpu.has_bf16 and ctx.serves_model and config.solver.dtype == "bfloat16":
        yield warning(
            "solver.dtype",
            config.solver.dtype,
            f"{gpu.name} has no native bfloat16: it is emulated, and slow",
            "set solver.dtype=float16",
        )


def check_cost(ctx: CheckContext) -> Iterator[Finding]:
    """The estimate must be within the time-out and the spend limit."""
    found = estimate(ctx)
    if found is None:
        return
    yield note("cost", found.source.partition(":")[0], str(found))
    compute = ctx.config.compute
    if compute.timeout and found.expected_s > compute.timeout:
        yield warning(
            "compute.timeout",
            compute.timeout,
            f"the call is expected to be ended before it is done: {found}",
            "raise it, or rerun to resume",
        )
    yield from _spending(compute.max_usd, found)


def check_together(compute: DictConfig, estimates: Sequence[Estimate | None]) -> Iterator[Finding]:
    """The summed estimate of a loop's unfinished stages, all on this machine, against the same limits."""
    known = [found for found in estimates if found is not None]
    if not known:
        return
    total = together(known)
    rest = len(estimates) - len(known)
    unknown = f"; {rest} more cannot be estimated before earlier stages have run" if rest else ""
    yield note("cost", f"{len(known)} of {len(estimates)} stages", f"{total}{unknown}")
    if compute.timeout and total.expected_s > compute.timeout:
        yield note(
            "compute.timeout",
            compute.timeout,
            "one call is expected to end before the loop is done",
            "rerun to resume",
        )
    yield from _spending(compute.max_usd, total, "run fewer iterations")


def _spending(limit: float | None, found: Estimate, less: str = _FEWER_STEPS) -> Iterator[Finding]:
    if limit is None:
        return
    fix = f"raise compute.max_usd, or {less}"
    if found.usd(found.expected_s) > limit:
        expected = f"${found.usd(found.expected_s):,.0f}"
        yield error(
            "compute.max_usd", limit, f"the run is expected to cost {expected}, above it: {found}", fix
        )
    elif found.usd(found.high_s) > limit:
        yield warning("compute.max_usd", limit, f"the run may cost more than that: {found}", fix)
