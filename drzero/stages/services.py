"""The services of a stage: their commands, ports, health checks and logs."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from drzero.ops.bearer import MODEL_KEY, bearer_of
from drzero.ops.process.isolated import in_child
from drzero.ops.process.ports import PortTaken, reserve_port
from drzero.ops.services.external import ExternalSpec
from drzero.ops.services.health import HealthCheck
from drzero.ops.services.services import AnySpec, ServiceSpec
from drzero.preflight.tokenizers import load_tokenizer
from drzero.recipe.compose import process_env, resolve, retrieval_url
from drzero.recipe.errors import CheckError
from drzero.recipe.indices import places_of
from drzero.stages.startup_signs import SGLANG, VLLM
from verl_ext.method.chat import call_form
from verl_ext.server_arguments import REFERENCE_SERVER, VLLM_SERVER, as_words, sglang_arguments
from verl_ext.sglang import cpu
from verl_ext.sglang.compat import OWN_POSITIONS, SOLVER_ARGUMENTS

RETRIEVAL_PORT, SOLVER_PORT = 8000, 8001  # used if they are free and no port is set
_PARSERS = {
    "sglang": {form: form for form in ("hermes", "llama3", "mistral")},
    "vllm": {"hermes": "hermes", "xlam": "xlam", "llama3": "llama3_json", "mistral": "mistral"},
}
"""An engine's names for the forms of calls that it reads."""
VLLM_SILENT = {"VLLM_NO_USAGE_STATS": "1"}  # nothing may leave the machine
INDEX_AWAY = 424  # as `search.serving.app.INDEX_UNAVAILABLE`
_RETRIEVAL = ("embedder", "device", "encoders", "threads", "max_batch", "window_ms", "max_queue", "cache_mb")
"""Keys of `retrieval` whose names are also options of `search.server`."""


def check_and_resolve(config: DictConfig, stage: str) -> DictConfig:
    """Run a stage's preflight and choose its ports. Raises PreflightFailed or PortTaken."""
    check(config, stage)
    choose_ports(config)
    return resolve(config)


def check(config: DictConfig, stage: str) -> None:
    """Run a stage's preflight in a separate process. Raises PreflightFailed."""
    in_child(_require, config, stage)


def _require(config: DictConfig, stage: str) -> None:
    from drzero.preflight.run import require

    require(config, stage)


def choose_ports(config: DictConfig) -> None:
    """Fill in both ports: as set, the default, or any free one. Raises PortTaken if taken or equal."""
    retrieval, solver = config.retrieval, config.solver
    if retrieval.port is not None and retrieval.port == solver.port:
        raise PortTaken(f"retrieval.port and solver.port are both {solver.port}: choose two ports, or none")
    with open_dict(config):
        if retrieval.url is None:
            retrieval.port = _port(retrieval.port, RETRIEVAL_PORT, retrieval.host, other=solver.port)
        solver.port = _port(solver.port, SOLVER_PORT, solver.host, other=retrieval.port)


def _port(asked: int | None, usual: int, host: str, other: int | None) -> int:
    if asked is None and usual != other:
        with suppress(PortTaken):
            return reserve_port(usual, host)
    return reserve_port(asked, host)


def search_spec(config: DictConfig) -> AnySpec:
    """The service a run searches: the one at `retrieval.url`, else its own."""
    if config.retrieval.url is None:
        return retrieval_spec(config)
    url = retrieval_url(config.retrieval)
    # No metrics: its counters include other runs.
    check = HealthCheck(url=f"{url}/health", away=INDEX_AWAY)
    return ExternalSpec(name="retrieval", url=url, liveness=check, logs=Path(config.run.dir) / "logs")


def retrieval_spec(config: DictConfig) -> ServiceSpec:
    """The retrieval service over the run's index."""
    retrieval, url = config.retrieval, retrieval_url(config.retrieval)
    command = [sys.executable, "-m", "search.server", *_index_words(config)]
    command += _options((name, retrieval[name]) for name in (*_RETRIEVAL, "host", "port"))
    logs_requests = retrieval.access_log or str(config.log_level).upper() == "DEBUG"
    return ServiceSpec(
        name="retrieval",
        command=(*command, *(["--access-log"] if logs_requests else [])),
        log_path=_log(config, "retrieval"),
        health_url=f"{url}/health",
        liveness=HealthCheck(
            url=f"{url}/health",  # a canary search
            away=INDEX_AWAY,
            metrics_url=f"{url}/metrics",
            work=("retrieval_index_seconds_count", "retrieval_cache_hits_total"),
        ),
        startup_budget_s=retrieval.startup_budget_s,
        restarts=retrieval.restarts,
        env=process_env(config),
    )


def _index_words(config: DictConfig) -> list[str]:
    if config.index == "chroma":
        chroma = config.chroma
        words = ["--chroma-path", *map(str, places_of(config)), "--collection", chroma.collection]
        words += ["--shards", str(chroma.shards)] if chroma.shards > 1 else []
        return words + (["--chroma-reads", str(chroma.quota.reads)] if chroma.quota.reads else [])
    faiss = config.faiss
    words = ["--faiss-path", faiss.path, "--lines-folder", config.paths.corpus]
    words += ["--faiss-corpus", faiss.corpus] if faiss.corpus else []
    options = [("ef_search", faiss.ef_search), ("nprobe", faiss.nprobe), ("faiss_device", faiss.device)]
    return words + _options(options)


def add_call_form(config: DictConfig, form: str) -> None:
    """Tell the engine how the model writes calls. Raises CheckError if it cannot read them."""
    given, engine = config.solver.server_args, config.solver.engine
    if engine == "reference":
        parser = {"call_form": form}
    elif "tool_call_parser" in given:
        parser = {}
    elif (found := _form_of(config.solver.model_path, form)) in _PARSERS[engine]:
        parser = {"tool_call_parser": _PARSERS[engine][found]}
    else:
        raise CheckError(
            f"{engine} has no parser for call_form={found}: use rollout=reference, or name one of its "
            "parsers by solver.server_args.tool_call_parser"
        )
    with open_dict(config):
        config.solver.server_args = {**parser, **given}


def _form_of(model: str, form: str) -> str:
    """Raises CheckError if the model's chat template writes calls in a form that is not known."""
    try:
        return call_form(load_tokenizer(model, "solver.model_path"), form)
    except ValueError as reason:
        fix = "name the engine's parser by solver.server_args.tool_call_parser"
        raise CheckError(f"call_form: {reason}: {fix}") from reason


@dataclass(frozen=True)
class _Engine:
    """How an engine's server is started and watched."""

    module: str
    options: Mapping[str, Any]
    arguments: tuple[str, ...]  # the user's, and switches
    work: str  # a counter that grows while it generates
    probe: str = "health"
    signs: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def solver_spec(config: DictConfig, name: str = "solver", served_name: str | None = None) -> ServiceSpec:
    """The solver's server, of its engine. Synthesize serves the challenger with it."""
    solver = config.solver
    url = f"http://{solver.host}:{solver.port}"
    engine = {"sglang": _sglang, "vllm": _vllm, "reference": _reference}[solver.engine](config)
    last = {"served_model_name": served_name or name, "host": solver.host, "port": solver.port}
    words = [*_options({"dtype": solver.dtype, **engine.options}.items()), *engine.arguments]
    return ServiceSpec(
        name=name,
        command=(sys.executable, "-m", engine.module, *words, *_options(last.items())),
        log_path=_log(config, name),
        health_url=f"{url}/health",
        liveness=HealthCheck(url=f"{url}/{engine.probe}", metrics_url=f"{url}/metrics", work=(engine.work,)),
        startup_budget_s=solver.startup_budget_s,
        startup_signs=engine.signs,
        restarts=solver.restarts,
        env={**process_env(config), **engine.env},
    )


def _sglang(config: DictConfig) -> _Engine:
    solver, context = config.solver, config.solver.max_context_tokens + OWN_POSITIONS
    hardware: dict[str, Any] = SOLVER_ARGUMENTS
    env: dict[str, str] = {}
    if config.machine.device == "cpu":
        hardware = cpu.arguments(solver.max_batch_size, context)
        env = cpu.environment(solver.tp_size) | {"OMP_NUM_THREADS": str(solver.threads)}
    return _Engine(
        module="verl_ext.sglang.serve" if bearer_of(MODEL_KEY) else "sglang.launch_server",
        options={
            "model_path": solver.model_path,
            "tp_size": solver.tp_size,
            "dp_size": solver.dp_size,
            "mem_fraction_static": solver.mem_fraction_static,
            "context_length": context,
            "log_level": str(config.log_level).lower(),
        },
        arguments=("--enable-metrics", *as_words({**hardware, **solver.server_args}, sglang_arguments())),
        work="sglang:generation_tokens_total",
        probe="health_generate",  # it generates one token
        signs=SGLANG,
        env=env,
    )


def _vllm(config: DictConfig) -> _Engine:
    solver, token = config.solver, bearer_of(MODEL_KEY)
    reads_calls = ["--enable-auto-tool-choice"] if "tool_call_parser" in solver.server_args else []
    return _Engine(
        module="vllm.entrypoints.openai.api_server",
        options={
            "model": solver.model_path,
            "tensor_parallel_size": solver.tp_size,
            "data_parallel_size": solver.dp_size,
            "gpu_memory_utilization": solver.mem_fraction_static,
            "max_model_len": solver.max_context_tokens,
        },
        arguments=(*reads_calls, *as_words(solver.server_args, VLLM_SERVER)),
        work="vllm:generation_tokens_total",
        signs=VLLM,
        # By --api-key the process list and vLLM's log would show the token.
        env={**VLLM_SILENT, **({"VLLM_API_KEY": token} if token else {})},
    )


def _reference(config: DictConfig) -> _Engine:
    solver = config.solver
    return _Engine(
        module="verl_ext.engine.api_server",
        options={
            "model": solver.model_path,
            "device": config.machine.device,
            "threads": solver.threads,
            "max_batch_size": solver.max_batch_size,
            "max_seq_len": solver.max_context_tokens,
        },
        arguments=as_words(solver.server_args, REFERENCE_SERVER),
        work="engine_generated_tokens_total",
    )


def _options(values: Iterable[tuple[str, Any]]) -> list[str]:
    return [word for name, value in values for word in (f"--{name.replace('_', '-')}", str(value))]


def _log(config: DictConfig, name: str) -> Path:
    return Path(config.run.dir) / "logs" / f"{name}.log"
