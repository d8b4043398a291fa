"""Preflight: checks a stage in seconds, before anything is paid for, without a GPU or loading a model.

    report = preflight(compose_stage("challenger", ["hardware=8xh100", "model=qwen2.5-7b"]), "challenger")
    require(config, "challenger")      # the first call of every stage; raises PreflightFailed

The stage's config is composed as the run will compose it and checked against the machine that it declares
(the groups hardware/ and compute/), not the one this runs on. All findings are reported, not only the first;
an override that cannot be composed is the exception, since nothing else can be checked then.
docs/preflight.md lists the checks and the formulas.
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
    environment,
    episodes,
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
from drzero.preflight import external_search as outside_search
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import Estimate, estimate
from drzero.preflight.finding import Finding, PreflightFailed, Severity, error
from drzero.preflight.machine import Machine, declared_machine
from drzero.preflight.memory_ledger import Ledger
from drzero.recipe.compose import first_broken, resolve
from drzero.recipe.overrides import OverrideError

STAGES = (
    "prepare_data",
    "preview",
    "challenger",
    "synthesize",
    "solver",
    "merge",
    "evaluate",
    "train",
    "serve_search",
    "serve_model",
    "compare_rollouts",
)
STAGE_NAMES = (*(stage.replace("_", "-") for stage in STAGES), "flow-test", "evolve")
"""What can be preflighted, as it is typed."""

# Errors whose message is written for users.
_FOR_THE_USER = (UserError, FileNotFoundError, OmegaConfBaseException)
# What a check may raise on an invalid value, which another check reports.
_OF_BAD_VALUES = (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OmegaConfBaseException)


@dataclass(frozen=True)
class Check:
    """A check, the config key for the errors it raises, and when it can run."""

    function: Callable[[CheckContext], Iterator[Finding] | None]
    key: str
    reads: str = ""
    """The entry of `paths` below which it reads; the check is skipped if that is on another machine."""
    counts: bool = False
    """Whether it computes with numbers of the config, which must then be numbers."""
    explains: bool = False
    """Whether its errors can be the cause of an exception in another check."""
    ahead: bool = True
    """Whether it applies to a stage of a loop before the earlier stages have run."""


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
        """The findings that prevent a start."""
        return [finding for finding in self.findings if finding.severity is Severity.ERROR]


def _check_start(ctx: CheckContext) -> None:
    find_start(ctx.config)


_VALUES = Check(values.check_values, "values", explains=True)
_VERL = Check(values.check_with_verl, "veRL")  # last: it repeats what other checks say better
_MACHINE = (
    Check(compute.check_compute, "compute"),
    Check(cuda.check_cuda, cuda.KEY),
    Check(versions.check_versions, "versions"),
    Check(environment.check_secrets, "secrets"),
    Check(environment.check_files_visible, "paths"),
)
_OWN_INDEX = (
    Check(data.check_index, "chroma.path", reads="corpus"),
    Check(index_size.check_served_index, "chroma.path", reads="corpus"),
)
_OUTSIDE_SEARCH = Check(outside_search.check_outside_search, "retrieval.url")
_SEARCH = (
    *_OWN_INDEX,
    Check(models.check_embedder, "retrieval.embedder"),
    Check(environment.check_ports, "retrieval.port"),
)
_RUN_FOLDER = Check(environment.check_run_folder, "run.dir", reads="checkpoints")
_HUB = Check(models.check_hub, "base_model")
_MODELS = (Check(models.check_models, "base_model"), _HUB)
_DEMO = Check(demo_world.check_demo_policy, "base_model", reads="corpus")
_ENDPOINT = Check(inputs.check_endpoint, "endpoint")
_SERVED = (
    Check(batch.check_engines, "solver.engine"),
    Check(server_arguments.check_server_arguments, "solver.server_args"),
    Check(batch.check_parallel, "solver.tp_size", counts=True),
    Check(batch.check_served_lengths, "solver.max_context_tokens", counts=True),
    Check(memory.check_memory, "memory", counts=True),
)
_TRAINING = (
    Check(batch.check_micro_batches, batch.MICRO_BATCH, counts=True, explains=True),
    Check(batch.check_batch, "data.train_batch_size", counts=True),
    Check(batch.check_filter, "algorithm.filter_groups"),
    Check(batch.check_separate_async, "mode", counts=True),
    Check(queues.check_limits, queues.LIMIT, counts=True),
    Check(queues.check_room, queues.ROOM, counts=True),
    Check(batch.check_lengths, "data.max_response_length", counts=True),
    Check(ray_cluster.check_cpus, "ray_kwargs.ray_init.num_cpus", counts=True),
    Check(ray_cluster.check_object_store, "ray_kwargs.ray_init.object_store_memory", counts=True),
    Check(nodes.check_services_reachable, nodes.ADDRESS),
    Check(nodes.check_cluster, nodes.ADDRESS, ahead=False),
    Check(environment.check_imports, "imports"),
    Check(environment.check_stacks, "watchdog", ahead=False),
    Check(_check_start, "run.name", reads="checkpoints", ahead=False),
)
_ENVIRONMENT = Check(episodes.check_environment, episodes.ENV)
_COST = Check(compute.check_cost, "compute.max_usd", counts=True)
_CHECKS: dict[str, tuple[Check, ...]] = {
    "challenger": (
        *(Check(batch.check_on_policy, "mode"), *_SERVED, *_TRAINING, *_MODELS),
        Check(data.check_challenger_data, "data.train_files", reads="corpus"),
        *(Check(data.check_val_file, "data.val_files", reads="corpus"), _DEMO),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "solver": (
        *(*_SERVED, *_TRAINING, *_MODELS),
        Check(data.check_solver_data, "data.train_files", reads="checkpoints"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "train": (
        *(_ENVIRONMENT, *_SERVED, *_TRAINING, *_MODELS),
        *(_RUN_FOLDER, *_MACHINE, _COST),
    ),
    "synthesize": (
        *(*_SERVED, *_MODELS, _ENDPOINT, _DEMO),
        Check(inputs.check_prompts, "data.train_files", reads="corpus"),
        Check(data.check_challenger_data, "data.train_files", reads="corpus"),
        Check(inputs.check_challenger, "challenger", reads="checkpoints"),
        Check(inputs.check_gates, "gates", reads="corpus"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "merge": (Check(inputs.check_merge_source, "source", reads="checkpoints"), _RUN_FOLDER, *_MACHINE, _COST),
    "evaluate": (
        *(*_SERVED, *_MODELS, _ENDPOINT),
        Check(inputs.check_questions, "benchmarks", reads="corpus"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "prepare_data": (
        Check(data.check_source, "chroma.path", reads="corpus"),
        *(_HUB, Check(models.check_embedder, "retrieval.embedder"), *_MACHINE),
        *(Check(inputs.check_corpus_source, "source"), Check(inputs.check_hops, "hop_ratio")),
        Check(index_size.check_source_size, "source", counts=True),
    ),
    "preview": (
        Check(data.check_source, "chroma.path", reads="corpus"),
        *(*_SERVED, *_MODELS, Check(models.check_embedder, "retrieval.embedder"), _ENDPOINT),
        *(Check(inputs.check_corpus_source, "source"), Check(inputs.check_hops, "hop_ratio")),
        *(Check(environment.check_ports, "retrieval.port"), _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "serve_search": (_HUB, *_SEARCH, _RUN_FOLDER, *_MACHINE),
    **dict.fromkeys(
        ("serve_model", "compare_rollouts"),
        (*_SERVED, *_MODELS, Check(environment.check_ports, "solver.port"), _RUN_FOLDER, *_MACHINE),
    ),
    "flow_test": (
        Check(queues.check_limits, queues.LIMIT, counts=True),
        Check(queues.check_room, queues.ROOM, counts=True),
        Check(ray_cluster.check_cpus, "ray_kwargs.ray_init.num_cpus", counts=True),
        *(_RUN_FOLDER, *_MACHINE),
    ),
}


_PLAYED_IN_EVALUATE = (
    *(_ENVIRONMENT, *_SERVED, *_MODELS, _ENDPOINT),
    *(Check(environment.check_ports, "solver.port"), _RUN_FOLDER, *_MACHINE, _COST),
)
"""Of an evaluation in an environment, in place of those of benchmarks."""


def _checks_of(ctx: CheckContext) -> list[Check]:
    checks = _PLAYED_IN_EVALUATE if ctx.stage == "evaluate" and ctx.plays else _CHECKS[ctx.stage]
    checks += _SEARCH if ctx.plays and ctx.searches else ()
    if ctx.searches and not ctx.serves_search:
        checks = (*(check for check in checks if check not in _OWN_INDEX), _OUTSIDE_SEARCH)
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
    """Check a stage's composed config, which stays unchanged.

    `starting`: the run starts on this machine if the report has no errors, so installed versions and used
    ports count even if the declared machine could be another. `ahead`: earlier stages of a loop have not run
    yet. `asks_verl`: veRL judges its own part as well, as at a start; its import takes longer than all else.
    Pass the same `readings` for all stages of a loop to read each file once.
    """
    name = stage if not ahead else str(config.run.name)
    try:
        resolved = resolve(config)
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
    can_count = values.can_be_reckoned_with(ctx)
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
    """Check a stage that starts here: raise PreflightFailed for errors, print warnings, estimate and GPUs.

    The other notes are for those who ask (`drzero preflight`).
    """
    report = preflight(config, stage, starting=True)
    if report.errors:
        raise PreflightFailed(report.errors)
    for finding in report.findings:
        if finding.severity is Severity.WARNING or finding.key in ("cost", cuda.KEY):
            say("preflight", f"{finding.severity}: {finding}")
    if report.ledger and report.ledger.capacity_gib:
        left = f"{report.ledger.margin_gib:.1f} of {report.ledger.capacity_gib:.1f} GiB"
        say("preflight", f"memory: {left} left in the worst phase ({report.ledger.worst})")


@dataclass
class _Collected:
    """The findings so far, including those that checks raise."""

    findings: list[Finding] = field(default_factory=list)
    explains: bool = False
    """Whether an invalid value was found that can be the cause of an exception in another check."""

    def run(self, check: Check, ctx: CheckContext) -> None:
        found: list[Finding] = []
        try:
            found.extend(check.function(ctx) or ())
        except PreflightFailed as failed:
            found.extend(failed.findings)
        except _FOR_THE_USER as reason:
            # The message of such an error contains its own advice.
            message = " ".join(str(reason).split()).removeprefix(f"{check.key}: ")
            found.append(error(check.key, message, ""))
        except _OF_BAD_VALUES:
            if not self.explains:  # a bug
                raise
        found = [finding.with_value(ctx.config) for finding in found]
        self.explains |= check.explains and any(one.severity is Severity.ERROR for one in found)
        self.findings.extend(finding for finding in found if finding not in self.findings)


def refused_override(name: str, refused: OverrideError) -> Report:
    """The report for a config that does not compose: nothing else can be checked."""
    return Report(name, [error(refused.key, str(refused), "", value=refused.line)])


def unresolved(reason: OmegaConfBaseException, config: DictConfig | None = None) -> Finding:
    """The finding for an interpolation that does not resolve, or a missing value.

    With the config it is the one that others follow from, of which OmegaConf names the first that it meets.
    """
    key, value = str(getattr(reason, "full_key", None) or "config"), ""
    if config is not None and (broken := first_broken(config)):
        (key, value), reason = broken
    message = str(reason).partition("\n")[0].partition(" raised while resolving interpolation: ")
    return error(key, message[2] or message[0], "correct the value, or what it refers to", value=value)
