"""Whether a stage fits the memory of the machine it is declared for, by the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from pipeline.finding import Finding, error, warning
from pipeline.memory_ledger import (
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

if TYPE_CHECKING:
    from pipeline.subject import Subject

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MICRO = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_FEW_SEQUENCES = 4
"""Of full length in an engine's share: fewer, and it decodes all but one at a time."""
PROCESSES_HOST_GIB = 24.0
"""Of a training run on GPUs, in host memory: veRL's, Ray's and the engines' processes."""
SERVING_HOST_GIB = 8.0
"""The same of a stage that only serves a model."""
_CERTAIN = ("weights", "gradients", "Adam")
"""Items that are there whatever the lengths."""


def stage_ledger(subject: Subject) -> Ledger | None:
    """The ledger of a stage; None where there is no model in memory, or its sizes are not known."""
    config, machine = subject.config, subject.machine
    served = subject.shape(config.solver.model_path) if subject.serves_model else None
    if subject.trains:
        shape = subject.shape(config.actor_rollout_ref.model.path)
        if shape is None or (config.method == "hrpo" and served is None):
            return None
        make = training_ledger if machine.gpu else host_ledger
        return make(config, machine, shape, served or shape)
    return serving_ledger(config, machine, served) if served else None


def check_memory(subject: Subject) -> Iterator[Finding]:
    """The ledger must come out positive, and each engine's share must hold its model."""
    ledger = stage_ledger(subject)
    if ledger is None:
        yield from _unknown(subject)
        return
    if subject.machine.gpu is None:
        yield from _host(subject, ledger)
        return
    for key, server in _engines(subject).items():
        yield from _share(key, server, ledger)
    if ledger.margin_gib < 0:
        yield _does_not_fit(subject, ledger)
    elif ledger.margin_gib < TIGHT * ledger.capacity_gib:
        yield warning(
            "memory",
            f"{ledger.margin_gib:.1f} GiB left",
            f"{ledger.worst} needs {_told(ledger)}, which leaves less than fragmentation may take",
            f"lower {_MICRO}, or the engines' shares",
        )
    yield from _host_beside_gpus(subject)


def _engines(subject: Subject) -> dict[str, Server]:
    config, engines = subject.config, {}
    if subject.trains and (shape := subject.shape(config.actor_rollout_ref.model.path)):
        engines[f"{_ROLLOUT}.gpu_memory_utilization"] = rollout_server(config, shape)
    if subject.serves_model and (shape := subject.shape(config.solver.model_path)):
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
            "not one "
            f"sequence of {server.positions} tokens",
            more,
        )
    elif sequences < _FEW_SEQUENCES:
        yield warning(
            key,
            server.share,
            f"beside {server.weights_gib:.1f} GiB of weights the {server.name}'s share ({share}) holds "
            f"{sequences:.1f} "
            "sequences of full length: it will decode few at a time",
            more,
        )


def _does_not_fit(subject: Subject, ledger: Ledger) -> Finding:
    """The error, at the key that would help: micro-batch, shares, or the model itself."""
    phase, config = ledger.worst, subject.config
    items = ledger.phases[phase]
    over = f"{phase} needs {_told(ledger)}"
    state = sum(gib for name, gib in items.items() if name.startswith("actor") and name.endswith(_CERTAIN))
    server = "solver.mem_fraction_static" if config.solver.engine == "sglang" else "solver.max_batch_size"
    if not subject.trains:
        return error(server, _value(subject, server), over, "lower it, or take a larger GPU")
    is_sglang = config.actor_rollout_ref.rollout.name == "sglang"
    engine = f"{_ROLLOUT}.{'gpu_memory_utilization' if is_sglang else 'max_num_seqs'}"
    taken = {engine: _sum(items, "rollout engine"), server: _sum(items, "solver")}
    if phase == "rollout" or sum(taken.values()) > state + _activations(items):
        # Asleep, the rollout engine takes next to nothing.
        key = max(taken, key=lambda name: taken[name])
        fix = "lower it, or offload the actor (fsdp_config.param_offload=true)"
        return error(key, _value(subject, key), over, fix)
    if -ledger.margin_gib < 0.75 * _activations(items):
        return error(
            _MICRO, _value(subject, _MICRO), over, "lower it (to 1 at least), or shorten the sequences"
        )
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


def _value(subject: Subject, key: str) -> object:
    return OmegaConf.select(subject.config, key)


def _told(ledger: Ledger) -> str:
    """The sum, and its largest items."""
    items = ledger.phases[ledger.worst]
    largest = sorted(items.items(), key=lambda item: -item[1])[:4]
    listed = ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
    return f"{ledger.total(ledger.worst):.1f} GiB of {ledger.capacity_gib:.1f} ({listed}, …)"


def _host(subject: Subject, ledger: Ledger) -> Iterator[Finding]:
    if not ledger.capacity_gib:
        return
    items = ledger.phases[ledger.worst]
    certain = sum(gib for name, gib in items.items() if name.endswith(_CERTAIN))
    told = f"at full length it takes {_told(ledger)}"
    key = "base_model" if subject.trains else "solver.model_path"
    if certain > ledger.capacity_gib:
        yield error(
            key,
            _value(subject, key),
            f"the model does not fit this machine's memory: {told}",
            "take a smaller model",
        )
    elif ledger.margin_gib < 0:
        yield warning(
            "memory",
            f"{ledger.capacity_gib:.0f} GiB",
            f"the machine may run out of memory: {told}",
            f"close other programs, or lower {_MICRO} and solver.max_batch_size",
        )


def _host_beside_gpus(subject: Subject) -> Iterator[Finding]:
    """What is offloaded from all GPUs lies in the memory of their machine, beside processes and retrieval."""
    config, machine = subject.config, subject.machine
    if machine.host_gib is None:
        return
    items = {"processes": PROCESSES_HOST_GIB if subject.trains else SERVING_HOST_GIB}
    items |= retrieval_in_host_memory(config)
    if subject.trains and (shape := subject.shape(config.actor_rollout_ref.model.path)):
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


def _unknown(subject: Subject) -> Iterator[Finding]:
    models = [model for model in subject.models().values() if subject.shape(model) is None]
    if models and (subject.trains or subject.serves_model):
        yield warning(
            "memory",
            "not judged",
            f"the sizes of {models[0]} are not known here (no config.json of a Llama, Qwen2 or Qwen3 model)",
            "download the model, or name a folder",
        )
