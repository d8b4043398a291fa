"""A finding: one problem found before a run starts, the config key it belongs to, and how to fix it.

Checks yield findings, so that a user sees all of them at once. A function that cannot continue without the
file it reads raises one instead (`refusal`); preflight collects both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from pipeline.errors import CheckError


class Severity(StrEnum):
    """How serious a finding is."""

    ERROR = "error"
    """The run would fail, or do something other than the config asks for."""
    WARNING = "warning"
    """The run may fail, or cost more than necessary."""
    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True)
class Finding:
    """A problem at a config key: its value, `why` it matters, and how to `fix` it."""

    severity: Severity
    key: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}" + (f": {self.fix}" if self.fix else "")

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return {name: str(value) for name, value in asdict(self).items()}


class PreflightFailed(CheckError):
    """The errors among the findings; the message contains all of them."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        lines = [str(finding) for finding in findings]
        super().__init__(lines[0] if len(lines) == 1 else f"{len(lines)} errors:\n  " + "\n  ".join(lines))


def error(key: str, value: Any, why: str, fix: str) -> Finding:
    """A finding that prevents the start."""
    return Finding(Severity.ERROR, key, _shown(value), why, fix)


def warning(key: str, value: Any, why: str, fix: str) -> Finding:
    """A finding that the user should read before starting."""
    return Finding(Severity.WARNING, key, _shown(value), why, fix)


def note(key: str, value: Any, why: str, fix: str = "") -> Finding:
    """A finding worth knowing."""
    return Finding(Severity.NOTE, key, _shown(value), why, fix)


def refusal(key: str, value: Any, why: str, fix: str) -> PreflightFailed:
    """The exception that carries one error."""
    return PreflightFailed([error(key, value, why, fix)])


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether one of them prevents the start."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
