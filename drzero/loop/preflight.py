"""Preflight of all stages of a loop before the first one runs.

Each stage also checks itself, but by then you have paid for the earlier ones. Outputs that earlier stages
will create are not reported as missing here.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from drzero.loop.manifest import Manifest
from drzero.loop.plan import StageRun, compose_loop, plan_loop
from drzero.loop.state import split_from, stages_from
from drzero.ops.console import say
from drzero.preflight.compute import check_together
from drzero.preflight.context import Readings
from drzero.preflight.cost import together
from drzero.preflight.finding import Finding, PreflightFailed, Severity
from drzero.preflight.run import Report, preflight, refused_override, unresolved
from drzero.preflight.values import concerns_verl
from drzero.recipe.compose import compose_stage
from drzero.recipe.overrides import OverrideError
from drzero.stages.models import evaluate_overrides, preview_overrides


def check_ahead(runs: Sequence[StageRun], configs: dict[str, DictConfig]) -> None:
    """Check the stages that will run. Raises PreflightFailed with all errors, each listed once."""
    readings = Readings()
    # Iterations repeat a stage's findings, so the first for a stage and key counts.
    found: dict[tuple[bool, str, str], Finding] = {}
    estimates = []

    def sort_in(stage: str, findings: Iterable[Finding]) -> None:
        for finding in findings:
            found.setdefault((finding.severity is Severity.ERROR, stage, finding.key), finding)

    for run in runs:
        report = preflight(configs[run.name], run.stage, starting=True, ahead=True, readings=readings)
        sort_in(run.stage, report.findings)
        estimates.append(report.estimate)
    if runs:
        sort_in("evolve", check_together(configs[runs[-1].name].compute, estimates))
    once = {(finding.severity, str(finding)): finding for finding in found.values()}.values()
    if errors := [finding for finding in once if finding.severity is Severity.ERROR]:
        raise PreflightFailed(errors)
    shown = [finding for finding in once if finding.severity is Severity.WARNING]
    if cost := found.get((False, "evolve", "cost")):
        shown.append(cost)
    for finding in shown:
        say("preflight", f"{finding.severity}: {finding}")


_COMPLETED = {"preview": preview_overrides, "evaluate": evaluate_overrides}  # as their commands do


def preflight_stage(
    stage: str, overrides: Sequence[str], compose: Callable[[str, Sequence[str]], DictConfig] = compose_stage
) -> list[Report]:
    """Compose and check a stage. `evolve` has a report for each, and one for all together."""
    name = stage.replace("-", "_")
    if name == "evolve":
        return _loop_reports(overrides)
    if name in _COMPLETED:
        overrides = _COMPLETED[name](overrides)
    try:
        config = compose(name, overrides)
    except OverrideError as refused:
        return [refused_override(name, refused)]
    except OmegaConfBaseException as reason:
        return [Report(name, [unresolved(reason)])]
    return [preflight(config, name, asks_verl=concerns_verl(overrides))]


def _loop_reports(arguments: Sequence[str]) -> list[Report]:
    readings, reports = Readings(), []
    redo_from, overrides = split_from(arguments)
    try:
        plan = plan_loop(compose_loop(overrides))
        for run in plan:
            config = compose_stage(run.stage, run.overrides)
            asks_verl = concerns_verl(run.overrides)
            reports.append(preflight(config, run.stage, ahead=True, asks_verl=asks_verl, readings=readings))
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
        estimates = [report.estimate for report in left]
        known = [found for found in estimates if found is not None]
        total = together(known) if known else None
        findings = list(check_together(config.compute, estimates))
        reports.append(Report("evolve", findings, left[0].machine, estimate=total))
    return reports
