"""Checks that a stage fits the memory of its declared machine, by the memory ledger."""

import math
from collections.abc import Iterator
from dataclasses import replace

from omegaconf import OmegaConf

from drzero.ops.resources.others import largest_others
from drzero.preflight.batch import micro_batch_key, smallest_micro_batch
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, Severity, error, note, warning
from drzero.preflight.memory_ledger import (
    SHARING,
    TIGHT,
    Ledger,
    Server,
    host_ledger,
    loading_gib,
    offloaded_gib,
    reduces_once,
    retrieval_in_host_memory,
    rollout_server,
    serving_ledger,
    solver_server,
    training_ledger,
    weights_backup_gib,
    width,
)
from drzero.preflight.model_shape import FAMILIES
from drzero.preflight.sglang_memory import GIB
from drzero.preflight.versions import LIGER
from drzero.preflight.what_fits import CHECKPOINTING, changed, what_fits, written
from drzero.recipe.gpu_split import pools

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FASTER = (
    (LIGER, True),
    (f"{_ACTOR}.fsdp_config.offload_policy", False),
    (f"{_ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation", True),
    (CHECKPOINTING, False),
)
"""Settings that make an update faster, the most worthwhile first. All but the first cost memory."""
_CERTAIN = ("weights", "gradients", "Adam")  # items that do not depend on sequence length
_OF_SEQUENCES = ("kept inputs", "one layer", "activations", "logits", "head", "mask")
"""The actor's items that depend on it."""


_READING_GIB = 4.0  # logits of one conversation, twice, and CUDA's context
_RAY_RESERVE = 0.05
"""Share of a machine's memory that Ray keeps free: it killed workers of the demo when 95.1 % were taken."""
_OF_LENGTH = (*_OF_SEQUENCES, "KV cache")  # all that lengths and batches change
_REACHED = 0.6
"""Share of those items that a run surely reaches. The demo reached three quarters of its 5.5 GiB: it took
13.4 to 13.6 GiB at its peak, where the ledger says 14.8 at full length and 9.3 without them."""


def stage_ledger(ctx: CheckContext) -> Ledger | None:
    """A stage's ledger; None without a model, or if its sizes are unknown."""
    config, machine = ctx.config, ctx.machine
    served = ctx.shape(config.solver.model_path) if ctx.serves_model else None
    if ctx.trains:
        shape = ctx.shape(config.actor_rollout_ref.model.path)
        if shape is None or (config.method == "hrpo" and served is None):
            return None
        make = training_ledger if machine.gpu else host_ledger
        return make(config, machine, shape, served or shape)
    return serving_ledger(config, machine, served) if served else None


def check_memory(ctx: CheckContext) -> Iterator[Finding]:
    """The ledger's margin must be positive, and each engine's share must hold its model.

    A note names a better number of GPUs per engine, if there is one.
    """
    ledger = stage_ledger(ctx)
    if ledger is None:
        models = [model for model in ctx.models().values() if ctx.shape(model) is None]
        if models and (ctx.trains or ctx.serves_model):
            yield warning(
                "memory",
                f"the sizes of {models[0]} are not known here (no config.json of one of the families "
                f"{', '.join(FAMILIES)})",
                "download the model, or name a folder; of another family try a small batch first",
                value="not checked",
            )
        return
    if ctx.machine.gpu is None:
        yield from _of_cpu_machine(ctx, ledger)
        return
    found = [*(_fused_head(ctx) if ctx.trains else ()), *_of_gpu_machine(ctx, ledger)]
    layout = list(_better_layout(ctx, fits=not found))
    yield from found if layout or not ctx.trains else _with_what_fits(ctx, found)
    yield from layout
    if ctx.trains and not found:
        yield from _faster_update(ctx)


def check_compared(ctx: CheckContext) -> Iterator[Finding]:
    """Once the engine has gone, Transformers' model must fit one GPU."""
    gpu, dtype, shape = ctx.machine.gpu, ctx.config.compare.dtype, ctx.shape(ctx.config.base_model)
    if gpu is None or shape is None:
        return
    needed = width(dtype) * shape.parameters / GIB + _READING_GIB
    if needed > gpu.memory_gib:
        why = f"Transformers reads the whole model on one GPU: {needed:.0f} GiB, of {gpu.memory_gib:.0f}"
        fix = "take a larger GPU" + (", or compare.dtype=bfloat16" if width(dtype) == 4 else "")
        yield error("compare.dtype", why, fix, value=dtype)


def check_supervised(ctx: CheckContext) -> Iterator[Finding]:
    """The weights must fit the GPUs in float32, and gradients and Adam's states if all are trained."""
    gpu, shape, rank = ctx.machine.gpu, ctx.shape(ctx.config.base_model), ctx.config.lora_rank
    if gpu is None or shape is None:
        return
    needed = (4 if rank else 16) * shape.parameters / ctx.machine.gpus / GIB + _READING_GIB
    if needed > gpu.memory_gib:
        why = f"supervised training takes {needed:.0f} of {gpu.memory_gib:.0f} GiB before any activation"
        fix = "take larger or more GPUs" + ("" if rank else ", or train an adapter (lora_rank=16)")
        yield error("lora_rank", why, fix)


def _with_what_fits(ctx: CheckContext, found: list[Finding]) -> list[Finding]:
    """The findings, the one about the GPUs' memory with overrides that would fit."""
    errors = [finding for finding in found if finding.severity is Severity.ERROR]
    if not errors:
        return found

    def fits(other: CheckContext) -> bool:
        if not other.machine.is_local:
            host_gib = other.config.compute.memory / 1024
            other = replace(other, machine=replace(other.machine, host_gib=host_gib))
        return _fits_gpus(other)

    if not (way := what_fits(ctx, fits)):
        return found
    told = next((one for one in errors if " needs " in one.why), errors[0])
    told_more = replace(told, fix=f"{told.fix}. By the memory ledger this fits: {way}")
    return [told_more if one is told else one for one in found]


def _fused_head(ctx: CheckContext) -> Iterator[Finding]:
    parts = ctx.config.actor_rollout_ref
    shape = ctx.shape(parts.model.path)
    if shape and not shape.tied and parts.model.use_fused_kernels and parts.actor.strategy == "fsdp2":
        yield error(
            "actor_rollout_ref.model.use_fused_kernels",
            "this model's head is not tied to its embeddings. veRL 0.9.1 shards such a head alone, and "
            "the fused head then fails in the first update",
            f"set fused_head=false, and {_ACTOR}.ppo_max_token_len_per_gpu=4096 for whole logits",
        )


def _of_gpu_machine(ctx: CheckContext, ledger: Ledger) -> Iterator[Finding]:
    config = ctx.config
    if ctx.trains and (shape := ctx.shape(config.actor_rollout_ref.model.path)):
        yield from _share(f"{_ROLLOUT}.gpu_memory_utilization", rollout_server(config, shape), ledger)
    if ctx.serves_model and (shape := ctx.shape(config.solver.model_path)):
        yield from _share("solver.mem_fraction_static", solver_server(config, shape), ledger)
    if ledger.margin_gib < 0:
        yield _does_not_fit(ctx, ledger)
    elif ledger.margin_gib < TIGHT * ledger.capacity_gib:
        why = f"{ledger.worst} needs {_largest(ledger)}, which leaves less than fragmentation may take"
        smaller = micro_batch_key(config) if ctx.trains else "solver.max_batch_size"
        fix = f"lower {smaller}, or the engines' shares"
        yield warning("memory", why, fix, value=f"{ledger.margin_gib:.1f} GiB left")
    yield from _host_next_to_gpus(ctx)


def _fits_gpus(ctx: CheckContext) -> bool:
    ledger = stage_ledger(ctx)
    return ledger is not None and not any(_of_gpu_machine(ctx, ledger))


def _of_cpu_machine(ctx: CheckContext, ledger: Ledger) -> Iterator[Finding]:
    if not ledger.capacity_gib:
        return
    needed = f"at full length the run takes {_largest(ledger)}"
    if _sum(ledger, ends=_CERTAIN) > ledger.capacity_gib:
        key = "base_model" if ctx.trains else "solver.model_path"
        yield error(key, f"the model does not fit this machine's memory: {needed}", "take a smaller model")
    else:
        total = ledger.total(ledger.worst)
        least = total - (1 - _REACHED) * _sum(ledger, ends=_OF_LENGTH)
        yield from _short_of_memory(ctx, total, least, needed)


def _short_of_memory(ctx: CheckContext, most: float, least: float, needed: str) -> Iterator[Finding]:
    """`least` and `most` GiB that the run takes, against what others leave: too little is an error."""
    free, whole = ctx.machine.free_gib, ctx.machine.host_gib or 0.0
    reserve = _RAY_RESERVE * whole if ctx.trains and free is not None else 0.0
    room = (whole if free is None else free) - reserve
    if most <= room:
        return
    why = f"the machine has {whole:.1f} GiB of memory"
    fix = "take a larger machine"
    if free is not None:
        why += f", of which {free:.1f} are free"
        others, wanted = largest_others(), most + reserve
        fix = f"close other programs{f' ({others})' if others else ''}"
        fix += f" until {wanted:.1f} GiB are free" if wanted < whole else ""
    why += f", and Ray kills workers once less than {reserve:.1f} are" if reserve else ""
    make = error if least > room else warning
    if ctx.machine.gpu is None and (way := what_fits(ctx, lambda other: _needed(other) <= room)):
        fix += f", or {way}"
    yield make("memory", f"{why}; {needed}", fix, value=f"{room:.1f} GiB")


def _needed(ctx: CheckContext) -> float:
    """GiB of the worst phase."""
    ledger = stage_ledger(ctx)
    return ledger.total(ledger.worst) if ledger else math.inf


def _better_layout(ctx: CheckContext, *, fits: bool) -> Iterator[Finding]:
    """A note on the fewest GPUs that hold a copy of each engine, unless configured so."""
    config, gpus = ctx.config, ctx.machine.gpus
    rollout = config.actor_rollout_ref.rollout if ctx.trains else None
    if (rollout.name if rollout else config.solver.engine) not in SHARING:
        return
    now = rollout.tensor_model_parallel_size if rollout else config.solver.tp_size
    shapes = [shape for model in ctx.models().values() if (shape := ctx.shape(model))]
    for tp in range(1, gpus + 1 if not fits else now):
        counts = pools(config) if ctx.trains else []
        if tp == now or any(number % tp for number in (gpus, *counts, *(shape.heads for shape in shapes))):
            continue
        keys = ["solver.tp_size", *([f"{_ROLLOUT}.tensor_model_parallel_size"] if ctx.trains else [])]
        if _fits_gpus(changed(ctx, dict.fromkeys(keys, tp))):
            why = f"by the memory ledger tp {tp} × dp {gpus // tp} fits"
            gain = " as well, with less traffic between GPUs that both engines share" if fits else ""
            yield note("solver.tp_size", why + gain, f"set solver.tp_size={tp}")
            return


def _faster_update(ctx: CheckContext) -> Iterator[Finding]:
    """A note that names the settings for a faster update that still fit."""
    chosen = dict[str, bool]()
    for key, value in FASTER:
        if OmegaConf.select(ctx.config, key) != value and _fits_gpus(changed(ctx, chosen | {key: value})):
            chosen[key] = value
    if chosen:
        why = "by the memory ledger there is room for a faster update"
        yield note("memory", why, f"set {written(chosen)}", value=ctx.machine)


def _share(key: str, server: Server, ledger: Ledger) -> Iterator[Finding]:
    if server.engine not in SHARING:
        return
    # The smallest: a GPU that only samples has more room than one that trains as well.
    shares = (items.get(server.share_item) for items in ledger.phases.values())
    share_gib = min((share for share in shares if share is not None), default=0.0)
    sequences = (share_gib - server.weights_gib) / server.kv_gib(server.positions)
    whole = "that are free when it starts" if server.engine == "sglang" else "of the GPU"
    share = f"{server.share:g} of the {share_gib / server.share:.1f} GiB {whole}"
    more = f"raise it, or spread the model over more GPUs (tp is {server.tp})"
    if sequences < 1:
        yield error(
            key,
            f"the {server.name}'s share ({share}) holds {server.weights_gib:.1f} GiB of weights a GPU and "
            f"not one sequence of {server.positions} tokens",
            more,
        )
    elif sequences < 4:
        yield warning(
            key,
            f"next to {server.weights_gib:.1f} GiB of weights the {server.name}'s share ({share}) holds "
            f"{sequences:.1f} sequences of full length: it will decode few at a time",
            more,
        )


def _does_not_fit(ctx: CheckContext, ledger: Ledger) -> Finding:
    """The error, at the key whose change helps most."""
    over = f"{ledger.worst} needs {_largest(ledger)}"
    shares = ctx.config.solver.engine in SHARING
    server = "solver.mem_fraction_static" if shares else "solver.max_batch_size"
    if not ctx.trains:
        return error(server, over, "lower it, or take a larger GPU")
    shares = ctx.config.actor_rollout_ref.rollout.name in SHARING
    engine = f"{_ROLLOUT}.{'gpu_memory_utilization' if shares else 'max_num_seqs'}"
    taken = {engine: _sum(ledger, "rollout engine"), server: _sum(ledger, "solver")}
    activations = _sum(ledger, "actor: ", _OF_SEQUENCES)
    if ledger.worst == "weight sync":
        more = "spread the engines over more GPUs, or lower update_weights_bucket_megabytes"
        return error("solver.tp_size", over, f"{more} ({_ROLLOUT}.checkpoint_engine)")
    if ledger.worst == "rollout" or sum(taken.values()) > _sum(ledger, "actor", _CERTAIN) + activations:
        # The rollout engine takes almost nothing while it sleeps.
        key = max(taken, key=lambda name: taken[name])
        kept = _sum(ledger, "actor: weights")
        more = ", or offload the actor (fsdp_config.param_offload=true)" if kept else ""
        return error(key, over, f"lower it{more}")
    if reduces_once(ctx.config) and -ledger.margin_gib < _sum(ledger, "actor: gradients"):
        key = f"{_ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
        return error(key, over, "set it to false: gradients are then exchanged with every micro-batch")
    key, least = micro_batch_key(ctx.config), smallest_micro_batch(ctx.config)
    if -ledger.margin_gib < 0.75 * activations and OmegaConf.select(ctx.config, key) > least:
        return error(key, over, f"lower it (to {least} at least), or shorten the sequences")
    return error("base_model", over, "take a smaller model or more GPUs, or shorten the sequences")


def _sum(ledger: Ledger, starts: str = "", ends: tuple[str, ...] = ("",)) -> float:
    """GiB of the worst phase's items whose names start and end this way."""
    items = ledger.phases[ledger.worst].items()
    return sum(gib for name, gib in items if name.startswith(starts) and name.endswith(ends))


def _largest(ledger: Ledger) -> str:
    items = ledger.phases[ledger.worst]
    largest = sorted(items.items(), key=lambda item: -item[1])[:4]
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
    return f"{ledger.total(ledger.worst):.1f} GiB of {ledger.capacity_gib:.1f} ({listed}, …)"


def _host_next_to_gpus(ctx: CheckContext) -> Iterator[Finding]:
    """Host memory must hold processes, retrieval, and weights that GPUs load or offload."""
    config, machine = ctx.config, ctx.machine
    if machine.host_gib is None:
        return
    # Processes of veRL, Ray and the engines, or of a server.
    others = {"processes": 24.0 if ctx.trains else 8.0} | retrieval_in_host_memory(config)
    items = dict(others)
    if ctx.trains and (shape := ctx.shape(config.actor_rollout_ref.model.path)):
        ranks = config.trainer.n_gpus_per_node
        items["offloaded weights and Adam states"] = offloaded_gib(config, shape) / machine.nodes
        items["the engines' copies of their weights"] = weights_backup_gib(config, shape, ranks)
        start = {"weights as the ranks load them": loading_gib(config, shape, ranks)}
        items = max(items, others | start, key=lambda moment: sum(moment.values()))
    if (wanted := sum(items.values())) > machine.host_gib:
        listed = ", ".join(f"{name} {gib:.0f}" for name, gib in sorted(items.items(), key=lambda i: -i[1]))
        yield error(
            "machine" if machine.is_local else "compute.memory",
            f"the run takes {wanted:.0f} GiB of host memory ({listed})",
            "ask for more, serve the index from another machine (retrieval.url=…), or offload less "
            f"({_ACTOR}.fsdp_config.optimizer_offload=false)",
            value=f"{machine.host_gib:.0f} GiB",
        )
    else:
        yield from _short_of_memory(ctx, wanted, 0.0, f"the run takes {wanted:.0f} GiB of host memory")
