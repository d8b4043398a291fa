"""The memory ledger: what a training run needs of each GPU, item by item, in its two phases.

*Rollout*: both inference engines hold their shares, the actor what it has not offloaded. *Update*: the
rollout engine has freed its memory (`free_cache_engine`), the solver's server has not, and the actor holds
everything. With P weights, P' trained ones (an adapter's with LoRA, else P), D devices that FSDP2
shards over, w bytes a weight (4, or 2 with model_dtype=bf16), T tokens of a micro-batch at full length
(micro-batch size × (prompt + response), or ppo_max_token_len_per_gpu), H hidden, V vocabulary, Q and K the
lengths of a token's queries and keys, I the MLP's width, L layers, in bytes:

    weights        w · P / D             gradients  w · P' / D           Adam  2w · P' / D
    gathered       2 · (2 layers + embedding and output layer) + 4 · 1 layer
                   (bfloat16 copies, one layer fetched ahead; a layer's gradient in float32 as it is reduced)
    kept inputs    2 · T · H · L          with gradient checkpointing
    one layer      2 · T · (8H + 2(Q + 2K) + 4I)   recomputed at a time; all L without checkpointing
    logits         10 · T · V             bfloat16, a float32 copy, and its gradient
    KV cache       2 · 2 · L · K · tokens / tp

SGLang keeps its weights and KV cache within a share (`gpu_memory_utilization`, `mem_fraction_static`) of what
is free when it starts: for the solver's server, which starts first, nearly the whole GPU; for the rollout
engine what the others leave. The reference engine takes its weights, and a slot for each of its sequences at
full length. On a CPU all of it is host memory, both phases at once. docs/preflight.md says more.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from pipeline.preflight.machine import Machine
from pipeline.preflight.model_shape import ModelShape
from search.embedders import PACKAGED_EMBEDDER

GIB = 2**30
ENGINE_EXTRA_GIB = 1.5
"""CUDA graphs and activations of an SGLang engine outside its static share (its rule of thumb is 1 to 3)."""
CONTEXT_GIB = 0.6
"""CUDA context and communication buffers of a process."""
EMBEDDER_GIB = 2.5
"""An encoder process with a large embedding model and its activations, on a GPU or in host memory."""
SMALL_EMBEDDER_GIB = 0.5
"""The same with the packaged one."""
TIGHT = 0.08
"""Share of the memory; a smaller margin is a warning, since fragmentation may take that much."""
PROCESSES_GIB = 6.0
"""Memory of a CPU run's processes for any model: veRL, Ray, retrieval, logs (measured: 5 to 7)."""


@dataclass
class Ledger:
    """GiB by phase and item, and the capacity."""

    capacity_gib: float
    phases: dict[str, dict[str, float]] = field(default_factory=dict)

    def total(self, phase: str) -> float:
        """GiB that a phase needs."""
        return sum(self.phases[phase].values())

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def margin_gib(self) -> float:
        """GiB left in the worst phase; negative if it does not fit."""
        return self.capacity_gib - self.total(self.worst)


@dataclass(frozen=True)
class Server:
    """An inference engine on the GPUs: its name, its model, and how it is laid out."""

    name: str
    shape: ModelShape
    engine: str
    tp: int
    share: float
    slots: int
    """Concurrent sequences of the reference engine."""
    positions: int
    """Tokens of the longest sequence."""
    dtype: str
    cache_mib: float = 0.0

    @property
    def weights_gib(self) -> float:
        """Weights on each GPU."""
        return width(self.dtype) * self.shape.parameters / self.tp / GIB

    def kv_gib(self, tokens: int) -> float:
        """KV cache of so many tokens on each GPU; key heads are replicated if there are fewer than tp."""
        numbers = 2 * self.shape.layers * self.shape.kv_size * tokens
        return width(self.dtype) * numbers / min(self.tp, self.shape.kv_heads) / GIB

    def items(self, free_gib: float) -> dict[str, float]:
        """Its memory items while it works, if `free_gib` were free at its start."""
        if self.engine == "sglang":
            extra = ENGINE_EXTRA_GIB + CONTEXT_GIB
            return {self.share_item: self.share * free_gib, f"{self.name}: outside it": extra}
        return {
            f"{self.name}: weights": self.weights_gib,
            f"{self.name}: KV cache": self.kv_gib(self.slots * self.positions) + self.cache_mib / 1024,
        }

    @property
    def share_item(self) -> str:
        """The item of a ledger that is SGLang's share."""
        return f"{self.name}: share"


def width(dtype: str) -> int:
    """Bytes of a number."""
    return 4 if str(dtype) in ("fp32", "float32", "float") else 2


def rollout_server(config: DictConfig, shape: ModelShape) -> Server:
    """The engine that samples for the training."""
    rollout = config.actor_rollout_ref.rollout
    reference = rollout.engine_kwargs.get("reference") or {}
    return Server(
        name="rollout engine",
        shape=shape,
        engine=rollout.name,
        tp=rollout.tensor_model_parallel_size,
        share=rollout.gpu_memory_utilization,
        slots=rollout.max_num_seqs,
        positions=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
        dtype=rollout.dtype,
        cache_mib=reference.get("prefix_cache_mib") or 0.0,
    )


def solver_server(config: DictConfig, shape: ModelShape) -> Server:
    """The server of the solver, or of the model in a stage without training."""
    solver = config.solver
    return Server(
        name="solver",
        shape=shape,
        engine=solver.engine,
        tp=solver.tp_size if solver.engine == "sglang" else 1,
        share=solver.mem_fraction_static,
        slots=min(solver.max_batch_size, solver.concurrency),
        positions=solver.max_context_tokens,
        dtype=solver.dtype,
    )


def trained(config: DictConfig, shape: ModelShape) -> int:
    """Number of trained weights: the adapter's, or all."""
    model = config.actor_rollout_ref.model
    rank = model.lora_rank or (model.get("lora") or {}).get("rank") or 0
    return shape.adapter(rank) if rank > 0 else shape.parameters


def micro_batch_tokens(config: DictConfig) -> int:
    """Tokens of the largest micro-batch on one device."""
    actor, data = config.actor_rollout_ref.actor, config.data
    if actor.use_dynamic_bsz:
        return int(actor.ppo_max_token_len_per_gpu)
    rows = int(actor.ppo_micro_batch_size_per_gpu)
    return rows * (data.max_prompt_length + data.max_response_length) // sequence_parallel(config)


def actor_state(config: DictConfig, shape: ModelShape, devices: int) -> dict[str, float]:
    """Weights, gradients and optimizer of the actor on each device, in GiB."""
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    shards = fsdp.fsdp_size if fsdp.fsdp_size > 0 else devices
    own = width(fsdp.model_dtype or "fp32") / shards / GIB
    trainable = trained(config, shape)
    return {
        "actor: weights": own * shape.parameters,
        "actor: gradients": own * trainable,
        "actor: Adam": 2 * own * trainable,
    }


def actor_activations(config: DictConfig, shape: ModelShape, number_bytes: int = 2) -> dict[str, float]:
    """GiB of a micro-batch's forward and backward pass, by the formulas of the module docstring."""
    tokens, per_gib = micro_batch_tokens(config), number_bytes / GIB
    one = per_gib * tokens * (8 * shape.hidden + 2 * (shape.query_size + 2 * shape.kv_size))
    one += per_gib * tokens * 4 * shape.intermediate
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        kept = {
            "actor: kept inputs": per_gib * tokens * shape.hidden * shape.layers,
            "actor: one layer": one,
        }
    else:
        kept = {"actor: activations": one * shape.layers}
    return kept | {"actor: logits": 10 * tokens * shape.vocabulary / GIB}


def training_ledger(config: DictConfig, machine: Machine, shape: ModelShape, solver: ModelShape) -> Ledger:
    """The ledger of one GPU of a training stage; `solver` is the opponent's model, in a challenger's run."""
    assert machine.gpu is not None
    capacity = machine.gpu.memory_gib
    others = {"contexts": 2 * CONTEXT_GIB}
    if config.method == "hrpo":
        others |= solver_server(config, solver).items(capacity)
    others |= encoders_on_gpu(config, machine.gpus)
    state = actor_state(config, shape, machine.gpus * machine.nodes)
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    resident = resident_state(state, fsdp)
    free = capacity - sum(others.values()) - sum(resident.values())
    engine = rollout_server(config, shape).items(free)
    asleep = {"rollout engine: asleep": CONTEXT_GIB}
    sleeping = asleep if config.actor_rollout_ref.rollout.free_cache_engine else engine
    gathered = (2 * (2 * shape.layer + shape.embeddings) + 4 * shape.layer) / GIB
    update = others | sleeping | actor_activations(config, shape) | {"actor: gathered": gathered}
    updating = update if fsdp.offload_policy else update | state
    return Ledger(capacity, {"rollout": others | engine | resident, "update": updating})


def encoders_on_gpu(config: DictConfig, gpus: int) -> dict[str, float]:
    """Encoder processes on the GPU that has most of them; they are assigned round-robin."""
    if not str(config.retrieval.device).startswith("cuda"):
        return {}
    is_spread = str(config.retrieval.device) == "cuda"
    on_one = math.ceil(config.retrieval.encoders / gpus) if is_spread else config.retrieval.encoders
    return {"encoders (of one GPU)": on_one * EMBEDDER_GIB}


def retrieval_in_host_memory(config: DictConfig) -> dict[str, float]:
    """Encoder processes and the index's graph, in GiB; an index on another machine takes none."""
    on_gpu = str(config.retrieval.device).startswith("cuda")
    each = SMALL_EMBEDDER_GIB if config.retrieval.embedder == PACKAGED_EMBEDDER else EMBEDDER_GIB
    items = {} if on_gpu else {"encoders": config.retrieval.encoders * each}
    place = str(config.chroma.path)
    if "://" not in place and (size := sum(path.stat().st_size for path in Path(place).glob("*/*.bin"))):
        items["index"] = size / GIB
    return items


def host_ledger(config: DictConfig, machine: Machine, shape: ModelShape, solver: ModelShape) -> Ledger:
    """The ledger of a CPU machine's memory: everything of a training stage at once."""
    items = {"processes": PROCESSES_GIB} | rollout_server(config, shape).items(0.0)
    items |= retrieval_in_host_memory(config)
    if config.method == "hrpo":
        items |= solver_server(config, solver).items(0.0)
    items |= actor_state(config, shape, 1) | actor_activations(config, shape, number_bytes=4)
    return Ledger(machine.host_gib or 0.0, {"training": items})


def serving_ledger(config: DictConfig, machine: Machine, shape: ModelShape) -> Ledger:
    """The ledger of a stage that only serves a model (synthesize, evaluate)."""
    capacity = machine.gpu.memory_gib if machine.gpu else machine.host_gib or 0.0
    items = solver_server(config, shape).items(capacity)
    if machine.gpu is None:
        items["processes"] = PROCESSES_GIB / 2
        items |= retrieval_in_host_memory(config)
    else:
        items |= encoders_on_gpu(config, machine.gpus)
    return Ledger(capacity, {"serving": items})


def resident_state(state: dict[str, float], fsdp: DictConfig) -> dict[str, float]:
    """The actor's state that stays on the GPU while the engines work."""
    if fsdp.offload_policy:
        return {}
    # veRL moves the gradients with the weights.
    moved = {"actor: weights", "actor: gradients"} if fsdp.param_offload else set()
    moved |= {"actor: Adam"} if fsdp.optimizer_offload else set()
    return {name: gib for name, gib in state.items() if name not in moved}


def sequence_parallel(config: DictConfig) -> int:
    """Ulysses' sequence parallelism: the devices that share one sequence."""
    return int(config.actor_rollout_ref.actor.get("ulysses_sequence_parallel_size") or 1)
