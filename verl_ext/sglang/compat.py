"""Whether the installed SGLang has every name that a run uses, without importing it.

Tests compare `NEEDS` with the code, `make compat` compares it with the published wheel.
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path

from drzero.ops.versions import pinned
from verl_ext.sglang.source import Source

PINNED = pinned("sglang", gpu=True)  # the version that a run is made for
SOLVER_ARGUMENTS = {"attention_backend": "flashinfer", "sleep_on_idle": True}
"""Flashinfer until veRL no longer passes it: from 0.5.12 on, CUDA graphs fail with FlashAttention 3 kernels
(SGLang's issue 22800). `sleep_on_idle` frees the cores between rollouts."""
OWN_POSITIONS = 6  # positions of its context that a server keeps for itself
ROLLOUT, SERVER, CLIENT = "veRL's rollout", "the solver's server", "the solver's requests"


@dataclass(frozen=True)
class Need:
    """Something of SGLang that a run uses."""

    kind: str  # A method of `Source`, after "no " if the name must be absent
    name: str
    by: str
    why: str = ""  # what goes wrong, if the name does not explain it

    def found_in(self, source: Source) -> bool:
        """Whether the package meets the need."""
        is_there: bool = getattr(source, self.kind.removeprefix("no "))(self.name)
        return is_there != self.kind.startswith("no ")

    def __str__(self) -> str:
        return f"{self.why or f'{self.kind} {self.name}'} ({self.by})"


def _needs(kind: str, by: str, names: str, prefix: str = "") -> Iterator[Need]:
    return (Need(kind, prefix + name, by) for name in names.split())


_MESSAGES = "sglang.srt.managers.io_struct"
_IMPORTED = {
    "sglang.srt.entrypoints.EngineBase": "EngineBase",
    "sglang.srt.server_args": "ServerArgs",
    "sglang.srt.entrypoints.http_server": "ServerArgs _GlobalState app set_global_state launch_server "
    "Engine._launch_subprocesses",
    "sglang.srt.entrypoints.engine": "init_tokenizer_manager run_scheduler_process run_detokenizer_process "
    "_set_envs_and_config",
    "sglang.srt.managers.tokenizer_manager": "ServerStatus.Up",
    _MESSAGES: "GenerateReqInput UpdateWeightsFromTensorReqInput.flush_cache PauseGenerationReqInput "
    "ContinueGenerationReqInput ReleaseMemoryOccupationReqInput.tags ResumeMemoryOccupationReqInput.tags",
    "sglang.srt.utils": "MultiprocessingSerializer assert_pkg_version is_cuda kill_process_tree "
    "set_prometheus_multiproc_dir set_ulimit",
    "sglang.srt.weight_sync.utils": "update_weights _preprocess_tensor_for_update_weights",
}
"""veRL's imports from the pinned version, by module."""

NEEDS: tuple[Need, ...] = (
    *chain.from_iterable(_needs("symbol", ROLLOUT, names, f"{place}:") for place, names in _IMPORTED.items()),
    # Calls and arguments of veRL's rollout.
    Need(
        "no symbol",
        f"{_MESSAGES}:BeginWeightUpdateReqInput",
        ROLLOUT,
        "weight updates without a session: from 0.5.21 on SGLang refuses an update outside of "
        "/begin_weight_update and /end_weight_update, which veRL does not send",
    ),
    *_needs(
        "argument",
        ROLLOUT,
        "model_path dtype mem_fraction_static disable_cuda_graph enable_memory_saver base_gpu_id gpu_id_step "
        "tp_size dp_size ep_size node_rank load_format nnodes trust_remote_code max_running_requests "
        "log_level mm_attention_backend attention_backend skip_tokenizer_init quantization "
        "json_model_override_args skip_server_warmup custom_weight_loader sleep_on_idle",
    ),
    *_needs(
        "route",
        ROLLOUT,
        "/flush_cache /release_memory_occupation /resume_memory_occupation /update_weights_from_tensor",
    ),
    # The solver's server and its health (drzero/stages/services.py).
    *_needs(
        "argument",
        SERVER,
        "model_path dtype tp_size dp_size mem_fraction_static context_length log_level enable_metrics "
        "served_model_name host port attention_backend sleep_on_idle",
    ),
    # verl_ext.sglang.serve starts it with a bearer token.
    *_needs(
        "symbol",
        SERVER,
        "launch_server:run_server srt.plugins:load_plugins srt.server_args:prepare_server_args "
        "srt.utils:kill_process_tree",
        "sglang.",
    ),
    *_needs("route", SERVER, "/health /health_generate"),
    *_needs("metric", SERVER, "sglang:generation_tokens_total"),
    # The requests also ask for `return_token_ids`, from 0.5.17 on. Other answers are encoded again.
    *_needs("route", CLIENT, "/v1/completions"),
    *_needs(
        "symbol",
        CLIENT,
        "model prompt max_tokens temperature top_p top_k seed stop_token_ids skip_special_tokens "
        "no_stop_trim",
        "sglang.srt.entrypoints.openai.protocol:CompletionRequest.",
    ),
)


def refusal() -> str | None:
    """Why a run cannot use the installed SGLang, in one line. None if it can, or if none is installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Source(Path(next(iter(spec.submodule_search_locations))))
    lacks = [str(need) for need in NEEDS if not need.found_in(source)]
    if not lacks:
        return None
    version = metadata.version("sglang")
    more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    return (
        f"SGLang {version} does not fit veRL {pinned('verl')}: it lacks {lacks[0]}{more}; "
        f"install sglang=={PINNED}"
    )


def main() -> int:
    """Print the verdict on the installed SGLang. Returns 1 if it is refused or missing."""
    if importlib.util.find_spec("sglang") is None:
        print("SGLang is not installed here")
        return 1
    reason = refusal()
    print(reason or f"SGLang {metadata.version('sglang')}: nothing is missing")
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
