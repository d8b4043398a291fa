"""The times of an earlier run that is like a stage: the same model and engine, on any machine.

`drzero.preflight.cost` scales them to the stage's batch and machine.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf

from drzero.ops.files import open_regular
from drzero.ops.records import RunRecords
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import PreflightFailed
from drzero.preflight.machine import declared_machine
from drzero.recipe.compose import RESOLVED
from drzero.recipe.metrics import read_metrics
from drzero.recipe.settings.schema import pace_keys

_NEWEST = 20  # run folders to read, since more would take preflight seconds
_ALIKE = (
    "method",
    "environment.name",
    "actor_rollout_ref.rollout.name",
    "solver.engine",
    "machine.device",
    "endpoint",
)
_OF_STAGE = ("method", "partitions", "benchmarks", "rows")  # each only in configs of one kind of stage
_LEAST_STEPS = 3  # the first compiles and loads, so it does not count


@dataclass(frozen=True)
class Earlier:
    """A run under the config and machine it had, and the mean seconds of each of its parts."""

    name: str
    ctx: CheckContext
    seconds: dict[str, float]
    steps: tuple[float, float] | None  # the shortest and the longest, of a training
    is_same: bool  # whether batch and machine are the stage's own, too


def find_earlier(ctx: CheckContext) -> Earlier | None:
    """The newest run with all that a step's time depends on, or else the newest of the model and engine."""
    own, pace = _traits(ctx.config), _pace(ctx.config)
    alike = [(folder, run) for folder, run in _runs(ctx) if _traits(run) == own]
    for folder, run in sorted(alike, key=lambda item: _pace(item[1]) != pace):
        # The settings of another version may lack a key. The stage's own folder is checked elsewhere.
        with suppress(PreflightFailed, AttributeError, TypeError, ValueError, KeyError):
            machine = declared_machine(run, starting=False)
            past = replace(ctx, config=run, machine=machine, starting=False, ahead=False)
            if found := _training(folder) if ctx.trains else _conversing(folder):
                seconds, steps = found
                return Earlier(folder.name, past, seconds, steps, is_same=_pace(run) == pace)
    return None


def _runs(ctx: CheckContext) -> Iterator[tuple[Path, DictConfig]]:
    """Run folders and their settings, the newest first. Damaged ones have none."""
    config, known = ctx.config, ctx.readings.runs
    places = {Path(config.paths.checkpoints), Path(config.run.dir).parent}
    files = [file for place in places for file in place.glob(f"*/{RESOLVED}.yaml")]
    for file in sorted(files, key=_written, reverse=True)[:_NEWEST]:
        if file not in known:
            settings = None
            with suppress(OSError, ValueError, RecursionError, yaml.YAMLError), open_regular(file) as opened:
                settings = yaml.load(opened, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            known[file] = OmegaConf.create(settings if isinstance(settings, dict) else {})
        yield file.parent, known[file]


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # it has just been removed
        return 0.0


def _traits(config: DictConfig) -> list[Any]:
    kind = [key for key in _OF_STAGE if key in config]
    # A model's folder differs between machines, its name does not.
    return [kind, Path(str(config.get("base_model"))).name, _values(config, _ALIKE)]


def _pace(config: DictConfig) -> list[Any]:
    return _values(config, (key for key in pace_keys() if key != "base_model"))


def _values(config: DictConfig, keys: Iterable[str]) -> list[Any]:
    return [OmegaConf.select(config, key) for key in keys]


def _training(folder: Path) -> tuple[dict[str, float], tuple[float, float]] | None:
    steps = [step for step in read_metrics(folder).values() if "timing_s/step" in step]
    if len(steps) < _LEAST_STEPS:
        return None
    whole, sampling, update = (
        [step.get(f"timing_s/{name}", 0.0) for step in steps[1:]] for name in ("step", "gen", "update_actor")
    )
    means = {"sampling": np.mean(sampling), "update": np.mean(update)}
    seconds = {name: float(mean) for name, mean in means.items() if mean > 0}
    seconds["rest"] = max(float(np.mean(whole)) - sum(seconds.values()), 0.1)
    records = RunRecords(folder)
    if began := next((event["time"] for event in records.last_start), None):
        first = (beat["time"] for beat in records.beats if beat["phase"] == "rollout")
        if rollout := next((at for at in first if at > began), None):
            seconds["start-up"] = rollout - began
    return seconds, (min(whole), max(whole))


def _conversing(folder: Path) -> tuple[dict[str, float], None] | None:
    """From its services' start to their end, unless it was done in several starts."""
    records, ready = RunRecords(folder), dict[str, float]()
    events = records.events
    ended = next((event["time"] for event in events if event["kind"] == "stopped"), None)
    if ended is None or records.last_start != events or not (folder / "result.json").is_file():
        return None
    for event in events:
        if event["kind"] == "ready":  # the first of each service; another one follows a restart
            ready.setdefault(event["component"], event["time"])
    up = max(ready.values(), default=events[0]["time"])
    return {"start-up": up - events[0]["time"], "conversations": ended - up}, None
