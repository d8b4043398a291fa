"""A loop's parts of the page: its iterations side by side, what changed between them, what gates refused."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.solver_rows import REJECTS
from data.spread import spread
from drzero.ops.grouping import by_key
from drzero.ops.records import Record, read_json_lines, read_object
from drzero.runs.loop_folder import StageState, stages
from drzero.runs.report.charts import Chart, scores_chart
from drzero.runs.report.figures import hops
from drzero.runs.report.machine import usd_per_hour
from drzero.runs.report.trajectories import RejectLine
from drzero.runs.report.verdict import Verdict, evaluated, judged, records
from drzero.runs.run_folder import NotARun, RunFolder
from drzero.stages.evaluate.changes import loop_changes
from drzero.stages.result import REPORT

_EXAMPLES = 3
_PANELS = 12  # benchmarks that are drawn; the table has all
STAGES = ("challenger", "synthesize", "solver", "merge", "evaluate")


@dataclass(frozen=True)
class GateOutcome:
    """What one gate of one synthesis judged and refused."""

    stage: str
    gate: str
    judged: int
    refused: int
    note: str
    examples: list[tuple[str, str, str]] = field(default_factory=list)  # question, answer, reason


@dataclass(frozen=True)
class Iteration:
    """A column of the loop's table."""

    name: str
    stages: Mapping[str, StageState]  # by the name of the stage
    scores: Mapping[str, Record]  # by benchmark
    usd: Mapping[str, float | None]  # by stage, None without a price
    made: Mapping[str, str]  # what became of its prompts
    gates: Mapping[str, GateOutcome]

    @property
    def seconds(self) -> float:
        """Of all its stages."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def dollars(self) -> float | None:
        """Of all its stages, None if one has no price."""
        known = [usd for usd in self.usd.values() if usd is not None]
        return sum(known) if len(known) == len(self.usd) else None


@dataclass(frozen=True)
class Changed:
    """A question that two models answered, one right and one wrong. `before` and `after` are table rows."""

    question: str
    hop: int | None
    before: tuple[int, Mapping[str, Any]]
    after: tuple[int, Mapping[str, Any]]


def iterations(loop: RunFolder) -> list[Iteration]:
    """The columns, the model before training first."""
    by = by_key(stages(loop), lambda stage: stage.iteration)
    return [_iteration(loop, number, some) for number, some in sorted(by.items())]


def _iteration(loop: RunFolder, number: int, some: Sequence[StageState]) -> Iteration:
    named = {stage.name.partition("_iter")[0]: stage for stage in some}
    folders = {name: loop.folder.parent / stage.name for name, stage in named.items()}
    is_evaluated = "evaluate" in named and named["evaluate"].state == "complete"
    report = read_object(folders["evaluate"] / REPORT) if is_evaluated else {}
    synthesis = folders.get("synthesize")
    return Iteration(
        name=f"iteration {number}" if number else "before training",
        stages=named,
        scores={row["benchmark"]: row for row in _scores(report, "")},
        usd=_usd(named, folders),
        made=dict(_made(named, synthesis)),
        gates={outcome.gate: outcome for outcome in gate_outcomes(synthesis)} if synthesis else {},
    )


def _made(named: Mapping[str, StageState], synthesis: Path | None) -> Iterator[tuple[str, str]]:
    """What an iteration made, each with its name in the table."""
    figures = named["challenger"].figures if "challenger" in named else {}
    if isinstance(some := figures.get("questions_some_but_not_all_solve"), (int, float)):
        yield "questions that teach, in training", f"{some:.0f} of {figures.get('rollouts', 0):.0f}"
    if synthesis:
        yield from pairs_by_hop(synthesis)


def pairs_by_hop(synthesis: Path) -> Iterator[tuple[str, str]]:
    """How many prompts of each number of hops gave the solver a pair."""
    for hop, counts in (read_object(synthesis / REPORT).get("per_hop") or {}).items():
        yield (
            f"prompts that gave a pair, {hops(int(hop))}",
            f"{counts.get('accepted', 0)} of {counts.get('prompts', 0)}",
        )


def _usd(named: Mapping[str, StageState], folders: Mapping[str, Path]) -> dict[str, float | None]:
    """The dollars of each stage. One that keeps no config, as merge, has the machine of the others."""
    configs = {name: _config(folder) for name, folder in folders.items()}
    rates = {name: usd_per_hour(config) for name, config in configs.items() if "machine" in config}
    others = max(rates.values(), default=0.0)
    return {
        name: rate * stage.seconds / 3600 if (rate := rates.get(name, others)) else None
        for name, stage in named.items()
    }


def _config(folder: Path) -> Record:
    try:
        return RunFolder(folder).config
    except NotARun:  # it has not begun
        return {}


def _evaluations(loop: RunFolder) -> list[StageState]:
    """The finished ones, by iteration."""
    known = (stage for stage in stages(loop) if stage.name.startswith("evaluate"))
    return sorted((s for s in known if s.state == "complete"), key=lambda s: s.iteration)


def loop_verdict(loop: RunFolder) -> Verdict:
    """Whether the last evaluated solver answers more of the same questions than the first model."""
    done = _evaluations(loop)
    if len(done) < 2:
        return Verdict("nothing yet", "It takes two finished evaluations, before and after a training.")
    first, last = (loop.folder.parent / stage.name for stage in (done[0], done[-1]))
    changes = evaluated(first, last)
    if not changes:
        return Verdict("nothing yet", f"{first.name} and {last.name} have no question in common.")
    answer, told = judged(changes)
    others = [str(change) for change in changes if change not in told]
    about = f"{first.name} and {last.name}, the same questions (McNemar's exact test)"
    return Verdict(answer, "; ".join(map(str, told)), (*others, about))


def changed(loop: RunFolder, listed: Sequence[Mapping[str, Any]]) -> dict[str, list[Changed]]:
    """Up to three questions that became right, and three that became wrong, from the rows that open."""
    done = _evaluations(loop)
    if len(done) < 2:
        return {}
    first, last = (_by_question(listed, stage.name) for stage in (done[0], done[-1]))
    pairs = [
        Changed(question, after[1].get("hop"), before, after)
        for question, before in first.items()
        if (after := last.get(question)) and before[1]["score"] != after[1]["score"]
    ]
    pairs.sort(key=lambda pair: -(pair.hop or 0))
    won = [pair for pair in pairs if pair.after[1]["score"]]
    lost = [pair for pair in pairs if not pair.after[1]["score"]]
    kinds = {"wrong → right": won, "right → wrong": lost}
    return {kind: spread(some, lambda pair: pair.hop)[:_EXAMPLES] for kind, some in kinds.items()}


def _by_question(listed: Sequence[Mapping[str, Any]], stage: str) -> dict[str, tuple[int, Mapping[str, Any]]]:
    """The rows of an evaluation that open, by question, without questions that occur twice."""
    opened = (
        (number, row)
        for number, row in enumerate(listed)
        if row["stage"] == stage and row.get("place") is not None and row.get("question")
    )
    found = by_key(opened, lambda numbered: str(numbered[1]["question"]))
    return {question: rows[0] for question, rows in found.items() if len(rows) == 1}


def score_rows(run: RunFolder) -> list[Record]:
    """Exact match by benchmark and iteration, with its interval."""
    if run.kind == "evaluate":
        return list(_scores(run.report, run.name))
    return [{**row, "model": one.name} for one in iterations(run) for row in one.scores.values()]


def _scores(report: Record, model: str) -> Iterator[Record]:
    averages = report.get("averages") or {}
    for name, row in {**(report.get("benchmarks") or {}), **averages}.items():
        if isinstance(row, dict) and row.get("em") is not None:
            known = {key: row.get(key) for key in ("em", "f1", "n", "searches", "failed")}
            ends = {"low": row.get("em_low"), "high": row.get("em_high")}
            yield {"benchmark": name, "model": model, "is_average": name in averages, **ends, **known}


def score_changes(run: RunFolder) -> list[Record]:
    """How exact match changed from one model of a loop to another on the same questions."""
    done = _evaluations(run) if run.kind == "loop" else []
    if not done or done[0].iteration:  # without the first model, nothing shows what training changed
        return []
    return loop_changes({stage.iteration: records(run.folder.parent / stage.name) for stage in done})


def score_charts(run: RunFolder) -> list[Chart]:
    """Exact match with intervals: of a loop a chart for each benchmark, all on one scale."""
    rows = score_rows(run)
    if run.kind != "loop":
        return scores_chart("scores", "Exact match", rows, "benchmark", joined=False)
    by = by_key((row for row in rows if not row["is_average"]), lambda row: str(row["benchmark"]))
    panels = (
        scores_chart(f"scores-{number}", benchmark, some, "model", about="")
        for number, (benchmark, some) in enumerate(list(by.items())[:_PANELS])
    )
    return [chart for panel in panels for chart in panel]


def gate_outcomes(folder: Path) -> list[GateOutcome]:
    """What each gate of the synthesis in `folder` judged and refused."""
    refused: dict[str, list[tuple[str, str, str]]] = {}
    for prompt in read_json_lines(folder / REJECTS, RejectLine):
        for sample in prompt["samples"]:
            for reason in sample["reasons"]:
                gate = reason.partition(":")[0].replace(" ", "_")
                shown = (str(sample.get("question")), str(sample.get("answer")), reason)
                refused.setdefault(gate, []).append(shown)
    gates = read_object(folder / REPORT).get("gates") or {}
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
