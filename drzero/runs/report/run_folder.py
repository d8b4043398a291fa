"""A run's folder as typed records, whatever state it is in: finished, killed, running, empty.

    run = RunFolder(Path("outputs/checkpoints/demo"))
    run.kind, run.ending.sentence, run.steps[3]["drzero/reward/score"]

All that the page shows of a run except its trajectories is read here, and nowhere else. A file that is
missing, or cut off by a kill, reads as empty.
"""

import json
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from drzero.ops.errors import UserError
from drzero.ops.flow.monitor import FLOW_FILE
from drzero.ops.notices import ALARM_KIND
from drzero.ops.process.lock import lock_is_held
from drzero.ops.process.logs import EVENTS_FILE, OUT_OF_TIME, read_json_lines
from drzero.ops.resources.sampler import SAMPLES_FILE
from drzero.ops.watchdog.post_mortem import Death, examine
from drzero.recipe.compose import RESOLVED
from drzero.recipe.metrics import Steps, read_metrics
from drzero.stages.result import RESULT
from drzero.stages.watch import CAUSES

Kind = Literal["training", "preview", "synthesize", "evaluate", "merge", "loop"]

MANIFEST = "manifest.json"
_MARKS = (f"{RESOLVED}.yaml", "logs", "heartbeats.jsonl", "dumps", "metrics", "report.json", MANIFEST, RESULT)
_SERIOUS = {"crash", "hung", "silent", "restart", "stall", "exit", OUT_OF_TIME, "end", ALARM_KIND}

Record = dict[str, Any]


class NotARun(UserError):
    """The folder holds no run."""


@dataclass(frozen=True)
class Mark:
    """Something that happened once: an alarm, a restart, a stall, a further start."""

    time: float
    step: float | None
    """Where it stands on an axis of steps; between two of them if it happened in the middle of one."""
    kind: str
    text: str


@dataclass(frozen=True)
class PhaseTime:
    """Seconds that one phase of one step took; a phase that has not ended has none."""

    step: int
    phase: str
    start: float
    seconds: float


class RunFolder:
    """One run; every property is read from its files when first asked for."""

    def __init__(self, folder: Path) -> None:
        """Raise NotARun unless the folder holds a run or a loop."""
        if not folder.is_dir():
            raise NotARun(f"{folder} is no folder")
        if (folder / "evolve" / MANIFEST).is_file():
            folder = folder / "evolve"
        if not any((folder / mark).exists() for mark in _MARKS):
            places = (*(f"*/{mark}" for mark in _MARKS), f"seed*/evolve/{MANIFEST}")
            runs = {path.parent.relative_to(folder) for place in places for path in folder.glob(place)}
            inside = sorted(run.as_posix() for run in runs)
            hint = f"; runs in it: {', '.join(inside)}" if inside else ""
            raise NotARun(f"{folder} holds no run: none of {', '.join(_MARKS)} is there{hint}")
        self.folder = folder.resolve()

    @property
    def name(self) -> str:
        """The folder's name, which is the run's."""
        return self.folder.name

    @cached_property
    def kind(self) -> Kind:
        """Which stage's run it is, by what only that stage writes or has in its config."""
        if (self.folder / MANIFEST).is_file():
            return "loop"
        if "documents" in self.config:
            return "preview"
        if "gates" in self.config or (self.folder / "rejects.jsonl").is_file():
            return "synthesize"
        if "benchmarks" in self.config or (self.folder / "answers.jsonl").is_file():
            return "evaluate"
        return "merge" if "start_model" in self.report else "training"

    @cached_property
    def config(self) -> Record:
        """The config as run."""
        try:
            loaded = yaml.safe_load(self.config_text)
        except yaml.YAMLError:
            return {}
        return loaded if isinstance(loaded, dict) else {}

    @cached_property
    def config_text(self) -> str:
        """The file of the config as run, empty if there is none."""
        with suppress(OSError):
            return (self.folder / f"{RESOLVED}.yaml").read_text(encoding="utf-8", errors="replace")
        return ""

    def setting(self, key: str) -> Any:
        """A dotted key of the config, None where it is missing."""
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
        """The versions of what it ran on, from the head of its config."""
        found = re.search(r"^# versions: (.+)", self.config_text, re.MULTILINE)
        return found[1] if found else None

    @cached_property
    def steps(self) -> Steps:
        """The metrics by step."""
        try:
            return read_metrics(self.folder)
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    @cached_property
    def beats(self) -> list[Record]:
        """The heartbeats: which phase of which step began when."""
        beats = read_json_lines(self.folder / "heartbeats.jsonl")
        return [beat for beat in beats if {"time", "step", "phase"} <= beat.keys()]

    @cached_property
    def events(self) -> list[Record]:
        """What happened to the components, over all starts."""
        events = read_json_lines(self.folder / "logs" / EVENTS_FILE)
        return [event for event in events if {"time", "kind", "component", "text"} <= event.keys()]

    @cached_property
    def flow(self) -> list[Record]:
        """The snapshots of the flow monitor."""
        return [record for record in read_json_lines(self.folder / FLOW_FILE) if "points" in record]

    @cached_property
    def resources(self) -> list[Record]:
        """The samples of what components use; synthesize's file of that name holds conversations."""
        if self.kind != "training":
            return []
        samples = read_json_lines(self.folder / SAMPLES_FILE)
        return [sample for sample in samples if {"time", "component"} <= sample.keys()]

    @cached_property
    def report(self) -> Record:
        """What synthesize, merge or evaluate reports, or a loop's manifest."""
        return read_object(self.folder / (MANIFEST if (self.folder / MANIFEST).is_file() else "report.json"))

    @cached_property
    def result(self) -> Record:
        """What a finished stage leaves last."""
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
        return examine(self.folder, CAUSES)

    def _loop_ending(self) -> Death:
        """From the stages that were begun: those that come after them are in no file."""
        for name, entry in (self.report.get("stages") or {}).items():
            if entry.get("state") != "complete":
                state = "killed" if entry.get("state") == "running" else entry.get("state")
                advice = f"see evolve/logs/{name}.log, then rerun `drzero evolve`: it resumes there"
                return Death("not finished", f"{name}: {entry.get('error') or state}", name, advice=advice)
        return Death("finished", "every stage that was begun is complete")

    @cached_property
    def phases(self) -> list[PhaseTime]:
        """The phases of the steps, in order; a pause between two starts belongs to none."""
        return [
            PhaseTime(
                int(one["step"]), str(one["phase"]), float(one["time"]), float(two["time"] - one["time"])
            )
            for one, two in pairwise(self.beats)
            if two["time"] >= one["time"] and two["phase"] != "start-up"
        ]

    @cached_property
    def seconds(self) -> float | None:
        """Wall-clock seconds from the first to the last sign of life, pauses between starts included."""
        times = [record["time"] for record in (*self.events, *self.beats)]
        return max(times) - min(times) if times else None

    @cached_property
    def spent_usd(self) -> float | None:
        """What its launches have cost, by the launcher's record next to the runs; None without one."""
        path = self.folder.parent / "launches" / self.name / "spend.json"
        with suppress(OSError, ValueError, KeyError, TypeError):
            calls = json.loads(path.read_text(encoding="utf-8"))
            return float(sum((call["until"] - call["began"]) / 3600 * call["usd_per_hour"] for call in calls))
        return None

    @cached_property
    def marks(self) -> list[Mark]:
        """Alarms, and events that a reader must know of, in order of time."""
        found = [
            Mark(event["time"], self._step_of(event), event["kind"], f"{event['component']} {event['text']}")
            for event in self.events
            if event["kind"] in _SERIOUS and not (event["kind"] == "exit" and event.get("code") == 0)
        ]
        starts = [beat for beat in self.beats if beat["phase"] == "start-up"][1:]
        found += [
            Mark(b["time"], self.step_at(b["time"]), "start", "the trainer starts again") for b in starts
        ]
        return sorted(found, key=lambda mark: mark.time)

    def _step_of(self, event: Record) -> float | None:
        """An alarm is about its whole step, anything else happens within one."""
        is_whole = event["kind"] == ALARM_KIND and "step" in event
        return float(event["step"]) if is_whole else self.step_at(event["time"])

    def step_at(self, time: float) -> float | None:
        """The step at a time, with the part of it that had passed; None before the first."""
        rows = [phase for phase in self.phases if phase.start <= time and phase.step > 0]
        if not rows:
            return None
        step = rows[-1].step
        of_step = [phase for phase in self.phases if phase.step == step]
        length = sum(phase.seconds for phase in of_step) or 1.0
        return step - 1 + min(max(time - of_step[0].start, 0.0) / length, 1.0)


def read_object(path: Path) -> Record:
    """The JSON object in a file; empty if the file is missing or no object."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
