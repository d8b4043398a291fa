"""A loop's parts of the page: scores by iteration, their changes, and the pairs that gates refused."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data.solver_rows import REJECTS
from drzero.ops.records import Record, read_json_lines, read_object
from drzero.runs.loop_folder import stages
from drzero.runs.report.charts import Chart, counts_chart, scores_chart
from drzero.runs.report.figures import hops
from drzero.runs.report.trajectories import RejectLine
from drzero.runs.run_folder import RunFolder

_EXAMPLES = 3


@dataclass(frozen=True)
class GateOutcome:
    """What one gate of one synthesis judged and refused."""

    stage: str
    gate: str
    judged: int
    refused: int
    note: str
    examples: list[tuple[str, str, str]] = field(default_factory=list)  # question, answer, reason


def score_rows(run: RunFolder) -> list[Record]:
    """Exact match by benchmark and iteration, with its interval."""
    if run.kind == "evaluate":
        return list(_scores(run.report, run.name))
    rows: list[Record] = []
    for stage in stages(run):
        if stage.name.startswith("evaluate"):
            model = f"iteration {stage.iteration}" if stage.iteration else "base"
            rows += _scores(read_object(run.folder.parent / stage.name / "report.json"), model)
    return rows


def _scores(report: Record, model: str) -> Iterator[Record]:
    rows = {**(report.get("benchmarks") or {}), **(report.get("averages") or {})}
    for name, row in rows.items():
        if isinstance(row, dict) and row.get("em") is not None:
            known = {key: row.get(key) for key in ("em", "f1", "n", "searches", "failed")}
            yield {
                "benchmark": name,
                "model": model,
                "low": row.get("em_low"),
                "high": row.get("em_high"),
                **known,
            }


def score_charts(run: RunFolder) -> list[Chart]:
    """Exact match with intervals, benchmark by benchmark."""
    return scores_chart("scores", "Exact match", score_rows(run), "benchmark", "model")


def score_changes(run: RunFolder) -> list[Record]:
    """How exact match changed from one model to the next on the same questions."""
    changes = read_object(run.folder / "report.json").get("changes") or []
    needed = {"benchmark", "earlier", "later", "n", "gained", "lost", "effect", "low", "high", "p"}
    return [change for change in changes if isinstance(change, dict) and needed <= change.keys()]


def gate_outcomes(folder: Path) -> list[GateOutcome]:
    """What each gate of the synthesis in `folder` judged and refused."""
    refused: dict[str, list[tuple[str, str, str]]] = {}
    for prompt in read_json_lines(folder / REJECTS, RejectLine):
        for sample in prompt["samples"]:
            for reason in sample["reasons"]:
                gate = reason.partition(":")[0].replace(" ", "_")
                shown = (str(sample.get("question")), str(sample.get("answer")), reason)
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
    """What became of the prompts by hop, and of the pairs by gate, a column for each synthesis."""
    prompts: list[Record] = []
    pairs: list[Record] = []
    for folder in folders:
        for hop, counts in (read_object(folder / "report.json").get("per_hop") or {}).items():
            row = {"run": folder.name, "hops": hops(int(hop))}
            prompts += [
                row | {"became": as_, "count": counts.get(as_, 0)} for as_ in ("accepted", "rejected")
            ]
        for outcome in gate_outcomes(folder):
            row = {"run": folder.name, "gate": outcome.gate.replace("_", " ")}
            pairs.append(row | {"became": "passed", "count": outcome.judged - outcome.refused})
            pairs.append(row | {"became": "refused", "count": outcome.refused})
    about_prompts = "Each prompt yields at most one of its samples. A column for each iteration."
    about_pairs = "Pairs that each gate judged. Several gates may refuse one. A column for each iteration."
    return [
        *counts_chart("prompts", "Prompts by hop", about_prompts, prompts, "hops", "became"),
        *counts_chart("gates", "Pairs by gate", about_pairs, pairs, "gate", "became"),
    ]
