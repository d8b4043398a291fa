"""The memory ledger against SGLang's own arithmetic, for every shipped model on every GPU machine.

    .venv-sglang/bin/python -m bench.sglang_memory   # after make rehearse-sglang; no GPU

SGLang builds each model without memory, as the first rank of its tensor-parallel group. Its own functions
compute weights, bytes per cached token, tokens that fit, and captured graphs. Memory free at an engine's
start comes from the ledger. Prints Markdown tables. Exits with 1 if the two differ by more than 1 %.
"""

import functools
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from drzero.preflight.machine import declared_machine
from drzero.preflight.memory_ledger import GIB, rollout_server, solver_server, training_ledger
from drzero.preflight.model_shape import KNOWN, ModelShape, config_of
from drzero.preflight.sglang_memory import captured, kept_gib, outside_gib
from drzero.recipe.compose import CONFIG_DIR, compose_plain, options, resolve
from drzero.recipe.gpu_prices import GPUS
from verl_ext.sglang.cpu import environment, refusal_on_cpu

ALLOWED = 0.01
"""Relative difference: SGLang keeps tables of rotary positions, which the ledger leaves out."""
FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Case:
    """One engine of one model on one machine. Each pair is the ledger's figure and SGLang's."""

    weights: tuple[float, float]
    """GiB on each GPU."""
    cell: tuple[float, float]
    """Bytes of a token's cache on each GPU."""
    tokens: tuple[int, int]
    """Tokens that fit into the share, 0 if the weights do not fit."""

    @property
    def difference(self) -> float:
        """The largest relative one of weights, a token, and all tokens with the weights.

        Infinite if the model fits for one of the two alone.
        """
        if bool(self.tokens[0]) != bool(self.tokens[1]):
            return math.inf
        filled = (
            self.weights[0] * GIB + self.tokens[0] * self.cell[0],
            self.weights[1] * GIB + self.tokens[1] * self.cell[1],
        )
        return max(abs(ours / theirs - 1) for ours, theirs in (self.weights, self.cell, filled))


class SGLang:
    """SGLang's arithmetic in this process, which acts as the first rank of a group of any size."""

    def __init__(self, folder: Path) -> None:
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        self.folder, self.parallel, self.attention = folder, parallel_state, dp_attention
        arguments = ServerArgs(model_path=str(self.model_folder("any", KNOWN["demo-policy"])), device="cpu")
        set_global_server_args_for_scheduler(arguments)
        self.arguments = arguments
        parallel_state.init_distributed_environment(
            backend="gloo",
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/rendezvous",
        )
        parallel_state.initialize_model_parallel()
        dp_attention.initialize_dp_attention(arguments, self.config_of(arguments.model_path))

    def model_folder(self, name: str, shape: ModelShape) -> Path:
        """A folder with the config.json of a shape."""
        config = config_of(shape)
        config |= {"architectures": [FAMILIES[config["model_type"]]], "torch_dtype": "bfloat16"}
        place = self.folder / name
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(config))
        return place

    def config_of(self, folder: str | Path) -> Any:
        """SGLang's own reading of a model's config.json."""
        from sglang.srt.configs.model_config import ModelConfig

        return ModelConfig(model_path=str(folder), dtype="bfloat16")

    def as_rank_of(self, tp: int) -> None:
        """Act as the first rank of a group of `tp`."""
        self.parallel.get_tp_group().world_size = tp
        self.attention._ATTN_TP_SIZE = tp

    @functools.cache  # noqa: B019 - one object a process
    def loaded(self, name: str, shape: ModelShape, tp: int) -> tuple[Any, float]:
        """SGLang's config of a model, and GiB of its weights on one of `tp` GPUs."""
        config = self.config_of(self.model_folder(name, shape))
        self.as_rank_of(tp)
        return config, self.weights_gib(config)

    def weights_gib(self, config: Any) -> float:
        """GiB of the model's parameters and buffers on this rank, built without memory."""
        from sglang.srt.model_loader.utils import get_model_architecture

        made_of, _ = get_model_architecture(config)
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = made_of(config=config.hf_config)
        finally:
            torch.set_default_dtype(usual)
        tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
        return sum(each.numel() * each.element_size() for each in tensors.values()) / GIB

    def tokens(self, config: Any, tp: int, weights: float, free: float, share: float) -> tuple[int, int]:
        """Bytes of a token's cache, and the tokens that fit, if so many GiB are free after its context."""
        from sglang.srt.model_executor import model_runner_kv_cache_mixin as mixin
        from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.as_rank_of(tp)
        # The GPU's answer once the weights are loaded.
        mixin.get_available_gpu_memory = lambda *args, **kwargs: free - weights
        runner = SimpleNamespace(
            **{"device": "cuda", "gpu_id": 0, "mem_fraction_static": share, "mambaish_config": None},
            **{"model_config": config, "kv_cache_dtype": torch.bfloat16, "use_mla_backend": False},
            **{"num_effective_layers": config.num_hidden_layers, "is_draft_worker": False},
            **{"spec_algorithm": SpeculativeAlgorithm.NONE, "is_hybrid_swa": config.is_hybrid_swa},
        )
        rest = mixin.ModelRunnerKVCacheMixin._profile_available_bytes(runner, free)
        configurator = create_memory_pool_configurator(runner)
        try:
            pool = configurator.calculate_pool_sizes(rest, page_size=1)
        except RuntimeError:  # "Not enough memory", as a server would end
            return configurator._cell_size, 0
        return configurator._cell_size, pool.max_total_num_tokens

    def captured(self, gpu_gib: float, tp: int) -> tuple[int, int, int, float]:
        """Tokens of a prefill, largest captured batch, captured prefill lengths, and its reserve in GiB."""
        from sglang.srt.server_args import ServerArgs

        own = SimpleNamespace(**vars(self.arguments))
        for name in ("chunked_prefill_size", "cuda_graph_max_bs", "cuda_graph_bs", "mem_fraction_static"):
            setattr(own, name, None)
        own.piecewise_cuda_graph_max_tokens = own.piecewise_cuda_graph_tokens = own.max_total_tokens = None
        own.tp_size, own.device, own.disable_piecewise_cuda_graph = tp, "cuda", False
        for name in ("use_mla_backend", "_generate_cuda_graph_batch_sizes", "get_model_config"):
            setattr(own, name, getattr(ServerArgs, name).__get__(own))
        own._generate_piecewise_cuda_graph_tokens = ServerArgs._generate_piecewise_cuda_graph_tokens.__get__(
            own
        )
        ServerArgs._handle_gpu_memory_settings(own, gpu_gib * 1024)
        reserve = gpu_gib * (1 - own.mem_fraction_static)
        lengths = len(own.piecewise_cuda_graph_tokens)
        return own.chunked_prefill_size, own.cuda_graph_max_bs, lengths, reserve


def machines() -> Iterator[tuple[str, str]]:
    """The machines of `config/compute/` on which SGLang runs, each with its hardware profile."""
    for name in options("compute"):
        compute = yaml.safe_load((CONFIG_DIR / "compute" / f"{name}.yaml").read_text())["compute"]
        if compute.get("type") and GPUS[compute["type"]].has_bf16:
            yield name, compute["hardware"]


def cases(sglang: SGLang, machine: str, hardware: str, model: str) -> tuple[int, Case, Case]:
    """tp, and the rollout engine and the solver's server of a challenger's run.

    Where the profile has the reference engine, both are SGLang over one GPU all the same.
    """
    words = [f"hardware={hardware}", f"compute={machine}", f"model={model}"]
    config = resolve(compose_plain("challenger", words))
    if config.actor_rollout_ref.rollout.name != "sglang":
        config = resolve(compose_plain("challenger", [*words, "rollout=sglang", "solver.tp_size=1"]))
    shape = KNOWN[Path(config.base_model).name.lower()]
    ledger = training_ledger(config, declared_machine(config, starting=False), shape, shape)
    of_both = []
    for server in (rollout_server(config, shape), solver_server(config, shape)):
        own, weights = sglang.loaded(model, shape, server.tp)
        share = ledger.phases["rollout"][server.share_item]
        cell, tokens = sglang.tokens(own, server.tp, weights, share / server.share, server.share)
        fit = max(0, int((share - server.weights_gib) / server.kv_gib(1)))
        of_both.append(Case((server.weights_gib, weights), (server.kv_gib(1) * GIB, cell), (fit, tokens)))
    return server.tp, of_both[0], of_both[1]


def pair(values: tuple[float, float], form: str) -> str:
    """The ledger's figure and SGLang's."""
    return " / ".join(f"{value:{form}}" if value else "does not fit" for value in values)


def compared(sglang: SGLang) -> tuple[list[str], float]:
    """A table of every model on every machine, and the largest difference."""
    rows: dict[str, list[str]] = {}
    worst = 0.0
    for model in options("model"):
        for machine, hardware in machines():
            tp, rollout, solver = cases(sglang, machine, hardware, model)
            worst = max(worst, rollout.difference, solver.difference)
            sizes = f"{tp} | {pair(rollout.weights, '.2f')} | {pair(rollout.cell, ',.0f')}"
            figures = f"{sizes} | {pair(rollout.tokens, ',d')} | {pair(solver.tokens, ',d')}"
            rows.setdefault(f"| {figures} |", []).append(f"{model} | {machine}")
    heads = ("model", "machine", "tp", "weights, GiB", "bytes a token", "rollout's tokens", "solver's tokens")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for figures, places in rows.items():
        models, names = zip(*(place.split(" | ") for place in places), strict=True)
        where = (", ".join(dict.fromkeys(each)) for each in (models, names))
        lines.append(f"| {' | '.join(where)} {figures}")
    return lines, worst


def graphs(sglang: SGLang) -> tuple[list[str], bool]:
    """A table of the graphs that engines capture on each GPU, and whether the ledger agrees."""
    shape, agree = KNOWN["qwen2.5-7b-instruct"], True
    seen: dict[str, list[str]] = {}
    for name in sorted({gpu.name for gpu in GPUS.values() if gpu.has_bf16}):
        for tp in (1, 2, 4, 8):
            gib = GPUS[name].memory_gib
            ours, theirs = captured(gib, tp), sglang.captured(gib, tp)
            agree &= (ours.prefill_tokens, ours.batch, ours.prefill_lengths) == theirs[:3]
            sizes = " | ".join(f"{size:,}" for size in theirs[:3])
            reserves = f"{kept_gib(shape, gib, tp):.1f} | {outside_gib(shape, gib, tp):.1f} | {theirs[3]:.1f}"
            seen.setdefault(f"{tp} | {sizes} | {reserves}", []).append(name)
    heads = ("GPUs", "tp", "prefill", "batch", "lengths", "asleep", "at work", "SGLang's reserve")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return lines + [f"| {', '.join(names)} | {figures} |" for figures, names in seen.items()], agree


def main() -> int:
    """Print the comparison."""
    if reason := refusal_on_cpu():
        print(f"{reason}: nothing to compare with (docs/sglang.md says how to make an environment)")
        return 0
    os.environ |= environment(tp=1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        sglang = SGLang(Path(folder))
        lines, worst = compared(sglang)
        captures, agree = graphs(sglang)
    print(*lines, "", f"Largest difference: {100 * worst:.2f} %.", "", *captures, sep="\n")
    return 0 if worst <= ALLOWED and agree else 1


if __name__ == "__main__":
    sys.exit(main())
