"""A run's folder as typed records, in whatever state the run is: finished, killed, running, empty.

    run.kind, run.ending.sentence, run.steps[3]["drzero/val/em"]

A missing or cut file reads as empty. `drzero.runs.report.trajectories` reads trajectories one by one.
"""

import json
import os
import re
import shlex
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from drzero.ops.errors import UserError
from drzero.ops.files import open_regular
from drzero.ops.notices import ALARM_KIND
from drzero.ops.process.lock import lock_is_held
from drzero.ops.records import HEARTBEATS, OUT_OF_TIME, Record, RunRecords, read_object, shape
from drzero.ops.watchdog.post_mortem import Death, examine
from drzero.recipe.compose import RESOLVED
from drzero.recipe.metrics import MetricsTail, Steps, steps_of
from drzero.stages.result import DEMONSTRATIONS, RESULT
from drzero.stages.watch import CAUSES

Kind = Literal["training", "preview", "synthesize", "warm-start", "evaluate", "merge", "loop"]

MANIFEST = "manifest.json"
_SIGNS = (f"{RESOLVED}.yaml", "logs", HEARTBEATS, "dumps", "metrics", "report.json", MANIFEST, RESULT)
_DRAWN = (
    "drzero/collapse/",
    "drzero/val/",
    "drzero/failures/share",
    "drzero/rollout/token_drift_rate",
    "train/loss",
    "val/loss",
    "response_length/mean",
    "training/global_step",
)
_Entry = shape(
    {"state": str},
    **{"seconds": float, "started": float | None, "tokens": int, "error": str | None},
    **{"figures": dict[str, Any], "versions": dict[str, str]},
)
_SERIOUS = {"crash", "hung", "silent", "restart", "stall", "exit", OUT_OF_TIME, "end", ALARM_KIND}


class NotARun(UserError):
    """The folder holds no run."""


@dataclass(frozen=True)
class Mark:
    """Something that happened once: an alarm, a restart, a stall, a further start."""

    time: float
    step: float | None  # its place on an axis of steps, with a fraction if it happened within a step
    kind: str
    text: str


@dataclass(frozen=True)
class PhaseTime:
    """How many seconds one phase of one step took."""

    step: int
    phase: str
    start: float
    seconds: float


class RunFolder(RunRecords):
    """One run. Every property is read from its files on first use."""

    def __init__(self, folder: Path) -> None:
        if not os.path.isdir(folder):  # `Path.is_dir` raises for a name that is too long
            raise NotARun(f"{str(folder)[:200]} is no folder")
        if (folder / "evolve" / MANIFEST).is_file():
            folder = folder / "evolve"
        if not any((folder / sign).exists() for sign in _SIGNS):
            places = [*(f"*/{sign}" for sign in _SIGNS), f"seed*/evolve/{MANIFEST}"]
            runs = {path.parent.relative_to(folder) for place in places for path in folder.glob(place)}
            inside = sorted(run.as_posix() for run in runs)
            hint = f"; runs in it: {', '.join(inside)}" if inside else ""
            raise NotARun(f"{folder} holds no run: none of {', '.join(_SIGNS)} is there{hint}")
        super().__init__(folder.resolve())

    @property
    def name(self) -> str:
        """The run's name, which its folder has too."""
        return self.folder.name

    @cached_property
    def kind(self) -> Kind:
        """Which stage ran, told by what only that stage writes or has in its config."""
        if (self.folder / MANIFEST).is_file():
            return "loop"
        if self.setting("demonstrations") or (self.folder / DEMONSTRATIONS).is_file():
            return "warm-start"
        if "documents" in self.config:
            return "preview"
        if "gates" in self.config or (self.folder / "rejects.jsonl").is_file():
            return "synthesize"
        if "benchmarks" in self.config or (self.folder / "answers.jsonl").is_file():
            return "evaluate"
        return "merge" if "start_model" in self.report else "training"

    @cached_property
    def config(self) -> Record:
        """The config the run was started with."""
        try:
            loaded = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    @cached_property
    def config_text(self) -> str:
        """The config's file, or empty."""
        with suppress(OSError), open_regular(self.folder / f"{RESOLVED}.yaml") as file:
            return file.read().decode(errors="replace")
        return ""

    def setting(self, key: str) -> Any:
        """A dotted key of the config, None if it is missing."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    @cached_property
    def command(self) -> str | None:
        """The command that last started the run, from the head of its config."""
        found = re.match(r"# command: (.+)", self.config_text)
        try:
            program, *words = shlex.split(found[1]) if found else []
        except ValueError:  # not written by us, or nothing there
            return None
        is_ours = Path(program).name in ("drzero", "cli.py")
        return shlex.join(["drzero" if is_ours else program, *words])

    @cached_property
    def versions(self) -> str | None:
        """The versions of the packages it ran on, from the head of its config."""
        found = re.search(r"^# versions: (.+)", self.config_text, re.MULTILINE)
        return found[1] if found else None

    @cached_property
    def steps(self) -> Steps:
        """The metrics by step that a page needs: all of a long run's would fill the memory."""
        tail = MetricsTail(self.folder)
        steps = steps_of(tail, _DRAWN)
        self.unreadable |= tail.unreadable
        return steps

    @cached_property
    def samples(self) -> list[Record]:
        """Resource samples of a training run. Synthesize keeps conversations in a file of that name."""
        return super().samples if self.kind == "training" else []

    @cached_property
    def report(self) -> Record:
        """The report of synthesize, merge or evaluate, or a loop's manifest."""
        return read_object(self.folder / (MANIFEST if (self.folder / MANIFEST).is_file() else "report.json"))

    @cached_property
    def entries(self) -> dict[str, Record]:
        """A loop's stages, as its manifest has them."""
        found, fitting = self.report.get("stages"), dict[str, Record]()
        entries: Mapping[str, Any] = found if isinstance(found, dict) else {MANIFEST: None}
        for name, entry in entries.items():
            with suppress(msgspec.ValidationError):
                msgspec.convert(entry, _Entry)
                fitting[name] = entry
        if left_out := len(entries) - len(fitting):
            self.unreadable[MANIFEST] = f"{left_out} stages"
        return fitting

    @cached_property
    def result(self) -> Record:
        """The last file of a finished stage."""
        return read_object(self.folder / RESULT)

    @cached_property
    def is_running(self) -> bool:
        """Whether a process has the run now."""
        return lock_is_held(self.folder / "lock")

    @cached_property
    def ending(self) -> Death:
        """How the run ended."""
        if self.kind == "loop":
            return self._loop_ending()
        if not self.events and self.result:  # a stage without services, such as merge
            return Death("finished", "the run ended without an error")
        if not self.events and not self.beats and not (self.folder / "logs").is_dir():
            return Death("not finished", "nothing here says how it ended: it was killed early or still works")
        return examine(self, CAUSES)

    def _loop_ending(self) -> Death:
        for name, entry in self.entries.items():
            if (state := entry["state"]) != "complete":
                state = {"running": "killed", "pending": "not begun"}.get(state, state)
                advice = f"see evolve/logs/{name}.log, then rerun `drzero evolve`: it resumes there"
                return Death("not finished", f"{name}: {entry.get('error') or state}", name, advice=advice)
        return Death("finished", "every stage that was begun is complete")

    @cached_property
    def phases(self) -> list[PhaseTime]:
        """The phases in order. The pause between two starts belongs to none."""
        return [
            PhaseTime(
                int(one["step"]), str(one["phase"]), float(one["time"]), float(two["time"] - one["time"])
            )
            for one, two in pairwise(self.beats)
            if two["time"] >= one["time"] and two["phase"] != "start-up"
        ]

    @cached_property
    def seconds(self) -> float | None:
        """Wall-clock seconds from the first to the last sign of life, pauses included."""
        times = [record["time"] for record in (*self.events, *self.beats)]
        return max(times) - min(times) if times else None

    @cached_property
    def spent_usd(self) -> float | None:
        """What its launches have cost, by the launcher's record next to the runs. None without a record."""
        path = self.folder.parent / "launches" / self.name / "spend.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            calls = json.loads(path.read_text(encoding="utf-8"))
            return float(sum((call["until"] - call["began"]) / 3600 * call["usd_per_hour"] for call in calls))
        return None

    @cached_property
    def marks(self) -> list[Mark]:
        """Alarms, failures and further starts, in order of time."""
        found = [
            Mark(event["time"], self._step_of(event), event["kind"], f"{event['component']} {event['text']}")
            for event in self.events
            if event["kind"] in _SERIOUS and not (event["kind"] == "exit" and event.get("code") == 0)
        ]
        starts = [beat["time"] for beat in self.beats if beat["phase"] == "start-up"][1:]
        found += [Mark(time, self.step_at(time), "start", "the trainer starts again") for time in starts]
        return sorted(found, key=lambda mark: mark.time)

    def _step_of(self, event: Record) -> float | None:
        is_whole = event["kind"] == ALARM_KIND and "step" in event
        return float(event["step"]) if is_whole else self.step_at(event["time"])

    def step_at(self, time: float) -> float | None:
        """The step at a time, with the fraction that had passed. None before the first."""
        trained, spans = self._spans
        place = bisect_right(trained, time, key=lambda phase: phase.start)
        if not place:
            return None
        step = trained[place - 1].step
        start, length = spans[step]
        return step - 1 + min(max(time - start, 0.0) / (length or 1.0), 1.0)

    @cached_property
    def _spans(self) -> tuple[list[PhaseTime], dict[int, tuple[float, float]]]:
        """The phases of steps, and when each step began and how long it took."""
        trained, spans = [phase for phase in self.phases if phase.step > 0], dict[int, tuple[float, float]]()
        for phase in trained:
            start, length = spans.get(phase.step, (phase.start, 0.0))
            spans[phase.step] = start, length + phase.seconds
        return trained, spans


def named_run(arguments: Sequence[str], command: str) -> RunFolder:
    """The run of `drzero COMMAND RUN_DIR`. Raises NotARun for anything but one folder of a run."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise NotARun(f"drzero {command} takes one argument: the folder of a run (run.dir)")
    return RunFolder(Path(arguments[0]))
