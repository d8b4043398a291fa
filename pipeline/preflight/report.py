"""The output of `drzero preflight`: findings, the memory ledger and the estimate, as tables or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.preflight.finding import Finding, Severity
from pipeline.preflight.memory_ledger import Ledger
from pipeline.preflight.run import Report
from pipeline.rates import RATES_DATE

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_WORST_FIRST = list(Severity)


def print_reports(reports: Sequence[Report]) -> None:
    """Print each stage's findings, worst first, and its memory ledger; then one line for all stages."""
    console, printed = Console(), set[Finding]()
    for report in reports:
        new = [finding for finding in report.findings if finding not in printed]
        printed.update(new)
        if new:
            console.print(_findings(report, new))
        if report.ledger is not None and report.ledger.capacity_gib:
            console.print(_memory(report, report.ledger))
    console.print(verdict(reports), soft_wrap=True)


def verdict(reports: Sequence[Report]) -> str:
    """One line: the number of findings by severity, and whether the run may start."""
    findings = {finding for report in reports for finding in report.findings}
    counts = [
        f"{count} {severity}{'s' if count != 1 else ''}"
        for severity in _WORST_FIRST
        if (count := sum(finding.severity is severity for finding in findings))
    ]
    may = "it must not start" if any(report.errors for report in reports) else "it may start"
    return f"preflight: {', '.join(counts) or 'nothing found'}: {may}"


def as_json(reports: Sequence[Report]) -> str:
    """The reports with all their findings, ledgers and estimates, for other programs."""
    return json.dumps([_report_dict(report) for report in reports], indent=1, ensure_ascii=False)


def _report_dict(report: Report) -> dict[str, Any]:
    ledger, time = report.ledger, report.estimate
    return {
        "stage": report.name,
        "machine": str(report.machine) if report.machine else None,
        "may_start": not report.errors,
        "findings": [asdict(finding) for finding in report.findings],
        "memory": ledger
        and {
            "capacity_gib": ledger.capacity_gib,
            "margin_gib": round(ledger.margin_gib, 2),
            "phases": {
                phase: {name: round(gib, 3) for name, gib in items.items()}
                for phase, items in ledger.phases.items()
            },
        },
        "estimate": time
        and {
            "low_s": round(time.low_s),
            "expected_s": round(time.expected_s),
            "high_s": round(time.high_s),
            "low_usd": round(time.usd(time.low_s), 2),
            "expected_usd": round(time.usd(time.expected_s), 2),
            "high_usd": round(time.usd(time.high_s), 2),
            "usd_per_hour": round(time.usd_per_hour, 4),
            "rates_of": RATES_DATE,
            "source": time.source,
        },
    }


def _findings(report: Report, findings: Sequence[Finding]) -> Table:
    machine = f" on {report.machine}" if report.machine else ""
    title = f"{report.name}{machine}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_lines=True, expand=True)
    table.add_column("")
    table.add_column("key", ratio=3, overflow="fold")
    table.add_column("value", ratio=2, overflow="fold")
    table.add_column("why", ratio=6)
    table.add_column("fix", ratio=5)
    for finding in sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.severity)):
        cells = (finding.severity, finding.key, finding.value or "", finding.why, finding.fix)
        table.add_row(*map(escape, cells), style=_STYLES[finding.severity])
    return table


def _memory(report: Report, ledger: Ledger) -> Table:
    what = "each GPU" if report.machine and report.machine.gpu else "the machine"
    left = f"{ledger.margin_gib:.1f} of {ledger.capacity_gib:.1f}"
    title = f"memory of {what}, GiB: {left} left in the worst phase"
    table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for phase in ledger.phases:
        table.add_column(phase, justify="right")
    for name in dict.fromkeys(name for items in ledger.phases.values() for name in items):
        cells = (f"{items[name]:.1f}" if name in items else "–" for items in ledger.phases.values())
        table.add_row(name, *cells)
    table.add_row("sum", *(f"{ledger.total(phase):.1f}" for phase in ledger.phases))
    return table
