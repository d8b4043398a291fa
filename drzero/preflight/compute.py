"""Checks of the declared machine: does it fit the hardware profile, the time limit and the budget?"""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from drzero.ops.resources.gpu import Gpus, gpus_here
from drzero.ops.text import counted
from drzero.preflight.context import CheckContext
from drzero.preflight.cost import Estimate, estimate
from drzero.preflight.finding import Finding, error, note, warning
from drzero.recipe.compose import joins_cluster
from drzero.recipe.gpu_split import pools

FIRST_BUILD_S = 1800


def check_compute(ctx: CheckContext) -> Iterator[Finding]:
    """GPUs, machines and timeout must fit the run."""
    config, machine = ctx.config, ctx.machine
    compute = config.compute
    # prepare-data runs anywhere. The declared machine only decides embedder and wording.
    prepares = ctx.stage == "prepare_data"
    wanted = _gpus_used(ctx) if config.machine.device != "cpu" and not prepares else 0
    yield from _embedder_device(ctx)
    yield from _bfloat16(ctx)
    if wanted and (machine.is_local or ctx.starting):
        yield from _gpus_here(ctx, wanted)
    if wanted and compute.count is not None and compute.count != wanted:
        wants = f"{counted(wanted, 'GPU')} (machine.gpus)"
        why = f"the hardware profile wants {wants}, and this machine has {compute.count}"
        fix = f"choose another compute= or hardware=, or set machine.gpus={compute.count}"
        yield error("compute.count", why, fix)
    if machine.is_local:
        return
    if machine.gpus and not wanted and not prepares:
        why = f"{machine.gpus} × {compute.type} would be paid for but not used: machine.device is cpu"
        yield error("compute.type", why, "use compute=cpu, or hardware=single_gpu")
    for key, is_asked in (("nodes", machine.nodes > 1), ("ray_address", config.machine.ray_address)):
        if is_asked:
            fix = "set machine.nodes=1, or rent machines elsewhere (compute=2x8xh100, docs/scale.md)"
            yield error(f"machine.{key}", "a call on Modal is one machine", fix)
    if compute.timeout is not None and not 0 < compute.timeout <= 86400:
        yield error("compute.timeout", "Modal ends a call after 1 to 86400 seconds", "set it to 86400")
    elif compute.timeout is not None and compute.timeout < FIRST_BUILD_S:
        yield warning(
            "compute.timeout",
            "a first start builds the image and downloads models, which may take longer "
            "(FunctionTimeoutError)",
            f"set it to {FIRST_BUILD_S} at least",
        )
    if ctx.trains and machine.usd_per_hour and config.watchdog.policy == "report":
        why = f"a run that stands still would be paid for (${machine.usd_per_hour:.2f}/h) until its call ends"
        fix = "set watchdog.policy=resume watchdog.resumes=1, as on every machine of compute/, or stop"
        yield warning("watchdog.policy", why, fix)


def _gpus_used(ctx: CheckContext) -> int:
    """GPUs of each machine. veRL's own keys for GPUs that only sample add to machine.gpus."""
    if not ctx.trains or joins_cluster(ctx.config):
        return int(ctx.config.machine.gpus)
    return max(int(ctx.config.machine.gpus), sum(pools(ctx.config)))


def _bfloat16(ctx: CheckContext) -> Iterator[Finding]:
    gpu, config = ctx.machine.gpu, ctx.config
    if gpu is None or gpu.has_bf16:
        return
    why = f"{gpu.name} has no native bfloat16: it is emulated, and slow"
    used = {"solver.dtype": ctx.serves_model, "actor_rollout_ref.rollout.dtype": ctx.trains}
    for key in (key for key, is_used in used.items() if is_used):
        if OmegaConf.select(config, key) == "bfloat16":
            yield warning(key, why, f"set {key}=float16")
    if ctx.trains:
        key = "machine.gpu" if ctx.machine.is_local else "compute.type"
        yield warning(key, f"{why}, and the actor trains in it", "take an A10, an L4 or a newer GPU")


def _embedder_device(ctx: CheckContext) -> Iterator[Finding]:
    used = {"retrieval.device": ctx.embeds, "indexing.device": ctx.stage in ("prepare_data", "preview")}
    for key in (key for key, is_used in used.items() if is_used):
        on_cuda = str(OmegaConf.select(ctx.config, key)).startswith("cuda")
        if on_cuda and not ctx.machine.gpus and not (ctx.machine.is_local and gpus_here()):
            yield error(key, f"there is no GPU for the embedding model on {ctx.machine}", f"set {key}=cpu")


def _gpus_here(ctx: CheckContext, wanted: int) -> Iterator[Finding]:
    here, gpu = gpus_here(), ctx.machine.gpu
    if here < wanted and ctx.starting:
        why = f"the hardware profile wants {counted(wanted, 'GPU')}, and this machine has {here}"
        yield error("machine.gpus", why, "choose another hardware=")
    elif here < wanted:
        why = f"checked for {ctx.machine}; this machine has {counted(here, 'GPU')}"
        yield note("hardware", why, value=counted(wanted, "GPU"))
    found = Gpus().read() if ctx.starting and here >= wanted else []
    if gpu is None or not found:  # unknown to NVML
        return
    smallest = min(found, key=lambda one: one.total_mb)
    if smallest.total_mb < 0.95 * gpu.memory_gib * 1024:  # drivers differ in what they reserve
        yield error(
            "machine.gpu" if ctx.machine.is_local else "compute.type",
            f"GPU {smallest.index} of this machine has {smallest.total_mb / 1024:.1f} GiB, not the "
            f"{gpu.memory_gib:g} that the memory ledger assumes",
            "set the GPU of this machine (drzero/recipe/gpu_prices.py has the names)",
        )
    taken = [one for one in found if one.used_mb > 1500]  # a driver or a desktop takes less
    if taken:
        pids = sorted({pid for one in taken for pid in one.memory_mb_of})
        whose = f" (pid {', '.join(map(str, pids))})" if pids else ""
        yield warning(
            "GPUs",
            f"GPU memory is in use before the run starts{whose}, by an earlier run's engine or another "
            "program",
            "end it, or wait: the ledger assumes empty GPUs",
            value=", ".join(f"GPU {one.index}: {one.used_mb / 1024:.1f} GiB" for one in taken),
        )


def check_cost(ctx: CheckContext) -> Iterator[Finding]:
    """The estimate must stay within the timeout and the budget."""
    found = estimate(ctx)
    if found is None:
        return
    compute = ctx.config.compute
    if compute.timeout and found.expected_s > compute.timeout:
        why = f"the call is expected to be ended before the run is done: {found.range}"
        yield warning("compute.timeout", why, "raise it, or rerun to resume")
    yield from _spending(compute.max_usd, found, "run fewer steps (trainer.total_training_steps)")


def check_together(compute: DictConfig, total: Estimate | None) -> Iterator[Finding]:
    """A loop's unfinished stages together must stay within the same limits."""
    if total is None:
        return
    if compute.timeout and total.expected_s > compute.timeout:
        why = "one call is expected to end before the loop is done"
        yield note("compute.timeout", why, "rerun to resume", value=compute.timeout)
    yield from _spending(compute.max_usd, total, "run fewer iterations")


def _spending(limit: float | None, found: Estimate, less: str) -> Iterator[Finding]:
    if limit is None:
        return
    fix = f"raise compute.max_usd, or {less}"
    if (expected := found.usd(found.expected_s)) > limit:
        why = f"the run is expected to cost ${expected:,.0f}, above it: {found.range}"
        yield error("compute.max_usd", why, fix, value=limit)
    elif found.usd(found.high_s) > limit:
        yield warning("compute.max_usd", f"the run may cost more than that: {found.range}", fix, value=limit)
