"""The output of `drzero preflight`, as text or JSON: findings, memory ledger, estimate."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.text import Text

from drzero.ops.notices import plain
from drzero.preflight.finding import Finding, Severity, once
from drzero.preflight.memory_ledger import Ledger
from drzero.preflight.run import Report
from drzero.recipe.gpu_prices import RATES_DATE
from drzero.recipe.tables import console, new_table

EVERYTHING = "--all"
"""The option for notes and tables."""
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_LABEL = max(map(len, Severity))


def print_reports(reports: Sequence[Report], *, everything: bool = False) -> None:
    """Print errors and warnings, then a line each on memory and time, and a verdict.

    With `everything`, also the notes and the tables: memory by phase, time by stage.
    """
    out, whole = console(), reports[-1]
    out.print(f"{whole.name}{f' on {whole.machine}' if whole.machine else ''}", soft_wrap=True)
    found = once((report.name, report.findings) for report in reports)
    shown = [one for one in found if everything or one.severity is not Severity.NOTE]
    _print_findings(out, {one: found[one] if len(reports) > 1 else [] for one in shown})
    if everything:
        _print_tables(out, reports)
    for label, text in _summary(reports):
        out.print(_block_line(out, label, text), soft_wrap=True)
    notes = dict.fromkeys(finding.key for finding in found if finding.severity is Severity.NOTE)
    if not everything:
        more = f"notes on {', '.join(notes)}, and " if notes else ""
        line = _block_line(out, "more", f"{EVERYTHING} prints {more}tables of memory and time")
        out.print(line, soft_wrap=True)
    out.print()
    out.print(verdict(found), soft_wrap=True)


def verdict(findings: Iterable[Finding]) -> str:
    """One line: findings by severity, and whether the run may start."""
    counts = Counter(finding.severity for finding in findings)
    told = [f"{counts[one]} {one}{'s' if counts[one] != 1 else ''}" for one in Severity if counts[one]]
    may = "it must not start" if counts[Severity.ERROR] else "it may start"
    return f"preflight: {', '.join(told) or 'nothing found'}: {may}"


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


def _print_findings(out: Console, found: Mapping[Finding, Sequence[str]]) -> None:
    before = None
    for finding, stages in found.items():
        if finding.severity is not before:
            out.print()
        before = finding.severity
        setting = f"{finding.key} = {finding.value}" if finding.value else finding.key
        if stages:
            others = f" and {len(stages) - 1} more" if len(stages) > 1 else ""
            setting += f" ({stages[0]}{others})"
        out.print(_block_line(out, before, setting, _STYLES[before]), soft_wrap=True)
        for label, text in (("why", finding.why), ("fix", finding.fix)):
            if text:
                out.print(_block_line(out, label, text), soft_wrap=True)
    out.print()


def _block_line(out: Console, label: str, text: str, style: str = "dim") -> Text:
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


def _summary(reports: Sequence[Report]) -> Iterator[tuple[str, str]]:
    """Memory and time in a line each, with their labels."""
    ledgers = [(report, ledger) for report in reports if (ledger := report.ledger) and ledger.capacity_gib]
    if ledgers:
        report, ledger = max(ledgers, key=lambda item: item[1].filled)
        of = f" of {report.name}" if len(reports) > 1 else ""
        used = f"{ledger.total(ledger.worst):.1f} of {ledger.capacity_gib:.1f} GiB of {_memory_of(report)}"
        yield "memory", f"{used} ({ledger.filled:.0%}) in the worst phase: {ledger.worst}{of}"
    if estimate := reports[-1].estimate:
        has_gpu = reports[-1].machine and reports[-1].machine.gpu
        unpriced = has_gpu and not estimate.usd_per_hour
        yield "time", f"{estimate}{'. For dollars set compute= instead of hardware=' if unpriced else ''}"


def _memory_of(report: Report) -> str:
    return "each GPU" if report.machine and report.machine.gpu else "the machine"


def _print_tables(out: Console, reports: Sequence[Report]) -> None:
    printed: list[Ledger] = []  # the iterations of a loop have the same
    for report in reports:
        if report.ledger and report.ledger.capacity_gib and report.ledger not in printed:
            printed.append(report.ledger)
            _print_memory(out, report, report.ledger)
    estimates = [(report.name, one) for report in reports if (one := report.estimate)]
    if len(reports) > 1 and estimates:
        table = new_table(None, "stage", "time", "rests on")
        for name, one in estimates:
            table.add_row(name, one.range, one.source)
        out.print(table)
        out.print()


def _print_memory(out: Console, report: Report, ledger: Ledger) -> None:
    left = f"{ledger.margin_gib:.1f} of {ledger.capacity_gib:.1f} left in the worst phase"
    title = f"{report.name}, GiB of {_memory_of(report)}, by docs/preflight.md: {left}"
    out.print(title, soft_wrap=True)
    table = new_table(None, "", *(f">{phase}" for phase in ledger.phases))
    for name in dict.fromkeys(name for items in ledger.phases.values() for name in items):
        cells = (f"{items[name]:.1f}" if name in items else "–" for items in ledger.phases.values())
        table.add_row(name, *cells)
    table.add_row("sum", *(f"{ledger.total(phase):.1f}" for phase in ledger.phases))
    out.print(table)
    if table.box is None:  # a box ends with an empty line
        out.print()
