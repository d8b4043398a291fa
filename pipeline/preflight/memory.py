"""Checks that a stage fits the memory of its declared machine, with the memory ledger."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import OmegaConf

from pipeline.preflight.context import CheckContext
from pipeline.preflight.finding import Finding, error, warning
from pipeline.preflight.memory_ledger import (
    TIGHT,
    Ledger,
    Server,
    host_ledger,
    offloaded_host_gib,
    retrieval_in_host_memory,
    rollout_server,
    serving_ledger,
    solver_server,
    training_ledger,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MICRO = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_FEW_SEQUENCES = 4
"""Sequences of full length in an engine's share below which it decodes almost one at a time."""
PROCESSES_HOST_GIB = 24.0
"""Host memory of a training run's processes on GPUs: veRL's, Ray's and the engines'."""
SERVING_HOST_GIB = 8.0
"""The same for a stage that only serves a model."""
_CERTAIN = ("weights", "gradients", "Adam")
"""Items that do not depend on sequence lengths."""


def stage_ledger(ctx: CheckContext) -> Ledger | None:
    """The ledger of a stage; None if it has no model in memory, or the model's sizes are unknown."""
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
    """The ledger's margin must be positive, and each engine's share must hold its model."""
    ledger = stage_ledger(ctx)
    if ledger is None:
        yield from _unknown(ctx)
        return
    if ctx.machine.gpu is None:
        yield from _host(ctx, ledger)
        return
    for key, server in _engines(ctx).items():
        yield from _share(key, server, ledger)
    if ledger.margin_gib < 0:
        yield _does_not_fit(ctx, ledger)
    elif ledger.margin_gib < TIGHT * ledger.capacity_gib:
        yield warning(
            "memory",
            f"{ledger.margin_gib:.1f} GiB left",
            f"{ledger.worst} needs {_largest(ledger)}, which leaves less than fragmentation may take",
            f"lower {_MICRO}, or the engines' shares",
        )
    yield from _host_next_to_gpus(ctx)


def _engines(ctx: CheckContext) -> dict[str, Server]:
    config, engines = ctx.config, {}
    if ctx.trains and (shape := ctx.shape(config.actor_rollout_ref.model.path)):
        engines[f"{_ROLLOUT}.gpu_memory_utilization"] = rollout_server(config, shape)
    if ctx.serves_model and (shape := ctx.shape(config.solver.model_path)):
        engines["solver.mem_fraction_static"] = solver_server(config, shape)
    return {key: server for key, server in engines.items() if server.engine == "sglang"}


def _share(key: str, server: Server, ledger: Ledger) -> Iterator[Finding]:
    share_gib = max(items.get(server.share_item, 0.0) for items in ledger.phases.values())
    sequences = server.sequences(share_gib)
    share = f"{server.share:g} of the {share_gib / server.share:.1f} GiB that are free when it starts"
    more = f"raise it, or spread the model over more GPUs (tp is {server.tp})"
    if sequences < 1:
        yield error(
            key,
            server.share,
            f"the {server.name}'s share ({share}) holds {server.weights_gib:.1f} GiB of weights a GPU and "
            f"not one sequence of {server.positions} tokens",
            more,
        )
    elif sequences < _FEW_SEQUENCES:
        yield warning(
            key,
            server.share,
            f"next to {server.weights_gib:.1f} GiB of weights the {server.name}'s share ({share}) holds "
            f"{sequences:.1f} sequences of full length: it will decode few at a time",
            more,
        )


def _does_not_fit(ctx: CheckContext, ledger: Ledger) -> Finding:
    """The error, at the key whose change would help most: micro-batch, a share, or the model."""
    phase, config = ledger.worst, ctx.config
    items = ledger.phases[phase]
    over = f"{phase} needs {_largest(ledger)}"
    state = sum(gib for name, gib in items.items() if name.startswith("actor") and name.endswith(_CERTAIN))
    server = "solver.mem_fraction_static" if config.solver.engine == "sglang" else "solver.max_batch_size"
    if not ctx.trains:
        return error(server, _value(ctx, server), over, "lower it, or take a larger GPU")
    is_sglang = config.actor_rollout_ref.rollout.name == "sglang"
    engine = f"{_ROLLOUT}.{'gpu_memory_utilization' if is_sglang else 'max_num_seqs'}"
    taken = {engine: _sum(items, "rollout engine"), server: _sum(items, "solver")}
    if phase == "rollout" or sum(taken.values()) > state + _activations(items):
        # The rollout engine takes almost nothing while it sleeps.
        key = max(taken, key=lambda name: taken[name])
        fix = "lower it, or offload the actor (fsdp_config.param_offload=true)"
        return error(key, _value(ctx, key), over, fix)
    if -ledger.margin_gib < 0.75 * _activations(items):
        return error(_MICRO, _value(ctx, _MICRO), over, "lower it (to 1 at least), or shorten the sequences")
    fix = (
        "take a smaller model or more GPUs, train an adapter (actor_rollout_ref.model.lora_rank=32 "
        f"actor_rollout_ref.model.lora.merge=true), or keep the state in host memory "
        f"({_ACTOR}.fsdp_config.offload_policy=true)"
    )
    return error("base_model", config.base_model, over, fix)


def _sum(items: dict[str, float], owner: str) -> float:
    return sum(gib for name, gib in items.items() if name.startswith(owner))


def _activations(items: dict[str, float]) -> float:
    names = ("actor: kept inputs", "actor: one layer", "actor: activations", "actor: logits")
    return sum(items.get(name, 0.0) for name in names)


def _value(ctx: CheckContext, key: str) -> object:
    return OmegaConf.select(ctx.config, key)


def _largest(ledger: Ledger) -> str:
    """The sum of the worst phase, and its largest items."""
    items = ledger.phases[ledger.worst]
    largest = sorted(items.items(), key=lambda item: -item[1])[:4]
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
    return f"{ledger.total(ledger.worst):.1f} GiB of {ledger.capacity_gib:.1f} ({listed}, …)"


def _host(ctx: CheckContext, ledger: Ledger) -> Iterator[Finding]:
    if not ledger.capacity_gib:
        return
    items = ledger.phases[ledger.worst]
    certain = sum(gib for name, gib in items.items() if name.endswith(_CERTAIN))
    needed = f"at full length it takes {_largest(ledger)}"
    key = "base_model" if ctx.trains else "solver.model_path"
    if certain > ledger.capacity_gib:
        yield error(
            key,
            _value(ctx, key),
            f"the model does not fit this machine's memory: {needed}",
            "take a smaller model",
        )
    elif ledger.margin_gib < 0:
        yield warning(
            "memory",
            f"{ledger.capacity_gib:.0f} GiB",
            f"the machine may run out of memory: {needed}",
            f"close other programs, or lower {_MICRO} and solver.max_batch_size",
        )


def _host_next_to_gpus(ctx: CheckContext) -> Iterator[Finding]:
    """Host memory must hold what all GPUs offload, the run's processes and retrieval."""
    config, machine = ctx.config, ctx.machine
    if machine.host_gib is None:
        return
    items = {"processes": PROCESSES_HOST_GIB if ctx.trains else SERVING_HOST_GIB}
    items |= retrieval_in_host_memory(config)
    if ctx.trains and (shape := ctx.shape(config.actor_rollout_ref.model.path)):
        items["offloaded weights and Adam states"] = offloaded_host_gib(config, shape) / machine.nodes
    if (wanted := sum(items.values())) > machine.host_gib:
        listed = ", ".join(f"{name} {gib:.0f}" for name, gib in sorted(items.items(), key=lambda i: -i[1]))
        yield error(
            "machine" if machine.is_local else "compute.memory",
            f"{machine.host_gib:.0f} GiB",
            f"the run takes {wanted:.0f} GiB of host memory ({listed})",
            "ask for more, serve the index from another machine (chroma.path=http://…), or offload less "
            "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=false)",
        )


def _unknown(ctx: CheckContext) -> Iterator[Finding]:
    models = [model for model in ctx.models().values() if ctx.shape(model) is None]
    if models and (ctx.trains or ctx.serves_model):
        yield warning(
            "memory",
            "not checked",
            f"the sizes of {models[0]} are not known here (no config.json of a Llama, Qwen2 or Qwen3 model)",
            "download the model, or name a folder",
        )
