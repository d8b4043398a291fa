"""The services of a stage, as data: commands, ports, health, and where their logs go."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from drzero.ops.bearer import MODEL_KEY, bearer_of
from drzero.ops.process.ports import PortTaken, reserve_port
from drzero.ops.services.external import ExternalSpec
from drzero.ops.services.health import HealthCheck
from drzero.ops.services.services import AnySpec, ServiceSpec
from drzero.preflight.run import require
from drzero.recipe.compose import process_env, resolve, retrieval_url
from drzero.recipe.indices import places_of
from verl_ext.server_arguments import REFERENCE_SERVER, as_words, sglang_arguments
from verl_ext.sglang import cpu
from verl_ext.sglang.compat import OWN_POSITIONS, SOLVER_ARGUMENTS

RETRIEVAL_PORT, SOLVER_PORT = 8000, 8001
"""The default ports, used if they are free and no port is set."""
INDEX_AWAY = 424
"""As `search.serving.app.INDEX_UNAVAILABLE`."""


def check_and_resolve(config: DictConfig, stage: str) -> DictConfig:
    """Run a stage's preflight and choose its ports; returns the resolved config.

    Raises PreflightFailed, or PortTaken.
    """
    require(config, stage)
    choose_ports(config)
    return resolve(config)


def choose_ports(config: DictConfig) -> None:
    """Fill in `retrieval.port` and `solver.port`: as set, else the default one, else any free one.

    A retrieval service that runs elsewhere has its own.
    Raises PortTaken for a port that is set and in use, or set for both services.
    """
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
    """The service that a run searches: the one at `retrieval.url`, else its own."""
    if config.retrieval.url is None:
        return retrieval_spec(config)
    url = retrieval_url(config.retrieval)
    # Its counters are those of all runs that it serves, so they show nothing of this one.
    check = HealthCheck(url=f"{url}/health", away=INDEX_AWAY)
    return ExternalSpec(name="retrieval", url=url, liveness=check, logs=Path(config.run.dir) / "logs")


def retrieval_spec(config: DictConfig) -> ServiceSpec:
    """The retrieval service over the run's index."""
    retrieval, url = config.retrieval, retrieval_url(config.retrieval)
    return ServiceSpec(
        name="retrieval",
        command=(
            *_module("search.server"),
            *_index_words(config),
            *("--embedder", retrieval.embedder, "--device", retrieval.device),
            *("--encoders", str(retrieval.encoders), "--threads", str(retrieval.threads)),
            *("--max-batch", str(retrieval.max_batch), "--window-ms", str(retrieval.window_ms)),
            *("--max-queue", str(retrieval.max_queue), "--cache-mb", str(retrieval.cache_mb)),
            *("--host", retrieval.host, "--port", str(retrieval.port)),
            *(["--access-log"] if retrieval.access_log else []),
        ),
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


def _index_words(config: DictConfig) -> tuple[str, ...]:
    """The index that the retrieval service opens."""
    if config.index == "chroma":
        chroma = config.chroma
        return (
            *("--chroma-path", *map(str, places_of(config)), "--collection", chroma.collection),
            *(["--shards", str(chroma.shards)] if chroma.shards > 1 else []),
            *(["--chroma-reads", str(chroma.quota.reads)] if chroma.quota.reads else []),
        )
    faiss = config.faiss
    return (
        *("--faiss-path", faiss.path, "--lines-folder", config.paths.corpus),
        *(["--faiss-corpus", faiss.corpus] if faiss.corpus else []),
        *("--ef-search", str(faiss.ef_search), "--nprobe", str(faiss.nprobe)),
        *("--faiss-device", faiss.device),
    )


def solver_spec(config: DictConfig, name: str = "solver", served_name: str | None = None) -> ServiceSpec:
    """The solver's server: SGLang, or our reference engine behind its OpenAI-compatible front.

    `name` is that of the service, and of its model in requests unless `served_name` is: synthesize serves
    the challenger with it.
    """
    solver = config.solver
    url, env = f"http://{solver.host}:{solver.port}", process_env(config)
    if solver.engine == "sglang":
        context = solver.max_context_tokens + OWN_POSITIONS
        hardware: dict[str, Any] = SOLVER_ARGUMENTS
        if config.machine.device == "cpu":
            hardware = cpu.arguments(solver.max_batch_size, context)
            env |= cpu.environment(solver.tp_size) | {"OMP_NUM_THREADS": str(solver.threads)}
        command = (
            *_module("verl_ext.sglang.serve" if bearer_of(MODEL_KEY) else "sglang.launch_server"),
            *("--model-path", solver.model_path, "--dtype", solver.dtype),
            *("--tp-size", str(solver.tp_size), "--dp-size", str(solver.dp_size)),
            *("--mem-fraction-static", str(solver.mem_fraction_static)),
            *("--context-length", str(context)),
            *as_words({**hardware, **solver.server_args}, sglang_arguments()),
            *("--log-level", str(config.log_level).lower(), "--enable-metrics"),
        )
        probe, work = "health_generate", "sglang:generation_tokens_total"
    else:
        command = (
            *_module("verl_ext.engine.api_server"),
            *("--model", solver.model_path, "--dtype", solver.dtype),
            *("--device", config.machine.device, "--threads", str(solver.threads)),
            *("--max-batch-size", str(solver.max_batch_size)),
            *("--max-seq-len", str(solver.max_context_tokens)),
            *as_words(solver.server_args, REFERENCE_SERVER),
        )
        probe, work = "health", "engine_generated_tokens_total"
    return ServiceSpec(
        name=name,
        command=(
            *(*command, "--served-model-name", served_name or name),
            *("--host", solver.host, "--port", str(solver.port)),
        ),
        log_path=_log(config, name),
        health_url=f"{url}/health",
        # The probe generates one token.
        liveness=HealthCheck(url=f"{url}/{probe}", metrics_url=f"{url}/metrics", work=(work,)),
        startup_budget_s=solver.startup_budget_s,
        restarts=solver.restarts,
        env=env,
    )


def _module(name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name)


def _log(config: DictConfig, name: str) -> Path:
    return Path(config.run.dir) / "logs" / f"{name}.log"
