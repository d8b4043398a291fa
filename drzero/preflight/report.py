"""The output of `drzero preflight`, as text or JSON: findings, memory ledger, estimate."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

from drzero.ops.notices import plain
from drzero.preflight.finding import Finding, Severity
from drzero.preflight.memory_ledger import Ledger, about
from drzero.preflight.run import Report
from drzero.recipe.gpu_prices import RATES_DATE
from drzero.recipe.tables import console, new_table

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_WORST_FIRST = list(Severity)
_LABEL = max(map(len, Severity))


def print_reports(reports: Sequence[Report]) -> None:
    """Print each stage's findings (worst first) and memory ledger, then a verdict."""
    out, printed = console(), set[Finding]()
    for report in reports:
        new = [finding for finding in report.findings if finding not in printed]
        printed.update(new)
        if new:
            _print_findings(out, report, new)
        if report.ledger is not None and report.ledger.capacity_gib:
            _print_memory(out, report, report.ledger)
    out.print(verdict(reports), soft_wrap=True)


def verdict(reports: Sequence[Report]) -> str:
    """One line: findings by severity, and whether the run may start."""
    findings = {finding for report in reports for finding in report.findings}
    counts = [
        f"{count} {severity}{'s' if count != 1 else ''}"
        for severity in _WORST_FIRST
        if (count := sum(finding.severity is severity for finding in findings))
    ]
    may = "it must not start" if any(report.errors for report in reports) else "it may start"
    return f"preflight: {', '.join(counts) or 'nothing found'}: {may}"


def as_json(reports: Sequence[Report]) -> str:
    """The reports as JSON."""
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


def _print_findings(out: Console, report: Report, findings: Sequence[Finding]) -> None:
    out.print(f"{report.name}{f' on {report.machine}' if report.machine else ''}", soft_wrap=True)
    for finding in sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.severity)):
        setting = f"{finding.key} = {finding.value}" if finding.value else finding.key
        out.print()
        for label, text in ((str(finding.severity), setting), ("why", finding.why), ("fix", finding.fix)):
            if text:
                style = _STYLES[finding.severity] if text == setting else "dim"
                out.print(_block_line(out, label, text, style), soft_wrap=True)
    out.print()


def _block_line(out: Console, label: str, text: str, style: str) -> Text:
    head, text = f"{label:>{_LABEL}}  ", plain(text)
    if out.is_terminal:
        indent = " " * len(head)
        wrapper = TextWrapper(out.width, head, indent, break_long_words=False, break_on_hyphens=False)
        body = wrapper.fill(text)
    else:
        body = head + " ".join(text.split("\n"))
    line = Text(body)
    line.stylize(style, 0, _LABEL)
    return line


def _print_memory(out: Console, report: Report, ledger: Ledger) -> None:
    what = "each GPU" if report.machine and report.machine.gpu else "the machine"
    left = f"{ledger.margin_gib:.1f} of {ledger.capacity_gib:.1f}"
    out.print(f"memory of {what}, GiB: {left} left in the worst phase", soft_wrap=True)
    table = new_table(None, "", *(f">{phase}" for phase in ledger.phases))
    names = list(dict.fromkeys(name for items in ledger.phases.values() for name in items))
    for name in names:
        cells = (f"{items[name]:.1f}" if name in items else "–" for items in ledger.phases.values())
        table.add_row(name, *cells)
    table.add_row("sum", *(f"{ledger.total(phase):.1f}" for phase in ledger.phases))
    out.print(table)
    if table.box is None:  # a box ends with an empty line
        out.print()
    widest = max(map(len, names))
    for name in names:
        out.print(f" {name:<{widest}}  {about(name)}", soft_wrap=True)
    out.print()
