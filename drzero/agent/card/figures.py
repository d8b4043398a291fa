"""The figures of a model card, from the runs that evaluated and trained the model. Nothing is filled in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drzero.checkpoints.reading import read_json
from drzero.recipe.compose import RESOLVED
from drzero.runs.run_folder import RunFolder
from drzero.stages.evaluate import ANSWERS
from drzero.stages.result import REPORT, RESULT


@dataclass(frozen=True)
class Scores:
    """One evaluation: a row for each benchmark and average."""

    model: str
    index: str  # its index's fingerprint
    rows: Mapping[str, Mapping[str, Any]]  # as in report.json


def scores(checkpoints: Path, iteration: int | None, model: str) -> Iterator[Scores]:
    """The finished evaluations of this model, after the loop's earlier ones.

    `model` is its fingerprint: an evaluation of other weights says nothing about it.
    """
    last = iteration or 0
    earlier = [checkpoints / f"evaluate_iter{number}" for number in range(last)]
    found = [(number, report) for number, folder in enumerate(earlier) if (report := _evaluation(folder))]
    for number, report in found:
        yield _scores(f"iteration {number}" if number else "base model", report)
    for folder in sorted({path.parent for path in checkpoints.glob(f"*/{ANSWERS}")} - {*earlier}):
        report = _evaluation(folder)
        if report and report["conditions"].get("model") == model:
            yield _scores("this model", report)


def _evaluation(run: Path) -> dict[str, Any] | None:
    """The report of a finished evaluation on benchmarks."""
    report = _report(run)
    return report if report and report.get("benchmarks") else None


def _report(run: Path) -> dict[str, Any] | None:
    return read_json(run / REPORT, "its figures") if (run / RESULT).is_file() else None


def _scores(model: str, report: Mapping[str, Any]) -> Scores:
    return Scores(model, report["conditions"]["collection"], report["benchmarks"] | report["averages"])


def questions_made(checkpoints: Path, iteration: int | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The reports of the finished synthesize stages up to an iteration."""
    for number in range(1, (iteration or 0) + 1):
        if report := _report(checkpoints / f"synthesize_iter{number}"):
            yield number, report


def trained_with(checkpoints: Path, iteration: int | None) -> str | None:
    """The versions that the solver's training recorded."""
    run = checkpoints / f"solver_iter{iteration}"
    return RunFolder(run).versions if (run / f"{RESOLVED}.yaml").is_file() else None
