"""Preflight: check a stage against the machine it declares, in seconds, without a GPU or a loaded model.

    report = preflight(compose_stage("challenger", ["hardware=8xh100", "model=qwen2.5-7b"]), "challenger")
    require(config, "challenger")      # the first call of every stage; raises PreflightFailed

docs/preflight.md lists the checks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from drzero.checkpoints.resume import find_start
from drzero.ops.console import say
from drzero.ops.errors import UserError
from drzero.preflight import (
    batch,
    compute,
    cuda,
    data,
    demo_world,
    demonstrations,
    environment,
    episodes,
    external_search,
    fixed,
    index_size,
    inputs,
    memory,
    models,
    nodes,
    queues,
    ray_cluster,
    server_arguments,
    values,
    versions,
)
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import Estimate, estimate
from drzero.preflight.finding import Finding, PreflightFailed, Severity, error
from drzero.preflight.machine import Machine, declared_machine
from drzero.preflight.memory_ledger import Ledger
from drzero.recipe.compose import first_broken, resolve
from drzero.recipe.overrides import OverrideError

# Errors whose message is written for users.
_FOR_THE_USER = (UserError, FileNotFoundError, OmegaConfBaseException)
# Raised by checks for an invalid value that another check reports.
_OF_BAD_VALUES = (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OmegaConfBaseException)


@dataclass(frozen=True)
class PreflightCheck:
    """A check, the key of errors it raises, and when it runs."""

    function: Callable[[CheckContext], Iterator[Finding] | None]
    key: str
    reads: str = ""  # The entry of `paths` it reads below. Skipped if that is on another machine.
    counts: bool = False  # Whether it computes with the config's numbers. Skipped if one is invalid.
    explains: bool = False  # Whether its errors can cause an exception in another check
    ahead: bool = True  # Whether it runs before a loop's earlier stages have


@dataclass
class Report:
    """Preflight's result for one stage."""

    name: str
    findings: list[Finding]
    machine: Machine | None = None
    ledger: Ledger | None = None
    estimate: Estimate | None = None

    @property
    def errors(self) -> list[Finding]:
        """The errors among the findings."""
        return [finding for finding in self.findings if finding.severity is Severity.ERROR]


def _check_start(ctx: CheckContext) -> None:
    find_start(ctx.config)


_VALUES = PreflightCheck(values.check_values, "values", explains=True)
_VERL = PreflightCheck(values.check_with_verl, "veRL")  # last, because other checks say the same better
_MACHINE = [
    PreflightCheck(compute.check_compute, "compute"),
    PreflightCheck(cuda.check_cuda, cuda.KEY),
    PreflightCheck(versions.check_versions, "versions"),
    PreflightCheck(environment.check_secrets, "secrets"),
    PreflightCheck(environment.check_written_folders, "TMPDIR"),
    PreflightCheck(environment.check_files_visible, "paths"),
]
_OWN_INDEX = [
    PreflightCheck(data.check_index, "chroma.path", reads="corpus"),
    PreflightCheck(index_size.check_served_index, "chroma.path", reads="corpus"),
]
_EXTERNAL_SEARCH = PreflightCheck(external_search.check_external_search, "retrieval.url")
_EMBEDDER = PreflightCheck(models.check_embedder, "retrieval.embedder")
_SEARCH_PORTS = PreflightCheck(environment.check_ports, "retrieval.port")
_SOLVER_PORT = PreflightCheck(environment.check_ports, "solver.port")
_SEARCH = [*_OWN_INDEX, _EMBEDDER, _SEARCH_PORTS]
_RUN_FOLDER = PreflightCheck(environment.check_run_folder, "run.dir", reads="checkpoints")
_HUB = PreflightCheck(models.check_hub, "base_model")
_MODELS = [PreflightCheck(models.check_models, "base_model"), _HUB]
_DEMO = PreflightCheck(demo_world.check_demo_policy, "base_model", reads="corpus")
_ENDPOINT = PreflightCheck(inputs.check_endpoint, "endpoint")
_SERVED = [
    PreflightCheck(batch.check_engines, "solver.engine"),
    PreflightCheck(server_arguments.check_server_arguments, "solver.server_args"),
    PreflightCheck(batch.check_parallel, "solver.tp_size", counts=True),
    PreflightCheck(batch.check_served_lengths, "solver.max_context_tokens", counts=True),
    PreflightCheck(memory.check_memory, "memory", counts=True),
]
_QUEUES = [
    PreflightCheck(queues.check_limits, queues.LIMIT, counts=True),
    PreflightCheck(queues.check_room, queues.ROOM, counts=True),
    PreflightCheck(ray_cluster.check_cpus, "ray_kwargs.ray_init.num_cpus", counts=True),
]
_TRAINING = [
    PreflightCheck(batch.check_micro_batches, batch.MICRO_BATCH, counts=True, explains=True),
    PreflightCheck(batch.check_batch, "data.train_batch_size", counts=True),
    PreflightCheck(batch.check_filter, "algorithm.filter_groups"),
    PreflightCheck(batch.check_separate_async, "mode", counts=True),
    *_QUEUES,
    PreflightCheck(batch.check_lengths, "data.max_response_length", counts=True),
    PreflightCheck(ray_cluster.check_object_store, "ray_kwargs.ray_init.object_store_memory", counts=True),
    PreflightCheck(nodes.check_services_reachable, nodes.ADDRESS),
    PreflightCheck(nodes.check_cluster, nodes.ADDRESS, ahead=False),
    PreflightCheck(fixed.check_fixed_keys, "trainer", counts=True),
    PreflightCheck(environment.check_imports, "imports"),
    PreflightCheck(environment.check_stacks, "watchdog", ahead=False),
    PreflightCheck(_check_start, "run.name", reads="checkpoints", ahead=False),
]
_ENVIRONMENT = PreflightCheck(episodes.check_environment, episodes.ENV)
_RUN = [_RUN_FOLDER, *_MACHINE, PreflightCheck(compute.check_cost, "compute.max_usd", counts=True)]
_PROMPTS = PreflightCheck(data.check_challenger_data, "data.train_files", reads="corpus")
_CORPUS = [
    PreflightCheck(data.check_source, "chroma.path", reads="corpus"),
    PreflightCheck(inputs.check_corpus_source, "source"),
    PreflightCheck(inputs.check_hops, "hop_ratio"),
]
_SERVE_MODEL = [*_SERVED, *_MODELS, _SOLVER_PORT, _RUN_FOLDER, *_MACHINE]
_ASK = [*_SERVED, *_MODELS, _ENDPOINT, *_SEARCH, _RUN_FOLDER, *_MACHINE]
_EVALUATE_IN_ENVIRONMENT = [_ENVIRONMENT, *_SERVED, *_MODELS, _ENDPOINT, _SOLVER_PORT, *_RUN]
_CHECKS: dict[str, list[PreflightCheck]] = {
    "challenger": [
        PreflightCheck(batch.check_on_policy, "mode"),
        *_SERVED,
        *_TRAINING,
        *_MODELS,
        _PROMPTS,
        PreflightCheck(data.check_val_file, "data.val_files", reads="corpus"),
        _DEMO,
        *_SEARCH,
        *_RUN,
    ],
    "solver": [
        *_SERVED,
        *_TRAINING,
        *_MODELS,
        PreflightCheck(data.check_solver_data, "data.train_files", reads="checkpoints"),
        *_SEARCH,
        *_RUN,
    ],
    "train": [_ENVIRONMENT, *_SERVED, *_TRAINING, *_MODELS, *_RUN],
    "synthesize": [
        *_SERVED,
        *_MODELS,
        _ENDPOINT,
        _DEMO,
        PreflightCheck(inputs.check_prompts, "data.train_files", reads="corpus"),
        _PROMPTS,
        PreflightCheck(inputs.check_challenger, "challenger", reads="checkpoints"),
        PreflightCheck(inputs.check_gates, "gates", reads="corpus"),
        *_SEARCH,
        *_RUN,
    ],
    "merge": [PreflightCheck(inputs.check_merge_source, "source", reads="checkpoints"), *_RUN],
    "evaluate": [
        *_SERVED,
        *_MODELS,
        _ENDPOINT,
        PreflightCheck(inputs.check_questions, "benchmarks", reads="corpus"),
        *_SEARCH,
        *_RUN,
    ],
    "prepare_data": [
        *_CORPUS,
        PreflightCheck(inputs.check_hold_out, "hold_out", reads="corpus"),
        _HUB,
        _EMBEDDER,
        *_MACHINE,
        PreflightCheck(index_size.check_source_size, "source", counts=True),
    ],
    "preview": [*_CORPUS, *_SERVED, *_MODELS, _EMBEDDER, _ENDPOINT, _SEARCH_PORTS, *_RUN],
    "warm_start": [
        PreflightCheck(demonstrations.check_demonstrations, "demonstrations", reads="checkpoints"),
        PreflightCheck(memory.check_supervised, "lora_rank", counts=True),
        *_SERVED,
        *_MODELS,
        _EMBEDDER,
        _ENDPOINT,
        PreflightCheck(inputs.check_gates, "gates", reads="corpus"),
        _SEARCH_PORTS,
        *_RUN,
    ],
    "serve_search": [_HUB, *_SEARCH, _RUN_FOLDER, *_MACHINE],
    "serve_model": [PreflightCheck(environment.check_own_address, "port"), *_SERVE_MODEL],
    "ask": _ASK,
    "serve_agent": [PreflightCheck(environment.check_agent_host, "host"), *_ASK],
    "bundle": [*_MODELS, *_OWN_INDEX[:1]],
    "compare_rollouts": [*_SERVE_MODEL, PreflightCheck(memory.check_compared, "compare.dtype", counts=True)],
    "agent_bench": [PreflightCheck(episodes.check_agent, "agent"), *_SERVE_MODEL],
    "flow_test": [*_QUEUES, _RUN_FOLDER, *_MACHINE],
}
STAGES = tuple(stage for stage in _CHECKS if stage not in ("bundle", "flow_test"))
STAGE_NAMES = (*(stage.replace("_", "-") for stage in STAGES), "flow-test", "evolve")


def _checks_of(ctx: CheckContext) -> list[PreflightCheck]:
    checks = _EVALUATE_IN_ENVIRONMENT if ctx.stage == "evaluate" and ctx.plays else _CHECKS[ctx.stage]
    if ctx.plays and ctx.searches:
        checks = [*checks, *_SEARCH]
    if ctx.stage == "warm_start" and not ctx.config.demonstrations:  # a preview comes first
        checks = [*checks, *_CORPUS]
    if ctx.searches and not ctx.serves_search:
        checks = [*(check for check in checks if check not in _OWN_INDEX), _EXTERNAL_SEARCH]
    return sorted(checks, key=lambda check: not check.explains)


def preflight(
    config: DictConfig,
    stage: str,
    *,
    starting: bool = False,
    ahead: bool = False,
    asks_verl: bool = False,
    readings: Readings | None = None,
) -> Report:
    """Check a stage's composed config without changing it. A loop's stages share `readings`.

    `starting`: the run starts here, so installed versions and used ports count. `ahead`: earlier stages of a
    loop have not run. `asks_verl`: veRL checks its part too, which takes longer than all else.
    """
    name = stage if not ahead else str(config.run.name)
    try:
        resolved = resolve(config)
        if resolved.get("demonstrations"):
            resolved = demonstrations.searching_as_first(resolved)
        machine = declared_machine(resolved, starting=starting)
    except PreflightFailed as failed:
        return Report(name, [finding.with_value(resolved) for finding in failed.findings])
    except OmegaConfBaseException as reason:
        return Report(name, [unresolved(reason, config)])
    except (TypeError, ValueError) as reason:  # not a number, in the config's own arithmetic
        return Report(name, [error("config", str(reason), "correct the value", value=stage)])
    ctx = CheckContext(resolved, stage, machine, starting, ahead, readings or Readings())
    found = _Collected()
    found.run(_VALUES, ctx)
    can_count = values.has_valid_numbers(ctx)
    for check in _checks_of(ctx):
        can_see = not check.reads or ctx.sees(check.reads)
        if can_see and (can_count or not check.counts) and (check.ahead or not ahead):
            found.run(check, ctx)
    has_errors = any(finding.severity is Severity.ERROR for finding in found.findings)
    if ctx.trains and (starting or asks_verl) and not has_errors:
        found.run(_VERL, ctx)
    has_values = can_count and not found.explains
    ledger = memory.stage_ledger(ctx) if has_values else None
    cost = estimate(ctx) if has_values else None
    return Report(name, found.findings, machine, ledger, cost)


def require(config: DictConfig, stage: str) -> None:
    """Raise PreflightFailed for errors of a stage that starts here. Print warnings and the estimate."""
    report = preflight(config, stage, starting=True)
    if report.errors:
        raise PreflightFailed(report.errors)
    for finding in report.findings:
        if finding.severity is Severity.WARNING or finding.key == cuda.KEY:
            say("preflight", f"{finding.severity}: {finding}")
    if report.ledger and report.ledger.capacity_gib:
        left = f"{report.ledger.margin_gib:.1f} of {report.ledger.capacity_gib:.1f} GiB"
        machine, now = report.machine, ""
        if machine and machine.free_gib is not None:
            now = f"; {machine.free_gib:.1f} GiB{' of host memory' if machine.gpu else ''} are free now"
        say("preflight", f"memory: {left} left in the worst phase ({report.ledger.worst}){now}")
    if report.estimate:
        say("preflight", f"time: {report.estimate}")


@dataclass
class _Collected:
    findings: list[Finding] = field(default_factory=list)
    explains: bool = False
    """Whether an invalid value was found that can explain an exception in another check."""

    def run(self, check: PreflightCheck, ctx: CheckContext) -> None:
        found: list[Finding] = []
        try:
            found.extend(check.function(ctx) or ())
        except PreflightFailed as failed:
            found.extend(failed.findings)
        except _FOR_THE_USER as reason:
            # Such a message contains its own advice.
            message = " ".join(str(reason).split()).removeprefix(f"{check.key}: ")
            found.append(error(check.key, message, ""))
        except _OF_BAD_VALUES:
            if not self.explains:  # a bug
                raise
        found = [finding.with_value(ctx.config) for finding in found]
        self.explains |= check.explains and any(one.severity is Severity.ERROR for one in found)
        self.findings.extend(finding for finding in found if finding not in self.findings)


def refused_override(name: str, refused: OverrideError) -> Report:
    """The report for a config that does not compose."""
    return Report(name, [error(refused.key, str(refused), "", value=refused.line)])


def unresolved(reason: OmegaConfBaseException, config: DictConfig | None = None) -> Finding:
    """The finding for a missing value or a failing interpolation. The config shows the root cause."""
    key, value = str(getattr(reason, "full_key", None) or "config"), ""
    if config is not None and (broken := first_broken(config)):
        (key, value), reason = broken
    message = str(reason).partition("\n")[0].partition(" raised while resolving interpolation: ")
    return error(key, message[2] or message[0], "correct the value, or what it refers to", value=value)
