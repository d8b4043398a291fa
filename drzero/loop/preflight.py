"""Preflight of all stages of a loop before the first one runs.

Each stage also checks itself, but by then you have paid for the earlier ones. Outputs that earlier stages
will create are not reported as missing here.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from drzero.loop.manifest import Manifest
from drzero.loop.plan import StageRun, compose_loop, plan_loop
from drzero.loop.seeds import seed_folders, split_seeds
from drzero.loop.state import split_from, stages_from
from drzero.ops.console import say
from drzero.preflight.compute import check_together
from drzero.preflight.context import Readings
from drzero.preflight.cost import together
from drzero.preflight.finding import Finding, PreflightFailed, Severity, note, once
from drzero.preflight.run import Report, preflight, refused_override, unresolved
from drzero.preflight.values import concerns_verl
from drzero.recipe.compose import compose_stage
from drzero.recipe.overrides import OverrideError
from drzero.stages.models import completed


def check_ahead(runs: Sequence[StageRun], configs: dict[str, DictConfig]) -> None:
    """Check the stages that will run. Raises PreflightFailed with all errors, each listed once."""
    if not runs:
        return
    readings = Readings()
    reports = [
        preflight(configs[run.name], run.stage, starting=True, ahead=True, readings=readings) for run in runs
    ]
    reports.append(_loop_report(configs[runs[-1].name], reports))
    found = once((report.name, report.findings) for report in reports)
    if errors := [finding for finding in found if finding.severity is Severity.ERROR]:
        raise PreflightFailed(errors)
    for finding in found:
        if finding.severity is Severity.WARNING:
            say("preflight", f"{finding.severity}: {finding}")
    if total := reports[-1].estimate:
        say("preflight", f"time: {total}")


def _loop_report(config: DictConfig, stages: Sequence[Report]) -> Report:
    """The report about unfinished stages together."""
    total = together([report.estimate for report in stages])
    return Report("evolve", list(check_together(config.compute, total)), stages[0].machine, estimate=total)


def preflight_stage(
    stage: str, overrides: Sequence[str], compose: Callable[[str, Sequence[str]], DictConfig] = compose_stage
) -> list[Report]:
    """Compose and check a stage. `evolve` has a report for each, and one for all together."""
    name = stage.replace("-", "_")
    if name == "evolve":
        return _loop_reports(overrides)
    overrides = completed(name, overrides)
    try:
        config = compose(name, overrides)
    except OverrideError as refused:
        return [refused_override(name, refused)]
    except OmegaConfBaseException as reason:
        return [Report(name, [unresolved(reason)])]
    return [preflight(config, name, asks_verl=concerns_verl(overrides))]


def _is_of_demo(found: Finding, config: DictConfig) -> bool:
    # The run's own folder may be below the corpus.
    named = f"{found.value} {found.why}".replace(config.run.dir, "")
    return found.severity is Severity.ERROR and f"{config.paths.corpus}/" in named


def _loop_reports(arguments: Sequence[str]) -> list[Report]:
    readings, reports = Readings(), []
    seeds, arguments = split_seeds(arguments)
    redo_from, overrides = split_from(arguments)
    try:
        loop = compose_loop(overrides)
        plan = plan_loop(loop)
        for run in plan:
            config = compose_stage(run.stage, run.overrides)
            asks_verl = concerns_verl(run.overrides)
            report = preflight(config, run.stage, ahead=True, asks_verl=asks_verl, readings=readings)
            if makes_demo := loop.prepare_demo and not Path(config.paths.corpus).exists():
                report.findings = [found for found in report.findings if not _is_of_demo(found, config)]
            reports.append(report)
    except OverrideError as refused:
        return [*reports, refused_override("evolve", refused)]
    folder = Path(config.paths.checkpoints)
    folders = [folder] if seeds is None else seed_folders(folder, seeds).values()
    manifests = [Manifest(folder / "evolve" / "manifest.json") for folder in folders]
    again = stages_from(redo_from, plan, manifests[0]) if redo_from else []
    if makes_demo:
        why = "the demo is not there, so nothing was checked about its documents, models, index and prompts"
        reports[0].findings.append(note("paths.corpus", why, "evolve makes it first", config.paths.corpus))
    left = [
        report
        for number, manifest in enumerate(manifests)
        for run, report in zip(plan, reports, strict=True)
        # All seeds share the first one's evaluation of the base model.
        if run in again or not (manifest.is_complete(run.name) or (number and not run.iteration))
    ]
    return [*reports, _loop_report(config, left)] if left else reports
