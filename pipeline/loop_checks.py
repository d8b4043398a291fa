"""What can be known of a loop's later stages before the first one has run.

A stage judges itself when it starts; by then others have been paid for. This is the same preflight, which
does not miss what the stages ahead will make.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omegaconf import DictConfig

from ops.logs import say
from pipeline.compute_checks import check_together
from pipeline.finding import Finding, PreflightFailed, Severity
from pipeline.loop import StageRun
from pipeline.preflight import preflight
from pipeline.subject import Readings


def check_ahead(runs: Sequence[StageRun], configs: dict[str, DictConfig]) -> None:
    """Judge the stages that will run; raises PreflightFailed with all faults, each told once."""
    readings = Readings()
    faults: dict[tuple[str, str], Finding] = {}
    worries: dict[tuple[str, str], Finding] = {}
    estimates = []

    def sort_in(stage: str, findings: Iterable[Finding]) -> None:
        for finding in findings:
            # Stages of one kind have one fault many times over.
            kind = faults if finding.severity is Severity.ERROR else worries
            kind.setdefault((stage, finding.key), finding)

    for run in runs:
        report = preflight(configs[run.name], run.stage, starting=True, ahead=True, readings=readings)
        sort_in(run.stage, report.findings)
        estimates.append(report.estimate)
    if runs:
        sort_in("evolve", check_together(configs[runs[-1].name].compute, estimates))
    if faults:
        raise PreflightFailed(list({str(finding): finding for finding in faults.values()}.values()))
    for finding in {str(finding): finding for finding in worries.values()}.values():
        if finding.severity is Severity.WARNING:
            say("preflight", f"{finding.severity}: {finding}")
    if told := worries.get(("evolve", "cost")):
        say("preflight", f"{told.severity}: {told}")
