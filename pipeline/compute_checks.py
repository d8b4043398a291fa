"""The declared machine: whether the hardware profile was made for it, how long and how dear the run is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from ops.gpu import Gpu as GpuNow
from ops.gpu import Gpus
from pipeline.cost import Estimate, estimate, together
from pipeline.finding import Finding, error, note, warning
from pipeline.machine import gpus_here

if TYPE_CHECKING:
    from pipeline.subject import Subject

FIRST_BUILD_S = 1800
"""A first start on Modal, its image build and downloads included, may take that long."""
MODAL_LIMIT_S = 86400
_SAME_SIZE = 0.95
"""Drivers differ in what they keep of a GPU's memory for themselves."""
_IDLE_MB = 1500
"""What a driver, or a desktop, holds of a GPU that nobody uses."""
_FEWER_STEPS = "run fewer steps (trainer.total_training_steps)"


def check_compute(subject: Subject) -> Iterator[Finding]:
    """GPUs, machines and time-out of the declared machine must fit the run."""
    config, machine = subject.config, subject.machine
    compute, wanted = config.compute, config.trainer.n_gpus_per_node
    if compute.provider not in ("local", "modal"):
        yield error(
            "compute.provider",
            compute.provider,
            f"there is no provider {compute.provider!r}",
            "choose local or modal",
        )
        return
    uses_gpus = config.trainer.device != "cpu"
    if machine.is_local or subject.starting:
        yield from _here(subject, wanted if uses_gpus else 0)
    if machine.is_local:
        return
    if uses_gpus and machine.gpus != wanted:
        yield error(
            "compute.count",
            compute.count,
            f"the hardware profile wants {wanted} GPUs (trainer.n_gpus_per_node), and this machine has "
            f"{machine.gpus}",
            f"choose another compute= or hardware=, or set trainer.n_gpus_per_node={machine.gpus}",
        )
    if not uses_gpus and machine.gpus:
        yield error(
            "compute.type",
            compute.type,
            f"{machine.gpus} × {compute.type} would be paid for and not used: trainer.device is cpu",
            "use compute=cpu, or hardware=single_gpu",
        )
    if machine.nodes > 1:
        yield error(
            "trainer.nnodes",
            machine.nodes,
            "a call on Modal is one machine",
            "set trainer.nnodes=1, or use compute=local",
        )
    yield from _timeout(subject)
    yield from _precision(subject)


def _here(subject: Subject, wanted: int) -> Iterator[Finding]:
    """This machine's GPUs: as many as wanted; where the run begins also as large as declared, and free."""
    here = gpus_here() if wanted else 0
    if here >= wanted:
        if subject.starting and wanted:
            yield from _as_declared(subject, Gpus().read())
    elif subject.starting:
        yield error(
            "trainer.n_gpus_per_node",
            wanted,
            f"the hardware profile wants {wanted} GPUs, and this machine has {here}",
            "choose another hardware=",
        )
    else:
        yield note(
            "hardware",
            f"{wanted} GPUs",
            f"judged for {subject.machine}, which this machine is not ({here} GPUs)",
        )


def _as_declared(subject: Subject, found: Sequence[GpuNow]) -> Iterator[Finding]:
    gpu = subject.machine.gpu
    if gpu is None or not found:  # NVML does not tell
        return
    key = "machine.gpu" if subject.machine.is_local else "compute.type"
    smallest = min(found, key=lambda one: one.total_mb)
    if smallest.total_mb < _SAME_SIZE * gpu.memory_gib * 1024:
        yield error(
            key,
            gpu.name,
            f"GPU {smallest.index} of this machine has {smallest.total_mb / 1024:.1f} GiB, not the "
            f"{gpu.memory_gib:g} that memory was judged for",
            "name the GPU that is here (pipeline/rates.py has the names)",
        )
    taken = [one for one in found if one.used_mb > _IDLE_MB]
    if taken:
        listed = ", ".join(f"GPU {one.index}: {one.used_mb / 1024:.1f} GiB" for one in taken)
        pids = sorted({pid for one in taken for pid in one.memory_mb_of})
        whose = f" (pid {', '.join(map(str, pids))})" if pids else ""
        yield warning(
            "GPUs",
            listed,
            f"memory of the GPUs is taken before the run begins{whose}: by an engine that an earlier run "
            "left, or by another program",
            "end it, or wait for it: the ledger reckons with empty GPUs",
        )


def _timeout(subject: Subject) -> Iterator[Finding]:
    timeout = subject.config.compute.timeout
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


def _precision(subject: Subject) -> Iterator[Finding]:
    gpu, config = subject.machine.gpu, subject.config
    if gpu is not None and not gpu.has_bf16 and subject.serves_model and config.solver.dtype == "bfloat16":
        yield warning(
            "solver.dtype",
            config.solver.dtype,
            f"{gpu.name} does not compute in bfloat16 by itself: it is emulated, and slow",
            "set solver.dtype=float16",
        )


def check_cost(subject: Subject) -> Iterator[Finding]:
    """The estimate, against the time-out and the spend limit."""
    found = estimate(subject)
    if found is None:
        return
    yield note("cost", found.source.partition(":")[0], str(found))
    compute = subject.config.compute
    if compute.timeout and found.expected_s > compute.timeout:
        yield warning(
            "compute.timeout",
            compute.timeout,
            f"the call is expected to be ended before it is done: {found}",
            "raise it, or rerun to resume",
        )
    yield from _spending(compute.max_usd, found)


def check_together(compute: DictConfig, estimates: Sequence[Estimate | None]) -> Iterator[Finding]:
    """The stages of a loop that are yet to run, all on this machine: what they cost together."""
    known = [found for found in estimates if found is not None]
    if not known:
        return
    total = together(known)
    rest = len(estimates) - len(known)
    unknown = f"; {rest} more cannot be estimated before the stages ahead of them have run" if rest else ""
    yield note("cost", f"{len(known)} of {len(estimates)} stages", f"{total}{unknown}")
    if compute.timeout and total.expected_s > compute.timeout:
        yield note(
            "compute.timeout",
            compute.timeout,
            "one call is expected to end before the loop is done",
            "run it again, and it goes on",
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
