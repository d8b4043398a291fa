"""What a run needs of SGLang, whose internals move from version to version, and which versions have it.

    python -m verl_ext.sglang_compat                    # judges the installed SGLang, without importing it
    python -m verl_ext.sglang_compat 0.5.9 0.5.21       # judges versions by the table

Three parts of a run touch SGLang: veRL's rollout server imports its modules and calls its internals, the
solver's server is started by its command line (pipeline/stage_services.py), and solver attempts are requests
to that server (verl_ext/method/search_agent.py). `NEEDS` lists what they ask for and the versions that have
it; `make compat` checks every entry against the published wheels and writes the table in docs/modal-image.md.

Where our own side can adapt, it does, in one place for each:

- `solver_arguments`: the attention kernels of the solver's server.
- `SearchAgent._read`: an answer without token ids (before 0.5.17) is encoded again.

Where veRL's side would have to, the version is refused, in one line (`refusal`): veRL is not patched. The
older names `get_ip` and `maybe_set_triton_cache_manager` are not here because veRL no longer asks for them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from verl_ext.sglang_source import Source

LOOKED_AT = SpecifierSet(">=0.4.6.post5,<=0.5.23")
"""The versions that the table is about."""
FITS = "0.5.12"
"""The version that the GPU image has (launch/pins.py)."""
OWN_POSITIONS = 6
"""Positions of its context that a server keeps for itself."""
ROLLOUT, SERVER, CLIENT = "veRL's rollout", "the solver's server", "the solver's requests"

Probe = Callable[[Source, str], bool]
_PROBES: dict[str, Probe] = {
    "symbol": Source.symbol,
    "argument": Source.argument,
    "route": Source.route,
    "metric": Source.metric,
    # What must not be there.
    "no symbol": lambda source, name: not source.symbol(name),
}


@dataclass(frozen=True)
class Need:
    """Something of SGLang that a run asks for."""

    kind: str
    """A key of `_PROBES`: how it is looked for."""
    name: str
    by: str
    """Which part of a run asks."""
    there: SpecifierSet
    """The versions that have it, of those looked at."""
    asked: SpecifierSet = field(default_factory=SpecifierSet)
    """The versions that are asked for it; all by default. veRL asks by version."""
    why: str = ""
    """What goes wrong without it, where the name does not say."""

    def found_in(self, source: Source) -> bool:
        """Whether the package has it."""
        return _PROBES[self.kind](source, self.name)

    def __str__(self) -> str:
        return (
            f"{self.why or f'{self.kind} {self.name}'} ({self.by}; versions with it: {self.there or 'all'})"
        )


def _row(
    kind: str, by: str, there: str, names: str, prefix: str = "", asked: str = "", why: str = ""
) -> Iterator[Need]:
    """One need for each of the names, which are parted by spaces and begin with the prefix."""
    for name in names.split():
        yield Need(kind, prefix + name, by, SpecifierSet(there), SpecifierSet(asked), why)


_HTTP = "sglang.srt.entrypoints.http_server:"
_ENGINE = "sglang.srt.entrypoints.engine:"
_MESSAGES = "sglang.srt.managers.io_struct:"
_PROTOCOL = "sglang.srt.entrypoints.openai.protocol:"

NEEDS: tuple[Need, ...] = (
    # What veRL 0.9.1's rollout imports.
    *_row("symbol", ROLLOUT, "", "EngineBase:EngineBase", "sglang.srt.entrypoints."),
    *_row("symbol", ROLLOUT, "", "ServerArgs", "sglang.srt.server_args:"),
    *_row("symbol", ROLLOUT, "", "ServerArgs _GlobalState app set_global_state launch_server", _HTTP),
    *_row("symbol", ROLLOUT, ">=0.5.10", "Engine._launch_subprocesses", _HTTP, asked=">=0.5.10"),
    *_row("symbol", ROLLOUT, "<0.5.10", "_launch_subprocesses", _HTTP, asked="<0.5.10"),
    *_row("symbol", ROLLOUT, ">=0.5.7", "init_tokenizer_manager", _ENGINE, asked=">=0.5.7"),
    *_row("symbol", ROLLOUT, "", "run_scheduler_process run_detokenizer_process", _ENGINE),
    *_row("symbol", ROLLOUT, "", "_set_envs_and_config", _ENGINE),
    *_row("symbol", ROLLOUT, ">=0.5.1", "ServerStatus.Up", "sglang.srt.managers.tokenizer_manager:"),
    *_row("symbol", ROLLOUT, "", "GenerateReqInput UpdateWeightsFromTensorReqInput.flush_cache", _MESSAGES),
    *_row("symbol", ROLLOUT, ">=0.5.6", "PauseGenerationReqInput ContinueGenerationReqInput", _MESSAGES),
    *_row("symbol", ROLLOUT, ">=0.4.9", "ReleaseMemoryOccupationReqInput.tags", _MESSAGES),
    *_row("symbol", ROLLOUT, ">=0.4.9", "ResumeMemoryOccupationReqInput.tags", _MESSAGES),
    *_row(
        *("symbol", ROLLOUT, "!=0.5.3"),
        "MultiprocessingSerializer assert_pkg_version is_cuda kill_process_tree set_prometheus_multiproc_dir "
        "set_ulimit",
        "sglang.srt.utils:",
    ),
    *_row(
        *("symbol", ROLLOUT, ">=0.4.10"),
        "update_weights _preprocess_tensor_for_update_weights",
        "sglang.srt.weight_sync.utils:",
    ),
    # What it calls and passes.
    *_row(
        *("no symbol", ROLLOUT, "<0.5.21", "BeginWeightUpdateReqInput", _MESSAGES),
        why="weight updates without a session: from 0.5.21 on SGLang refuses an update outside of "
        "/begin_weight_update and /end_weight_update, which veRL 0.9.1 does not send",
    ),
    *_row(
        *("argument", ROLLOUT, ""),
        "model_path dtype mem_fraction_static disable_cuda_graph enable_memory_saver base_gpu_id gpu_id_step "
        "tp_size dp_size ep_size node_rank load_format nnodes trust_remote_code max_running_requests "
        "log_level mm_attention_backend attention_backend skip_tokenizer_init quantization "
        "json_model_override_args",
    ),
    *_row("argument", ROLLOUT, ">=0.4.9", "skip_server_warmup custom_weight_loader"),
    *_row(
        *("route", ROLLOUT, ""),
        "/flush_cache /release_memory_occupation /resume_memory_occupation /update_weights_from_tensor",
    ),
    # The solver's server and its health (pipeline/stage_services.py).
    *_row(
        *("argument", SERVER, ""),
        "model_path dtype tp_size dp_size mem_fraction_static context_length log_level enable_metrics "
        "served_model_name host port attention_backend",
    ),
    *_row("route", SERVER, "", "/health /health_generate"),
    *_row("metric", SERVER, "", "sglang:generation_tokens_total"),
    # What its attempts send (verl_ext/method/search_agent.py).
    *_row("route", CLIENT, "", "/v1/completions"),
    *_row(
        *("symbol", CLIENT, ">=0.4.9"),
        "model prompt max_tokens temperature top_p top_k seed stop_token_ids skip_special_tokens "
        "no_stop_trim",
        _PROTOCOL + "CompletionRequest.",
    ),
)

HELPFUL: tuple[Need, ...] = (
    *_row("symbol", CLIENT, ">=0.5.17", "CompletionRequest.return_token_ids", _PROTOCOL),
    *_row("symbol", CLIENT, ">=0.5.17", "CompletionResponseChoice.token_ids", _PROTOCOL),
)
"""What is used where it is there, and done without where it is not."""


def missing(version: str) -> list[str]:
    """By the table, what a run would miss in that version of SGLang; one text each.

    Raises ValueError for a version that the table is not about.
    """
    if not LOOKED_AT.contains(Version(version), prereleases=True):
        raise ValueError(f"SGLang {version} has not been looked at, only {LOOKED_AT}: add it to make compat")
    return [str(need) for need in _asked_of(version) if not need.there.contains(version, prereleases=True)]


def missing_in(folder: Path, version: str) -> list[str]:
    """What a run would miss in the SGLang package of that folder, by its source; any version will do."""
    source = Source(folder)
    return [str(need) for need in _asked_of(version) if not need.found_in(source)]


def _asked_of(version: str) -> Iterator[Need]:
    return (need for need in NEEDS if need.asked.contains(version, prereleases=True))


def installed_folder() -> Path | None:
    """Where SGLang is installed; None where it is not. Nothing of it is imported."""
    spec = importlib.util.find_spec("sglang")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def refusal() -> str | None:
    """One line that says why a run cannot use the installed SGLang; None where it can, or none is there."""
    folder = installed_folder()
    if folder is None:
        return None
    version = metadata.version("sglang")
    return _refused(version, missing_in(folder, version))


def _refused(version: str, lacks: list[str]) -> str | None:
    if not lacks:
        return None
    more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
    return f"SGLang {version} does not fit veRL 0.9.1: it lacks {lacks[0]}{more}; install sglang=={FITS}"


def solver_arguments(version: str) -> tuple[str, ...]:
    """Further arguments of the solver's server in that version of SGLang, on CUDA.

    From 0.5.12 on the capture of CUDA graphs fails with FlashAttention 3 kernels (SGLang's issue 22800),
    which are SGLang's choice on an H100. veRL 0.9.1 gives its rollout server the same argument for the same
    versions; when a veRL no longer does, neither need we.
    """
    if Version(version) < Version("0.5.12"):
        return ()
    return ("--attention-backend", "flashinfer")


def main(versions: list[str]) -> int:
    """Print what is missing; 1 where a version is refused."""
    try:
        lines = {version: _refused(version, missing(version)) for version in versions}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not versions:
        folder = installed_folder()
        if folder is None:
            print("SGLang is not installed here")
            return 1
        lines = {metadata.version("sglang"): refusal()}
    for version, line in lines.items():
        print(line or f"SGLang {version}: nothing is missing")
    return 1 if any(lines.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
