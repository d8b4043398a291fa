"""Arguments of the model servers that the user adds (`solver.server_args`, `rollout.server_args`).

They are judged by the pinned engine's own table (`verl_ext.server_arguments`): that there is such an
argument, its kind and its choices. What a key of the recipe's or of veRL's sets is refused, with that key.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from drzero.ops.text import nearest
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error
from verl_ext.server_arguments import REFERENCE_ROLLOUT, REFERENCE_SERVER, Argument, sglang_arguments
from verl_ext.sglang.compat import PINNED

_VERL = "actor_rollout_ref.rollout"
_KWARGS = f"{_VERL}.engine_kwargs.sglang"
SERVERS_OWN: dict[str, str | None] = {
    **{"model_path": "solver.model_path", "dtype": "solver.dtype", "host": "solver.host"},
    **{"port": "solver.port", "tp_size": "solver.tp_size", "dp_size": "solver.dp_size"},
    **{"mem_fraction_static": "solver.mem_fraction_static", "context_length": "solver.max_context_tokens"},
    **{"log_level": "log_level", "served_model_name": None, "enable_metrics": None},
    **{"api_key": "OPENAI_API_KEY in .env", "admin_api_key": "OPENAI_API_KEY in .env"},
}
"""Arguments of the solver's server that are the recipe's, and what sets them; None: nothing else may."""
ROLLOUTS_OWN: dict[str, str | None] = {
    **{"model_path": "actor_rollout_ref.model.path", "dtype": f"{_VERL}.dtype", "host": None, "port": None},
    **{"tp_size": f"{_VERL}.tensor_model_parallel_size", "dp_size": f"{_VERL}.data_parallel_size"},
    **{"ep_size": f"{_VERL}.expert_parallel_size", "nnodes": "machine.nodes", "node_rank": None},
    **{"mem_fraction_static": f"{_VERL}.gpu_memory_utilization", "context_length": f"{_VERL}.max_model_len"},
    **{"max_running_requests": f"{_VERL}.max_num_seqs", "disable_cuda_graph": f"{_VERL}.enforce_eager"},
    **{"load_format": f"{_VERL}.load_format", "quantization": f"{_VERL}.quantization"},
    **{"trust_remote_code": "actor_rollout_ref.model.trust_remote_code", "base_gpu_id": None},
    **{"gpu_id_step": None, "skip_tokenizer_init": f"{_VERL}.skip_tokenizer_init"},
    **{"enable_memory_saver": None, "enable_weights_cpu_backup": None, "api_key": None},
}
"""Arguments of the rollout engine that veRL sets, and by what."""
_OF_VLLM = {
    **{"max_model_len": "context_length", "gpu_memory_utilization": "mem_fraction_static"},
    **{"block_size": "page_size", "enforce_eager": "disable_cuda_graph", "seed": "random_seed"},
    **{"max_num_seqs": "max_running_requests", "tensor_parallel_size": "tp_size"},
    **{"enable_auto_tool_choice": "tool_call_parser"},
}
"""vLLM's names for the same, which guides have."""


def check_server_arguments(ctx: CheckContext) -> Iterator[Finding]:
    """What is added to an engine's arguments must be among them, and of the right kind."""
    config, sglang = ctx.config, f"SGLang {PINNED}"
    if ctx.serves_model:
        given, of_sglang = config.solver.server_args, config.solver.engine == "sglang"
        if of_sglang:
            yield from _judged("solver.server_args", given, sglang_arguments(), sglang, SERVERS_OWN)
        else:
            yield from _judged("solver.server_args", given, REFERENCE_SERVER, "the reference engine's server")
    if not ctx.trains:
        return
    rollout, given = config.actor_rollout_ref.rollout, config.rollout.server_args
    if rollout.name == "reference":
        yield from _judged("rollout.server_args", given, REFERENCE_ROLLOUT, "the reference engine's rollout")
        return
    yield from _judged("rollout.server_args", given, sglang_arguments(), sglang, ROLLOUTS_OWN)
    # veRL passes them on as they are: its own keys' too, which the profile of a CPU replaces here.
    passed = rollout.engine_kwargs.get("sglang") or {}
    typed = {name: value for name, value in passed.items() if name not in given}
    yield from _judged(_KWARGS, typed, sglang_arguments(), sglang)


def _judged(
    key: str,
    given: Mapping[str, Any],
    known: Mapping[str, Argument],
    engine: str,
    own: Mapping[str, str | None] | None = None,
) -> Iterator[Finding]:
    for name, value in given.items():
        place, elsewhere = f"{key}.{name}", own or {}
        if name in elsewhere:
            other = elsewhere[name]
            fix = f"set {other} instead" if other else "remove it"
            yield error(place, "the run sets this argument itself", fix, value=_shown(name, value))
        elif name not in known:
            yield error(place, *_unknown(name, known, engine), value=_shown(name, value))
        elif fault := known[name].fault(value):
            yield error(place, f"of {engine}, {name} {fault}", "correct the value")


def _unknown(name: str, known: Mapping[str, Argument], engine: str) -> tuple[str, str]:
    near = _OF_VLLM.get(name) if _OF_VLLM.get(name) in known else None
    near = near or next(iter(nearest(name.replace("-", "_"), known)), None)
    if len(known) < 10:
        return f"{engine} has no such argument", f"choose among {', '.join(known)}, or remove it"
    meant = f"write {near}" if near else "remove it"
    return f"{engine} has no such argument", f"{meant}; verl_ext/sglang/server_arguments.yaml lists them"


def _shown(name: str, value: Any) -> str:
    """A value for the table of findings; of what may be secret, that it is set."""
    return "set" if "key" in name or "password" in name else str(value)
