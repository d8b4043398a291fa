"""The memory ledger: GPU memory of a training run, item by item, by phase.

docs/preflight.md has the phases and the formulas. This is where they come from:

- Gathered are bfloat16 copies, one layer ahead, and a layer's gradient in float32 as it is reduced.
- flash-attn's cross-entropy writes over the logits. Otherwise there are bfloat16 ones, float32 log-probs of
  each token, and gradients. sdpa multiplies all tokens of a micro-batch with all.
- With use_no_sync_for_gradient_accumulation each device holds the gradients whole, in float32, until the
  last micro-batch. Adam's own step needs as much again as sharded ones, unless it is fused.
- Gradients exist in the update alone: veRL drops them when it leaves training mode
  (transformer_impl.py:1138).
- The sync gathers whole tensors into buckets; one bucket is still referenced while the next is filled
  (sglang_rollout.py:378), and a tensor that does not fit is gathered before that is seen. A LoRA adapter is
  merged on the GPU first, so the actor's weights are there as well.
- SGLang keeps weights and KV cache within its share, after its context; `sglang_memory` has the rest, awake
  and asleep. The solver's server starts first, on an empty GPU.
- The reference engine takes its weights, and a full-length slot per sequence.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig

from drzero.preflight.machine import Machine
from drzero.preflight.model_shape import ModelShape
from drzero.preflight.sglang_memory import CONTEXT_GIB, GIB, MIB, kept_gib, outside_gib
from drzero.recipe.gpu_split import pools
from drzero.recipe.indices import places_of
from search.embedders import PACKAGED_EMBEDDER
from search.errors import StoreError
from search.faiss.location import find_files

EMBEDDER_GIB = 2.5
"""An encoder process with a large embedding model and its activations, on a GPU or in host memory."""
SMALL_EMBEDDER_GIB = 0.5
TIGHT = 0.08  # a smaller share left over is a warning, because fragmentation may take that much
PROCESSES_GIB = 6.0
"""Memory of a CPU run's processes for any model: veRL, Ray, retrieval, logs (measured: 5 to 7)."""
SHARING = ("sglang", "vllm")
"""Engines that take a share of every GPU."""
SGLANG_PROCESSES_GIB = 3.0
"""More for an SGLang's processes (measured: 10 for a solver's run with a tiny model)."""

CHUNK_TOKENS = 512  # tokens whose logits veRL's fused head has at a time (FusedLinearForPPO)


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

    @property
    def filled(self) -> float:
        """The share of the capacity that the worst phase needs."""
        return self.total(self.worst) / self.capacity_gib


@dataclass(frozen=True)
class Server:
    """An inference engine on the GPUs."""

    name: str
    shape: ModelShape
    engine: str
    tp: int
    share: float
    slots: int  # concurrent sequences of the reference engine
    positions: int
    dtype: str
    cache_mib: float = 0.0

    @property
    def weights_gib(self) -> float:
        """Weights on each GPU."""
        return width(self.dtype) * self.shape.parameters / self.tp / GIB

    def kv_gib(self, tokens: int) -> float:
        """KV cache of `tokens` on each GPU. Fewer key heads than tp are replicated."""
        numbers = 2 * self.shape.layers * self.shape.kv_size * tokens
        return width(self.dtype) * numbers / min(self.tp, self.shape.kv_heads) / GIB

    def items(self, free_gib: float, gpu_gib: float) -> dict[str, float]:
        """Its items on a GPU while it works, if `free_gib` of `gpu_gib` were free at its start."""
        if self.engine == "vllm":  # of the whole GPU, with its graphs and activations
            return {self.share_item: self.share * gpu_gib, f"{self.name}: outside it": CONTEXT_GIB}
        if self.engine == "sglang":
            return {
                self.share_item: self.share * (free_gib - CONTEXT_GIB),
                f"{self.name}: outside it": outside_gib(self.shape, gpu_gib, self.tp),
            }
        return self.host_items()

    def host_items(self) -> dict[str, float]:
        """The same per rank without a GPU, where SGLang's cache has a fixed size too."""
        items = {
            f"{self.name}: weights": self.weights_gib,
            f"{self.name}: KV cache": self.kv_gib(self.slots * self.positions) + self.cache_mib / 1024,
        }
        return items | ({f"{self.name}: processes": SGLANG_PROCESSES_GIB} if self.engine == "sglang" else {})

    @property
    def share_item(self) -> str:
        """The name of its share in a ledger."""
        return f"{self.name}: share"


def width(dtype: str) -> int:
    """Bytes of a number."""
    return 4 if str(dtype) in ("fp32", "float32", "float") else 2


def rollout_server(config: DictConfig, shape: ModelShape) -> Server:
    """The rollout engine."""
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
        cache_mib=(reference.get("prefix_cache_mib") or 0.0) if rollout.name == "reference" else 0.0,
    )


def solver_server(config: DictConfig, shape: ModelShape) -> Server:
    """The solver's server, or the server of a stage without training."""
    solver = config.solver
    return Server(
        name="solver",
        shape=shape,
        engine=solver.engine,
        tp=solver.tp_size if solver.engine in SHARING else 1,
        share=solver.mem_fraction_static,
        slots=min(solver.max_batch_size, solver.concurrency),
        positions=solver.max_context_tokens,
        dtype=solver.dtype,
    )


def lora_rank(config: DictConfig) -> int:
    """The rank of the trained adapter; 0 for whole weights."""
    model = config.actor_rollout_ref.model
    return int(model.lora_rank or (model.get("lora") or {}).get("rank") or 0)


def trained(config: DictConfig, shape: ModelShape) -> int:
    """Trained weights: the adapter's, or all."""
    rank = lora_rank(config)
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
    """GiB of a micro-batch's forward and backward pass, by the formulas of docs/preflight.md."""
    tokens, per_gib = micro_batch_tokens(config), number_bytes / GIB
    hidden, intermediate = (4, 3) if config.actor_rollout_ref.model.get("use_liger") else (8, 4)
    one = per_gib * tokens * (hidden * shape.hidden + 2 * (shape.query_size + 2 * shape.kv_size))
    one += per_gib * tokens * intermediate * shape.intermediate
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        kept = {"actor: kept inputs": per_gib * tokens * shape.hidden * shape.layers, "actor: one layer": one}
    else:
        kept = {"actor: activations": one * shape.layers}
    mask = (
        {"actor: mask": 2 * tokens * tokens / GIB}
        if attention(config) == "sdpa" and number_bytes == 2
        else {}
    )
    return kept | mask | head_items(config, shape, tokens, number_bytes)


def head_items(config: DictConfig, shape: ModelShape, tokens: int, number_bytes: int) -> dict[str, float]:
    """GiB of the log-probabilities' forward and backward pass."""
    if config.actor_rollout_ref.model.use_fused_kernels:
        weights = 2 * number_bytes * shape.vocabulary * shape.hidden
        return {"actor: head": (24 * CHUNK_TOKENS * shape.vocabulary + weights) / GIB}
    return {"actor: logits": logits_bytes(config) * tokens * shape.vocabulary / GIB}


def attention(config: DictConfig) -> str:
    """The actor's attention; veRL's default is flash-attention."""
    chosen = config.actor_rollout_ref.model.get("override_config") or {}
    return str(chosen.get("attn_implementation", "flash_attention_2"))


def adam_is_fused(config: DictConfig) -> bool:
    """Whether one kernel makes Adam's step."""
    return bool((config.actor_rollout_ref.actor.optim.get("override_optimizer_config") or {}).get("fused"))


def reduces_once(config: DictConfig) -> bool:
    """Whether gradients are exchanged once an update instead of once a micro-batch."""
    return bool(config.actor_rollout_ref.actor.fsdp_config.get("use_no_sync_for_gradient_accumulation"))


def logits_bytes(config: DictConfig) -> int:
    """Bytes of a token and word between forward and backward pass.

    veRL lets flash-attn's cross-entropy write the gradient over the logits, unless it computes the entropy as
    well (fsdp/transformer_impl.py:1425-1432); another temperature than 1 costs a copy.
    """
    actor = config.actor_rollout_ref.actor
    entropy = actor.entropy_coeff != 0 or actor.calculate_entropy
    if attention(config) != "flash_attention_2" or entropy:
        return 10
    return 2 if config.actor_rollout_ref.rollout.temperature == 1 else 4


def training_ledger(config: DictConfig, machine: Machine, shape: ModelShape, solver: ModelShape) -> Ledger:
    """The ledger of one GPU (of the head, which has the services) in a training stage."""
    assert machine.gpu is not None
    capacity, fsdp = machine.gpu.memory_gib, config.actor_rollout_ref.actor.fsdp_config
    others = {"contexts": 2 * CONTEXT_GIB}
    if config.method == "hrpo":
        others |= solver_server(config, solver).items(capacity, capacity)
    others |= encoders_on_gpu(config, machine.gpus)
    state = actor_state(config, shape, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    resident = resident_state(state, fsdp)
    free = capacity - sum(others.values()) - sum(resident.values())
    server = rollout_server(config, shape)
    engine = server.items(free, capacity)
    sleeping = engine
    weights = {"rollout engine: weights": server.weights_gib}
    if sleeps(config):
        # Nobody has measured vLLM's, so SGLang's figure stands in.
        kept = kept_gib(shape, capacity, server.tp) if server.engine in SHARING else CONTEXT_GIB
        sleeping = {"rollout engine: asleep": kept}
        if server.engine == "sglang" and serves_adapter(config):  # sglang_rollout.py:206
            sleeping |= weights
    gathered = (2 * (2 * shape.layer + shape.embeddings) + 4 * shape.layer) / GIB
    update = others | sleeping | actor_activations(config, shape) | {"actor: gathered": gathered}
    ledger = Ledger(capacity, {"rollout": others | engine | resident})
    held = {} if fsdp.offload_policy else state
    whole = {"actor: gradients": 4 * trained(config, shape) / GIB} if reduces_once(config) else {}
    ledger.phases["update"] = update | held | whole
    if held and not adam_is_fused(config):
        step = {"actor: Adam's step": state["actor: gradients"]}
        ledger.phases["optimizer's step"] = others | sleeping | held | step
    if server.engine in SHARING and sleeps(config):
        synced = others | sleeping | resident | weights
        ledger.phases["weight sync"] = synced | sync_items(config, shape, state)
    if len(pools(config)) > 1:
        alone = others | server.items(capacity - sum(others.values()), capacity)
        ledger.phases["GPU that only samples"] = alone | {"rollout engine: buckets": buckets_gib(config)}
    return ledger


def sleeps(config: DictConfig) -> bool:
    """Whether the rollout engine frees its memory for the update."""
    return bool(config.actor_rollout_ref.rollout.free_cache_engine)


def serves_adapter(config: DictConfig) -> bool:
    """Whether the rollout engine gets an adapter, instead of weights it is merged into."""
    return lora_rank(config) > 0 and not config.actor_rollout_ref.model.lora.merge


def sync_items(config: DictConfig, shape: ModelShape, state: dict[str, float]) -> dict[str, float]:
    """The actor's items while SGLang takes its weights."""
    own = width(config.actor_rollout_ref.actor.fsdp_config.model_dtype or "fp32")
    largest = own * shape.vocabulary * shape.hidden / GIB
    items = {"actor: buckets of weights": max(buckets_gib(config), 2 * largest) + largest}
    if lora_rank(config):
        items |= {"actor: weights": state["actor: weights"], "actor: gathered": own * shape.layer / GIB}
    return items


def buckets_gib(config: DictConfig) -> float:
    """The two buckets in which weights are sent: one is filled while the other is on its way."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    return 2 * float(engine.update_weights_bucket_megabytes) * MIB / GIB


def _serves_search(config: DictConfig) -> bool:
    environment = config.get("environment")
    return not (environment and environment.name) and config.retrieval.url is None


def encoders_on_gpu(config: DictConfig, gpus: int) -> dict[str, float]:
    """Encoder processes on the GPU with most of them. They are assigned round-robin."""
    if not _serves_search(config) or not str(config.retrieval.device).startswith("cuda"):
        return {}
    is_spread = str(config.retrieval.device) == "cuda"
    on_one = math.ceil(config.retrieval.encoders / gpus) if is_spread else config.retrieval.encoders
    return {"encoders (of one GPU)": on_one * EMBEDDER_GIB}


def retrieval_in_host_memory(config: DictConfig) -> dict[str, float]:
    """Encoder processes and the index, in GiB.

    A FAISS file is mapped, but queries read much of it (a flat one, all), so it has to stay in memory.
    """
    if not _serves_search(config):
        return {}
    on_gpu = str(config.retrieval.device).startswith("cuda")
    each = SMALL_EMBEDDER_GIB if config.retrieval.embedder == PACKAGED_EMBEDDER else EMBEDDER_GIB
    items = {} if on_gpu else {"encoders": config.retrieval.encoders * each}
    if size := sum(path.stat().st_size for path in index_files(config)):
        items["index"] = size / GIB
    return items


def index_files(config: DictConfig) -> Iterator[Path]:
    """The files of this machine that the retrieval service keeps in memory."""
    with suppress(StoreError):  # `check_index` reports it
        if config.index == "faiss":
            yield find_files(config.faiss.path, config.faiss.corpus).index
            return
        for place in places_of(config):
            if place.folder is not None:  # shards are folders with a Chroma each
                yield from place.folder.glob("*/*/*.bin" if config.chroma.shards > 1 else "*/*.bin")


def host_ledger(config: DictConfig, machine: Machine, shape: ModelShape, solver: ModelShape) -> Ledger:
    """The ledger of a CPU machine (the head) in a training stage: all phases at once."""
    of_each = rollout_server(config, shape).host_items() | actor_activations(config, shape, number_bytes=4)
    items = {"processes": PROCESSES_GIB} | {name: gib * config.machine.gpus for name, gib in of_each.items()}
    items |= retrieval_in_host_memory(config)
    if config.method == "hrpo":
        items |= solver_server(config, solver).host_items()
    items |= actor_state(config, shape, machine.nodes)
    return Ledger(machine.host_gib or 0.0, {"training": items})


def serving_ledger(config: DictConfig, machine: Machine, shape: ModelShape) -> Ledger:
    """The ledger of a stage that only serves a model (synthesize, evaluate)."""
    capacity = machine.gpu.memory_gib if machine.gpu else machine.host_gib or 0.0
    server = solver_server(config, shape)
    items = server.items(capacity, capacity) if machine.gpu else server.host_items()
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
    absent = {"actor: gradients"} | ({"actor: weights"} if fsdp.param_offload else set())
    absent |= {"actor: Adam"} if fsdp.optimizer_offload else set()
    return {name: gib for name, gib in state.items() if name not in absent}


def offloaded_gib(config: DictConfig, shape: ModelShape) -> float:
    """GiB of host memory for what all GPUs offload, with gradients under an offload policy.

    All of it is pinned, but for the Adam states under an offload policy, which the processor makes.
    """
    fsdp, state = config.actor_rollout_ref.actor.fsdp_config, actor_state(config, shape, 1)
    resident = resident_state(state, fsdp)
    away = {name: gib for name, gib in state.items() if name not in resident}
    if fsdp.offload_policy:
        unpinned = away.pop("actor: Adam")
    else:
        unpinned = 0.0
        del away["actor: gradients"]
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    return unpinned + sum(away.values()) * pinned_ratio(shape, ranks)


def pinned_ratio(shape: ModelShape, ranks: int) -> float:
    """Pinned bytes for a byte of the model's state.

    FSDP2 gives each rank a piece of each matrix, and PyTorch rounds the pinned memory of each piece up to a
    power of two (torch.cuda.memory.host_memory_stats). Biases and norms are left out.
    """
    heads = [shape.vocabulary * shape.hidden] * (1 if shape.tied else 2)
    pieces = [4 * inputs * outputs // ranks for inputs, outputs in shape.linear * shape.layers]
    pieces += [4 * weights // ranks for weights in heads]
    return sum(1 << (size - 1).bit_length() for size in pieces) / sum(pieces)


def weights_backup_gib(config: DictConfig, shape: ModelShape, gpus: int) -> float:
    """Host memory for the sleeping engines' copies of their weights (async_sglang_server.py:382).

    vLLM makes one only for an adapter: it gets whole weights anew (vllm_async_server.py, sleep level 2).
    """
    server, adapter = rollout_server(config, shape), serves_adapter(config)
    backs_up = {"sglang": not adapter, "vllm": adapter}.get(server.engine, False)
    return server.weights_gib * gpus if backs_up and sleeps(config) else 0.0


def loading_gib(config: DictConfig, shape: ModelShape, ranks: int) -> float:
    """Host memory while the ranks load the model.

    Every rank loads a tied model whole, other models only the first (get_init_weight_context_manager).
    """
    own = width(config.actor_rollout_ref.actor.fsdp_config.model_dtype or "fp32") * shape.parameters / GIB
    return own * (ranks if shape.tied else 1)


def sequence_parallel(config: DictConfig) -> int:
    """Ulysses' sequence parallelism: the devices that share one sequence."""
    return int(config.actor_rollout_ref.actor.get("ulysses_sequence_parallel_size") or 1)
