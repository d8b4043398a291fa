"""Users' own server arguments must fit the pinned engine. Arguments that another key sets are refused."""

from collections.abc import Iterator, Mapping
from typing import Any

from drzero.ops.text import nearest
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error
from verl_ext.server_arguments import (
    REFERENCE_ROLLOUT,
    REFERENCE_SERVER,
    VLLM_SERVER,
    Argument,
    sglang_arguments,
)
from verl_ext.sglang.compat import PINNED

_VERL = "actor_rollout_ref.rollout"
_KWARGS = f"{_VERL}.engine_kwargs.sglang"
SERVERS_OWN: dict[str, str | None] = {
    "admin_api_key": "OPENAI_API_KEY in .env",
    "api_key": "OPENAI_API_KEY in .env",
    "context_length": "solver.max_context_tokens",
    "dp_size": "solver.dp_size",
    "dtype": "solver.dtype",
    "enable_metrics": None,
    "host": "solver.host",
    "log_level": "log_level",
    "mem_fraction_static": "solver.mem_fraction_static",
    "model_path": "solver.model_path",
    "port": "solver.port",
    "served_model_name": None,
    "tp_size": "solver.tp_size",
}
"""Arguments of the solver's server that the recipe sets, and the key for them; None if there is no key."""
ROLLOUTS_OWN: dict[str, str | None] = {
    "api_key": None,
    "base_gpu_id": None,
    "context_length": f"{_VERL}.max_model_len",
    "disable_cuda_graph": f"{_VERL}.enforce_eager",
    "dp_size": f"{_VERL}.data_parallel_size",
    "dtype": f"{_VERL}.dtype",
    "enable_memory_saver": None,
    "enable_weights_cpu_backup": None,
    "ep_size": f"{_VERL}.expert_parallel_size",
    "gpu_id_step": None,
    "host": None,
    "load_format": f"{_VERL}.load_format",
    "max_running_requests": f"{_VERL}.max_num_seqs",
    "mem_fraction_static": f"{_VERL}.gpu_memory_utilization",
    "model_path": "actor_rollout_ref.model.path",
    "nnodes": "machine.nodes",
    "node_rank": None,
    "port": None,
    "quantization": f"{_VERL}.quantization",
    "skip_tokenizer_init": f"{_VERL}.skip_tokenizer_init",
    "tp_size": f"{_VERL}.tensor_model_parallel_size",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
}
"""Arguments of the rollout engine that veRL sets, and the key for them."""
_OF_VLLM = {
    "block_size": "page_size",
    "enable_auto_tool_choice": "tool_call_parser",
    "enforce_eager": "disable_cuda_graph",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "seed": "random_seed",
    "tensor_parallel_size": "tp_size",
}
"""vLLM's names, which guides use."""


def check_server_arguments(ctx: CheckContext) -> Iterator[Finding]:
    """Added arguments must exist in the engine and have the right kind."""
    config, sglang = ctx.config, f"SGLang {PINNED}"
    if ctx.serves_model:
        known, engine, own = {
            "sglang": (sglang_arguments(), sglang, SERVERS_OWN),
            "vllm": (VLLM_SERVER, "vLLM's server, as started here,", {}),
            "reference": (REFERENCE_SERVER, "the reference engine's server", {}),
        }[config.solver.engine]
        yield from _judged("solver.server_args", config.solver.server_args, known, engine, own)
    if not ctx.trains:
        return
    rollout, given = config.actor_rollout_ref.rollout, config.rollout.server_args
    if rollout.name == "reference":
        engine = "the reference engine's rollout"
        yield from _judged("rollout.server_args", given, REFERENCE_ROLLOUT, engine, {})
        return
    if rollout.name == "vllm":
        for name, value in given.items():
            why = "veRL hands vLLM's arguments on as they are, and only SGLang's are known here"
            fix = f"write +{_VERL}.engine_kwargs.vllm.{name}, which vLLM checks when it starts"
            yield error(f"rollout.server_args.{name}", why, fix, value=_shown(name, value))
        return
    yield from _judged("rollout.server_args", given, sglang_arguments(), sglang, ROLLOUTS_OWN)
    # veRL passes these on unchanged, including its own arguments, which hardware=cpu replaces here.
    passed = rollout.engine_kwargs.get("sglang") or {}
    typed = {name: value for name, value in passed.items() if name not in given}
    yield from _judged(_KWARGS, typed, sglang_arguments(), sglang, {})


def _judged(
    key: str,
    given: Mapping[str, Any],
    known: Mapping[str, Argument],
    engine: str,
    own: Mapping[str, str | None],
) -> Iterator[Finding]:
    for name, value in given.items():
        place = f"{key}.{name}"
        if name in own:
            fix = f"set {own[name]} instead" if own[name] else "remove it"
            yield error(place, "the run sets this argument itself", fix, value=_shown(name, value))
        elif name not in known:
            why = f"{engine} has no such argument"
            yield error(place, why, _meant(name, known), value=_shown(name, value))
        elif fault := known[name].fault(value):
            yield error(place, f"of {engine}, {name} {fault}", "correct the value")


def _meant(name: str, known: Mapping[str, Argument]) -> str:
    if len(known) < 10:
        return f"choose among {', '.join(known)}, or remove it"
    near = [_OF_VLLM[name]] if name in _OF_VLLM else nearest(name.replace("-", "_"), known)
    meant = f"write {near[0]}" if near else "remove it"
    return f"{meant}; verl_ext/sglang/server_arguments.yaml lists them"


def _shown(name: str, value: Any) -> str:
    return "set" if "key" in name or "password" in name else str(value)
