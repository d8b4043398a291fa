"""What a training run's page answers first: what it asked, whether anything is wrong, what to do next."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.examples import SHOWN
from drzero.ops.grouping import by_key
from drzero.ops.notices import ALARM_KIND
from drzero.runs.loop_folder import stages
from drzero.runs.report.checklist import EVERY_SAMPLE, ComponentState, RunCheck
from drzero.runs.report.figures import Tally
from drzero.runs.report.table import TrajectoryTable
from drzero.runs.report.verdict import Verdict
from drzero.runs.run_folder import MANIFEST, RunFolder

Row = tuple[int, Mapping[str, Any]]  # its place in the table, and its cells

_STEPS = 20  # of a longer run, if this one was too short to judge
_SHOWN = 3  # names in one line
_LONGEST = 400  # characters of an alarm
_SHARED = ("iteration", "model", "hardware", "compute", "env", "paths.")  # keys that the next stage needs too
_NEXT = {
    "hrpo": ("synthesize", "It writes the solver's questions."),
    "grpo": ("merge", "It exports the solver."),
}


@dataclass(frozen=True)
class Asked:
    """One question of the last step, with the row that has its conversation."""

    row: int
    question: str
    answer: str
    reward: str
    why: str


@dataclass(frozen=True)
class Trouble:
    """Something that is wrong, and what to do."""

    what: str
    advice: str
    grave: bool = True  # whether the run or its result may be spoiled by it


@dataclass(frozen=True)
class Next:
    """What to do now, and the command."""

    text: str
    command: str | None = None
    page: str | None = None  # a further page to read, relative to the run's


def asked(table: TrajectoryTable) -> list[Asked]:
    """Three questions of the last steps whose outcomes differ, the best one first."""
    opened = [
        (place, row)
        for place, row in enumerate(table.listed)
        if row.get("place") is not None and row["question"]
    ]
    opened.sort(key=lambda pair: (-(pair[1]["step"] or 0), -(pair[1]["score"] or 0)))
    rows, last, questions = list[Row](), None, set[str]()
    for place, row in opened:
        if row["step"] != last and len(questions) >= SHOWN:
            break
        last = row["step"]
        questions.add(row["question"])
        rows.append((place, row))
    return [
        Asked(
            place,
            row["question"],
            row["answer"] or "no answer",
            "not counted" if row["score"] is None else f"{row['score']:.2f}",
            _why(row),
        )
        for place, row in _differing(rows)
    ]


def _differing(rows: Sequence[Row]) -> list[Row]:
    """Three questions. Each has the outcome shown least often so far."""
    chosen: dict[str, Row] = {}
    while len(chosen) < SHOWN and (left := [row for row in rows if row[1]["question"] not in chosen]):
        shown = Counter(_outcome(row) for _, row in chosen.values())
        best = min(left, key=lambda pair: shown[_outcome(pair[1])])
        chosen[best[1]["question"]] = best
    return [*chosen.values()]


def _outcome(row: Mapping[str, Any]) -> str:
    right, tried = row.get("attempts_right"), row.get("tried")
    if right is not None and tried:
        return "all" if right >= tried else "some" if right else "none"
    return "not counted" if row["score"] is None else f"{row['score']:.0f}"


def _why(row: Mapping[str, Any]) -> str:
    parts = [f"{row['hop']} hop{'s' * (row['hop'] != 1)}"] if row["hop"] else []
    if row.get("attempts_right") is not None and row.get("tried"):
        parts.append(f"{row['attempts_right']} of {row['tried']} attempts gave this answer")
    if verdict := row["verdict"].removeprefix("some right").removeprefix("; "):
        parts.append(verdict)
    if row["failures"]:
        parts.append(row["failures"])
    return ", ".join(parts)


def troubles(
    run: RunFolder, checks: Sequence[RunCheck], components: Sequence[ComponentState]
) -> list[Trouble]:
    """What is wrong, the gravest first: how it ended, alarms, checks, parts of the run."""
    found = []
    diagnose = f"`drzero diagnose {shlex.quote(str(run.folder))}` says more"
    if not run.is_running and run.ending.state != "finished":
        error = f": {run.ending.first_error[:300]}" if run.ending.first_error else ""
        found.append(Trouble(f"{run.ending.sentence}{error}", run.ending.advice))
    found += _alarms(run)
    if not found:  # else they have its consequences
        failed = [check for check in checks if check.good is False]
        found += [
            Trouble(f"{one.question} No: {one.evidence}", one.advice or diagnose, False) for one in failed
        ]
        bad = [] if found else [state.name for state in components if not state.good]
        found += [Trouble(f"not well: {', '.join(bad[:_SHOWN])}", diagnose, False)] * bool(bad)
    if run.unreadable:
        names = ", ".join([*run.unreadable][:_SHOWN])
        found.append(
            Trouble(f"files with lines that cannot be read: {names}", "the page counts the other lines")
        )
    return found


def counted(tally: Tally, checks: Sequence[RunCheck]) -> str:
    """How much was lost, and how many checks are well."""
    total, lost = tally.trajectories, tally.invalid
    rows = f"{total:,} trajectories, " + (f"{lost:,} of them left out" if lost else "all of them count")
    dropped = [check.evidence for check in checks if check.question == EVERY_SAMPLE]
    well = Counter(check.good for check in checks)
    unknown = f", {well[None]} without a record" if well[None] else ""
    lines = [rows, *(f"of the samples on the way {text}" for text in dropped)]
    return f"{'; '.join(lines)}. Checks: {well[True]} of {len(checks)} are well{unknown}."


def _alarms(run: RunFolder) -> Iterator[Trouble]:
    """One for each kind of alarm, with its last text, which has its advice."""
    told = (mark.text for mark in run.marks if mark.kind == ALARM_KIND)
    kinds = by_key(told, lambda text: text.partition("]")[0].partition("[")[2])
    for *earlier, last in kinds.values():
        what, _, advice = last[:_LONGEST].removeprefix("trainer ").partition("): ")
        again = f" (and {len(earlier)} times before)" if earlier else ""
        yield Trouble(f"{what}{')' * bool(advice)}{again}", advice)


def next_step(run: RunFolder, judged: Verdict, wrong: Sequence[Trouble] = ()) -> Next:
    """What to do now, after what is to be done about something `wrong`."""
    following = _next_step(run, judged)
    if run.ending.state == "finished" and any(trouble.grave for trouble in wrong):
        return replace(following, text=f"First see to what is wrong. Then: {following.text}")
    return following


def _next_step(run: RunFolder, judged: Verdict) -> Next:
    folder = shlex.quote(str(run.folder))
    if run.is_running:
        return Next("Wait for its end. To follow it:", f"drzero top {folder}")
    loop = _loop_of(run)
    again = (loop and loop.command) or run.command
    if run.ending.state != "finished":
        return Next("After that, the same command resumes it:", again)
    if loop:
        page = "../evolve/report.html"
        if any(stage.state != "complete" for stage in stages(loop)):
            return Next("Let the loop go on. Its page has every stage.", again, page)
        iteration = run.setting("iteration")
        which = [] if iteration is None else [f"iteration={iteration}"]
        words = ["ask", *which, *_overrides(loop, ("paths.",))]
        return Next(
            "The loop is complete: read its page, then put a question to the solver.", _command(words), page
        )
    if judged.answer == "too few to say":
        longer = [
            word
            for word in _overrides(run)
            if not word.startswith(("trainer.total_training_steps", "steps_per_"))
        ]
        words = [_stage(run), *longer, f"trainer.total_training_steps={_STEPS}"]
        return Next("Train on: it resumes after its last step.", _command(words))
    return _next_stage(run)


def _next_stage(run: RunFolder) -> Next:
    method = str(run.setting("method"))
    if _stage(run) == "demo":
        return Next(
            "Run the whole loop on the demo's corpus.",
            _command(["evolve", "loop=demo", *_overrides(run, ("paths.",))]),
        )
    if method in _NEXT:
        stage, text = _NEXT[method]
        return Next(text, _command([stage, *_overrides(run, _SHARED)]))
    words = [
        "evaluate",
        *_overrides(run, ("env", "hardware", "paths.")),
        f"model={run.setting('run.export_dir')}",
    ]
    return Next("Evaluate the model that it exported.", _command(words))


def _loop_of(run: RunFolder) -> RunFolder | None:
    """The loop that the run is a stage of."""
    folder = run.folder.parent / "evolve"
    loop = RunFolder(folder) if (folder / MANIFEST).is_file() else None
    return loop if loop and run.name in loop.entries else None


def _stage(run: RunFolder) -> str:
    words = shlex.split(run.command or "")
    return words[1] if len(words) > 1 else ""


def _overrides(run: RunFolder, keys: tuple[str, ...] = ("",)) -> list[str]:
    """The overrides of its command that begin with one of the keys."""
    return [word for word in shlex.split(run.command or "")[2:] if word.startswith(keys)]


def _command(words: Sequence[str]) -> str:
    return shlex.join(["drzero", *words])
