"""Findings: problems found before a run starts, each with its config key and fix."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drzero.recipe.errors import CheckError


class Severity(StrEnum):
    """How serious a finding is."""

    ERROR = "error"  # the run would fail, or not do what the config says
    WARNING = "warning"  # the run may fail, or cost more than necessary
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A problem of a config key, `why` it matters, how to `fix` it, and the value."""

    severity: Severity
    key: str
    why: str
    fix: str
    value: str | None = None  # none until preflight fills in the configured value

    def __str__(self) -> str:
        return f"{self.key}: {self.why}" + (f": {self.fix}" if self.fix else "")

    def with_value(self, config: DictConfig) -> "Finding":
        """The finding with its key's configured value, unless it has a value."""
        if self.value is not None:
            return self
        value = OmegaConf.select(config, self.key)
        shown = "null" if value is None else "" if OmegaConf.is_dict(value) else str(value)
        return replace(self, value=shown)

    def signs(self, stage: str) -> Iterator[tuple[str, ...]]:
        """What it shares with the same problem of another stage or iteration."""
        yield self.severity, "stage", stage.partition("_iter")[0], self.key
        yield self.severity, "key", self.key, str(self.value)
        yield self.severity, "why", self.why
        if self.value and self.fix:
            yield self.severity, "fix", self.fix, self.value


def once(found: Iterable[tuple[str, Iterable[Finding]]]) -> dict[Finding, list[str]]:
    """The findings of several stages, the worst first, each once with the stages that have it."""
    first: dict[tuple[str, ...], Finding] = {}
    stages: dict[Finding, list[str]] = {}
    for stage, findings in found:
        earlier = dict(first)  # a stage's own findings are different problems
        for finding in findings:
            signs = list(finding.signs(stage))
            same = next((earlier[sign] for sign in signs if sign in earlier), finding)
            if stage not in stages.setdefault(same, []):
                stages[same].append(stage)
            first.update((sign, same) for sign in signs if sign not in first)
    order = list(Severity)
    return dict(sorted(stages.items(), key=lambda item: order.index(item[0].severity)))


class PreflightFailed(CheckError):
    """The errors of a preflight. The message has all of them."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = list(findings)
        lines = [str(finding) for finding in findings]
        super().__init__(lines[0] if len(lines) == 1 else f"{len(lines)} errors:\n  " + "\n  ".join(lines))

    def __reduce__(self) -> tuple[type["PreflightFailed"], tuple[list[Finding]]]:
        return type(self), (self.findings,)


def error(key: str, why: str, fix: str, value: Any = None) -> Finding:
    """A finding that prevents the start. `value` replaces the configured value of `key`."""
    return Finding(Severity.ERROR, key, why, fix, None if value is None else str(value))


def warning(key: str, why: str, fix: str, value: Any = None) -> Finding:
    """A finding to read before the start."""
    return replace(error(key, why, fix, value), severity=Severity.WARNING)


def note(key: str, why: str, fix: str = "", value: Any = None) -> Finding:
    """A finding worth knowing."""
    return replace(error(key, why, fix, value), severity=Severity.NOTE)


def refusal(key: str, why: str, fix: str) -> PreflightFailed:
    """The exception that carries one error."""
    return PreflightFailed([error(key, why, fix)])
