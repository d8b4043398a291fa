"""The self-evolution loop for its page: stages by iteration, scores, and what the gates refused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drzero.ops.process.logs import read_json_lines
from drzero.runs.report.charts import Chart, counts_chart, scores_chart
from drzero.runs.report.figures import hops
from drzero.runs.report.run_folder import Record, RunFolder, read_object

_EXAMPLES = 3
"""Refused pairs shown for each gate."""


@dataclass(frozen=True)
class StageState:
    """A stage of the loop: its record in the manifest, and its folder if it is there."""

    name: str
    state: str
    seconds: float
    tokens: int
    figures: Mapping[str, Any]
    error: str | None
    page: str | None
    """Its own report, relative to the loop's."""

    @property
    def iteration(self) -> int:
        """Counted from 1; 0 is the evaluation of the base model."""
        return int(self.name.rpartition("_iter")[2] or 0)


@dataclass(frozen=True)
class GateOutcome:
    """What one gate refused, with examples."""

    stage: str
    gate: str
    judged: int
    refused: int
    note: str
    examples: list[tuple[str, str, str]] = field(default_factory=list)
    """Question, answer, reason."""


def stages(run: RunFolder) -> list[StageState]:
    """The loop's stages in the order of the manifest."""
    found = []
    for name, entry in _entries(run).items():
        page = f"../{name}/report.html"
        is_killed = entry.get("state") == "running" and not run.is_running
        found.append(
            StageState(
                name=str(name),
                state="killed" if is_killed else str(entry.get("state")),
                seconds=float(entry.get("seconds") or 0),
                tokens=int(entry.get("tokens") or 0),
                figures=entry.get("figures") or {},
                error=entry.get("error"),
                page=page if (run.folder / page).is_file() else None,
            )
        )
    return found


def versions(run: RunFolder) -> str | None:
    """The versions that the last stage recorded."""
    recorded = [entry["versions"] for entry in _entries(run).values() if entry.get("versions")]
    return ", ".join(f"{name} {version}" for name, version in recorded[-1].items()) if recorded else None


def _entries(run: RunFolder) -> dict[str, Record]:
    found = run.report.get("stages")
    return found if isinstance(found, dict) else {}


def stage_runs(run: RunFolder) -> list[RunFolder]:
    """The folders of its stages that hold trajectories, in the order of the manifest."""
    kept = ("dumps", "samples.jsonl", "answers.jsonl")
    folders = [run.folder.parent / name for name in _entries(run)]
    return [RunFolder(folder) for folder in folders if any((folder / name).exists() for name in kept)]


def scores(report: Record) -> dict[str, Record]:
    """The scores of an evaluation by benchmark, averages included, of those that have one."""
    rows = {**(report.get("benchmarks") or {}), **(report.get("averages") or {})}
    return {name: row for name, row in rows.items() if isinstance(row, dict) and row.get("em") is not None}


def score_rows(run: RunFolder) -> list[Record]:
    """Exact match by benchmark and iteration, with its interval."""
    if run.kind == "evaluate":
        return [_score(name, run.name, row) for name, row in scores(run.report).items()]
    rows = []
    for stage in stages(run):
        if stage.name.startswith("evaluate"):
            shown = f"iteration {stage.iteration}" if stage.iteration else "base"
            report = read_object(run.folder.parent / stage.name / "report.json")
            rows += [_score(name, shown, row) for name, row in scores(report).items()]
    return rows


def _score(benchmark: str, model: str, row: Record) -> Record:
    known = {key: row.get(key) for key in ("em", "f1", "n", "searches", "failed")}
    return {
        "benchmark": benchmark,
        "model": model,
        "low": row.get("em_low"),
        "high": row.get("em_high"),
        **known,
    }


def score_charts(run: RunFolder) -> list[Chart]:
    """Exact match with intervals, benchmark by benchmark."""
    return scores_chart("scores", "Exact match", score_rows(run), "benchmark", "model")


def score_changes(run: RunFolder) -> list[Record]:
    """How exact match changed from one model to the next on the same questions, where a loop reports it."""
    changes = read_object(run.folder / "report.json").get("changes") or []
    needed = {"benchmark", "earlier", "later", "n", "gained", "lost", "effect", "low", "high", "p"}
    return [change for change in changes if isinstance(change, dict) and needed <= change.keys()]


def gate_outcomes(folder: Path) -> list[GateOutcome]:
    """What each gate of one synthesis judged and refused."""
    refused: dict[str, list[tuple[str, str, str]]] = {}
    for prompt in read_json_lines(folder / "rejects.jsonl"):
        for sample in prompt.get("samples") or ():
            for reason in sample.get("reasons") or ():
                gate = str(reason).partition(":")[0].replace(" ", "_")
                shown = (str(sample.get("question")), str(sample.get("answer")), str(reason))
                refused.setdefault(gate, []).append(shown)
    gates = read_object(folder / "report.json").get("gates") or {}
    return [
        GateOutcome(
            folder.name,
            gate,
            int(counts.get("judged", 0)),
            int(counts.get("refused", 0)),
            str(counts.get("note") or ""),
            refused.get(gate, [])[:_EXAMPLES],
        )
        for gate, counts in gates.items()
    ]


def synthesis_charts(folders: list[Path]) -> list[Chart]:
    """Prompts by hop that gave a pair or did not, and what the gates refused, of each synthesis."""
    return [
        *counts_chart(
            "prompts",
            "Prompts by hop",
            "Of each prompt's samples one pair at most is taken. A column for each iteration.",
            list(_prompts(folders)),
            "hops",
            "became",
        ),
        *counts_chart(
            "gates",
            "Pairs by gate",
            "Pairs that each gate judged; one may be refused by several. A column for each iteration.",
            list(_gates(folders)),
            "gate",
            "became",
        ),
    ]


def _prompts(folders: list[Path]) -> Iterator[Record]:
    for folder in folders:
        for hop, counts in (read_object(folder / "report.json").get("per_hop") or {}).items():
            for became in ("accepted", "rejected"):
                row = {"run": folder.name, "hops": hops(int(hop))}
                yield row | {"became": became, "count": counts.get(became, 0)}


def _gates(folders: list[Path]) -> Iterator[Record]:
    for folder in folders:
        for outcome in gate_outcomes(folder):
            row = {"run": folder.name, "gate": outcome.gate.replace("_", " ")}
            yield row | {"became": "passed", "count": outcome.judged - outcome.refused}
            yield row | {"became": "refused", "count": outcome.refused}
