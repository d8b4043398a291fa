"""Preflight: what can be known of a stage before it is paid for, in seconds, without a GPU or a model.

    findings = preflight_stage("challenger", ["hardware=8xh100", "model=qwen2.5-7b"]).findings
    require(config, "challenger")      # what every stage calls first; raises PreflightFailed

The stage's config is composed as the run will compose it and judged for the machine that it declares (the
groups hardware/ and compute/), not for the one this runs on. All findings are reported, not the first one
alone; an override that cannot be composed is the one exception, since nothing else can then be judged.
docs/preflight.md lists the checks and the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.errors import DataError
from ops.logs import say
from pipeline import (
    batch_checks,
    checks,
    compute_checks,
    data_checks,
    environment_checks,
    evaluation_inputs,
    import_checks,
    length_checks,
    memory_checks,
    model_checks,
    synthesis_inputs,
    value_checks,
    versions,
)
from pipeline.compose import compose_stage, resolve
from pipeline.continuation import find_start
from pipeline.cost import Estimate, estimate, together
from pipeline.finding import CheckError, Finding, PreflightFailed, Severity, error
from pipeline.loop import compose_loop, plan_loop
from pipeline.loop_state import split_from, stages_from
from pipeline.machine import Machine, declared_machine
from pipeline.manifest import Manifest
from pipeline.memory_ledger import Ledger
from pipeline.overrides import OverrideError
from pipeline.subject import Readings, Subject, has_errors
from search.corpus import CorpusError
from search.embedders import EmbedderError
from search.store import StoreError

STAGES = ("prepare_data", "challenger", "synthesize", "solver", "merge", "evaluate", "serve_search")

CheckFunction = Callable[[Subject], Iterator[Finding]]
# Errors whose message is written for the user.
_TOLD = (
    CheckError,
    DataError,
    StoreError,
    CorpusError,
    EmbedderError,
    FileNotFoundError,
    OmegaConfBaseException,
)
# What a check raises on a value that makes no sense, which is a finding of its own.
_OF_BAD_VALUES = (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, OmegaConfBaseException)


@dataclass(frozen=True)
class Check:
    """A check, the key to blame for what it raises, and what it needs to see."""

    function: CheckFunction
    key: str
    reads: str = ""
    """The entry of `paths` below which it reads; on a volume elsewhere it is left out."""
    counts: bool = False
    """Whether it reckons with numbers of the config."""
    explains: bool = False
    """Whether its errors are reason enough for another check to break."""
    ahead: bool = True
    """Whether it can judge a stage of a loop before the stages ahead of it have run."""


@dataclass
class Report:
    """What preflight has to say of one stage."""

    name: str
    findings: list[Finding]
    machine: Machine | None = None
    ledger: Ledger | None = None
    estimate: Estimate | None = None

    @property
    def errors(self) -> list[Finding]:
        """The findings that forbid a start."""
        return [finding for finding in self.findings if finding.severity is Severity.ERROR]


def _check_start(subject: Subject) -> Iterator[Finding]:
    find_start(subject.config)
    yield from ()


_VALUES = Check(value_checks.check_values, "values", explains=True)
_MACHINE = (
    Check(compute_checks.check_compute, "compute"),
    Check(versions.check_versions, "versions"),
    Check(environment_checks.check_secrets, "secrets"),
    Check(environment_checks.check_files_visible, "paths"),
)
_SERVICES = (Check(environment_checks.check_ports, "retrieval.port"),)
_SEARCH = (
    Check(checks.check_index, "chroma.path", reads="corpus"),
    Check(model_checks.check_embedder, "retrieval.embedder"),
    *_SERVICES,
)
_RUN_FOLDER = Check(checks.check_run_folder, "run.dir", reads="checkpoints")
_MODELS = Check(model_checks.check_models, "base_model")
_SERVED = (
    Check(checks.check_engines, "solver.engine"),
    Check(batch_checks.check_parallel, "solver.tp_size", counts=True),
    Check(length_checks.check_served_lengths, "solver.max_context_tokens", counts=True),
    Check(memory_checks.check_memory, "memory", counts=True),
)
_TRAINING = (
    Check(
        batch_checks.check_micro_batches,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        counts=True,
        explains=True,
    ),
    Check(batch_checks.check_batch, "data.train_batch_size", counts=True),
    Check(batch_checks.check_separate_async, "mode", counts=True),
    Check(length_checks.check_lengths, "data.max_response_length", counts=True),
    Check(import_checks.check_imports, "imports"),
    Check(environment_checks.check_stacks, "watchdog", ahead=False),
    Check(_check_start, "run.name", reads="checkpoints", ahead=False),
)
_COST = Check(compute_checks.check_cost, "compute.max_usd", counts=True)
_CHECKS: dict[str, tuple[Check, ...]] = {
    "challenger": (
        *(Check(checks.check_on_policy, "mode"), *_SERVED, *_TRAINING, _MODELS),
        Check(data_checks.check_challenger_data, "data.train_files", reads="corpus"),
        Check(data_checks.check_val_file, "data.val_files", reads="corpus"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "solver": (
        *(*_SERVED, *_TRAINING, _MODELS),
        Check(data_checks.check_solver_data, "data.train_files", reads="checkpoints"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "synthesize": (
        *(*_SERVED, _MODELS),
        Check(synthesis_inputs.check_partition_rows, "data.train_files", reads="corpus"),
        Check(data_checks.check_challenger_data, "data.train_files", reads="corpus"),
        Check(synthesis_inputs.check_challenger, "challenger", reads="checkpoints"),
        Check(synthesis_inputs.check_gates, "gates", reads="corpus"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "merge": (_RUN_FOLDER, *_MACHINE, _COST),
    "evaluate": (
        *(*_SERVED, _MODELS, Check(evaluation_inputs.check_endpoint, "endpoint")),
        Check(evaluation_inputs.check_questions, "benchmarks", reads="corpus"),
        *(*_SEARCH, _RUN_FOLDER, *_MACHINE, _COST),
    ),
    "prepare_data": (_MODELS, Check(model_checks.check_embedder, "retrieval.embedder"), *_MACHINE),
    "serve_search": (*_SEARCH, _RUN_FOLDER, *_MACHINE),
}


def preflight(
    config: DictConfig,
    stage: str,
    *,
    starting: bool = False,
    ahead: bool = False,
    readings: Readings | None = None,
) -> Report:
    """Judge a stage's composed config; `config` is left as it is.

    `starting` says that the run begins here when this passes: then what is installed and listening here
    counts even where the declared machine could be another. `ahead` says that earlier stages of a loop have
    yet to run. Hand `readings` on from one stage of a loop to the next, and files are read once.
    """
    name = stage if not ahead else str(config.run.name)
    try:
        resolved = resolve(config)
        machine = declared_machine(resolved, starting=starting)
    except PreflightFailed as failed:
        return Report(name, failed.findings)
    except OmegaConfBaseException as reason:
        return Report(name, [_unresolved(reason)])
    except (TypeError, ValueError) as reason:  # a number that is none, in the config's own arithmetic
        return Report(name, [error("config", stage, str(reason), "correct the value")])
    subject = Subject(resolved, stage, machine, starting, ahead, readings or Readings())
    found = _Gathered()
    found.run(_VALUES, subject)
    can_count = value_checks.can_be_reckoned_with(subject)
    for check in sorted(_CHECKS[stage], key=lambda check: not check.explains):
        can_see = not check.reads or subject.sees(check.reads)
        if can_see and (can_count or not check.counts) and (check.ahead or not ahead):
            found.run(check, subject)
    has_values = can_count and not has_errors(found.explaining)
    return Report(
        name,
        found.findings,
        machine,
        memory_checks.stage_ledger(subject) if has_values else None,
        estimate(subject) if has_values and stage in _CHECKS else None,
    )


def preflight_stage(stage: str, overrides: Sequence[str]) -> list[Report]:
    """Compose and judge a stage as typed; `evolve` gives a report for each of its stages, and one of all."""
    name = stage.replace("-", "_")
    if name == "evolve":
        return _loop_reports(overrides)
    try:
        config = compose_stage(name, overrides)
    except OverrideError as refused:
        return [refused_override(name, refused)]
    except OmegaConfBaseException as reason:
        return [Report(name, [_unresolved(reason)])]
    return [preflight(config, name)]


def require(config: DictConfig, stage: str) -> None:
    """Judge a stage that starts here; tell warnings and notes, raise PreflightFailed for errors."""
    report = preflight(config, stage, starting=True)
    if report.errors:
        raise PreflightFailed(report.errors)
    for finding in report.findings:
        say("preflight", f"{finding.severity}: {finding}")
    if report.ledger and report.ledger.capacity_gib:
        left = f"{report.ledger.margin_gib:.1f} of {report.ledger.capacity_gib:.1f} GiB"
        say("preflight", f"memory: {left} left in the worst phase ({report.ledger.worst})")


def _loop_reports(arguments: Sequence[str]) -> list[Report]:
    readings, reports = Readings(), []
    redo_from, overrides = split_from(arguments)
    try:
        plan = plan_loop(compose_loop(overrides))
        for run in plan:
            config = compose_stage(run.stage, run.overrides)
            reports.append(preflight(config, run.stage, ahead=True, readings=readings))
    except OverrideError as refused:
        return [*reports, refused_override("evolve", refused)]
    manifest = Manifest(Path(config.paths.checkpoints) / "evolve" / "manifest.json")
    again = stages_from(redo_from, plan, manifest) if redo_from else []
    left = [
        report
        for run, report in zip(plan, reports, strict=True)
        if run in again or not manifest.is_complete(run.name)
    ]
    if left:
        reports.append(_together(left, config))
    return reports


def _together(left: Sequence[Report], config: DictConfig) -> Report:
    """What is to be said of a loop's stages as a whole, those left out that are finished."""
    estimates = [report.estimate for report in left]
    findings = list(compute_checks.check_together(config.compute, estimates))
    known = [found for found in estimates if found is not None]
    return Report("evolve", findings, left[0].machine, estimate=together(known) if known else None)


@dataclass
class _Gathered:
    """Findings, one after the other, whatever a check raises."""

    findings: list[Finding] = field(default_factory=list)
    explaining: list[Finding] = field(default_factory=list)

    def run(self, check: Check, subject: Subject) -> None:
        found: list[Finding] = []
        try:
            found.extend(check.function(subject))
        except PreflightFailed as failed:
            found.extend(failed.findings)
        except _TOLD as reason:
            found.append(_told(check, subject.config, reason))
        except _OF_BAD_VALUES:
            if not has_errors(self.explaining):  # nothing explains it: a bug
                raise
        if check.explains:
            self.explaining += found
        self.findings.extend(finding for finding in found if finding not in self.findings)


def _told(check: Check, config: DictConfig, reason: Exception) -> Finding:
    """What a reader of files has to say, which holds its own advice."""
    message = " ".join(str(reason).split())
    value = OmegaConf.select(config, check.key)
    return error(
        check.key, "" if OmegaConf.is_config(value) else value, message.removeprefix(f"{check.key}: "), ""
    )


def refused_override(name: str, refused: OverrideError) -> Report:
    """The report where composition failed: nothing else can be judged."""
    return Report(name, [error(refused.key, refused.line, str(refused), "")])


def _unresolved(reason: OmegaConfBaseException) -> Finding:
    key = str(getattr(reason, "full_key", None) or "config")
    return error(key, "", " ".join(str(reason).split()), "correct the value, or what it refers to")
