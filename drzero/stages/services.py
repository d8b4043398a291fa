"""The services of a stage: their commands, ports, health checks and logs."""

import sys
from collections.abc import Iterable
from contextlib import suppress
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
from drzero.stages.startup_signs import SGLANG
from verl_ext.method.chat import call_form
from verl_ext.server_arguments import REFERENCE_SERVER, as_words, sglang_arguments
from verl_ext.sglang import cpu
from verl_ext.sglang.compat import OWN_POSITIONS, SOLVER_ARGUMENTS

RETRIEVAL_PORT, SOLVER_PORT = 8000, 8001  # used if they are free and no port is set
_PARSERS = ("hermes", "llama3", "mistral")  # of SGLang, with our names
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
    """Tell the engine how the model writes calls. Raises CheckError if SGLang cannot read them."""
    given = config.solver.server_args
    if config.solver.engine == "reference":
        parser = {"call_form": form}
    elif "tool_call_parser" in given:
        parser = {}
    elif (found := _form_of(config.solver.model_path, form)) in _PARSERS:
        parser = {"tool_call_parser": found}
    else:
        raise CheckError(
            f"SGLang has no parser for call_form={found}: use rollout=reference, or name one of its parsers "
            "by solver.server_args.tool_call_parser"
        )
    with open_dict(config):
        config.solver.server_args = {**parser, **given}


def _form_of(model: str, form: str) -> str:
    """Raises CheckError if the model's chat template writes calls in a form that is not known."""
    try:
        return call_form(load_tokenizer(model, "solver.model_path"), form)
    except ValueError as reason:
        fix = "name SGLang's parser by solver.server_args.tool_call_parser"
        raise CheckError(f"call_form: {reason}: {fix}") from reason


def solver_spec(config: DictConfig, name: str = "solver", served_name: str | None = None) -> ServiceSpec:
    """The solver's server: SGLang, or our reference engine. Synthesize serves the challenger with it."""
    solver = config.solver
    url, env = f"http://{solver.host}:{solver.port}", process_env(config)
    options = {"dtype": solver.dtype}
    last = {"served_model_name": served_name or name, "host": solver.host, "port": solver.port}
    if solver.engine == "sglang":
        context = solver.max_context_tokens + OWN_POSITIONS
        hardware: dict[str, Any] = SOLVER_ARGUMENTS
        if config.machine.device == "cpu":
            hardware = cpu.arguments(solver.max_batch_size, context)
            env |= cpu.environment(solver.tp_size) | {"OMP_NUM_THREADS": str(solver.threads)}
        module = "verl_ext.sglang.serve" if bearer_of(MODEL_KEY) else "sglang.launch_server"
        options |= {"model_path": solver.model_path, "tp_size": solver.tp_size, "dp_size": solver.dp_size}
        options |= {"mem_fraction_static": solver.mem_fraction_static, "context_length": context}
        options |= {"log_level": str(config.log_level).lower()}
        more = ["--enable-metrics", *as_words({**hardware, **solver.server_args}, sglang_arguments())]
        probe, work = "health_generate", "sglang:generation_tokens_total"
    else:
        module = "verl_ext.engine.api_server"
        options |= {"model": solver.model_path, "device": config.machine.device, "threads": solver.threads}
        options |= {"max_batch_size": solver.max_batch_size, "max_seq_len": solver.max_context_tokens}
        more = [*as_words(solver.server_args, REFERENCE_SERVER)]
        probe, work = "health", "engine_generated_tokens_total"
    return ServiceSpec(
        name=name,
        command=(sys.executable, "-m", module, *_options(options.items()), *more, *_options(last.items())),
        log_path=_log(config, name),
        health_url=f"{url}/health",
        # The probe generates one token.
        liveness=HealthCheck(url=f"{url}/{probe}", metrics_url=f"{url}/metrics", work=(work,)),
        startup_budget_s=solver.startup_budget_s,
        startup_signs=SGLANG if solver.engine == "sglang" else {},
        restarts=solver.restarts,
        env=env,
    )


def _options(values: Iterable[tuple[str, Any]]) -> list[str]:
    return [word for name, value in values for word in (f"--{name.replace('_', '-')}", str(value))]


def _log(config: DictConfig, name: str) -> Path:
    return Path(config.run.dir) / "logs" / f"{name}.log"
