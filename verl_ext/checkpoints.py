"""A run's checkpoints: which are whole, which one a rerun resumes from, and which may be removed.

veRL 0.9.1 writes `global_step_N/actor`, then `data.pt`, in asynchronous modes `transfer_queue`, and last the
number N. A kill or a copy loses N first, so files decide. Only this project's incomplete ones are deleted.
"""

import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from drzero.ops.files import atomic_write

TRACKER = "latest_checkpointed_iteration.txt"
_SAVING = ".saving"  # file in a run's folder with the step that is being saved
_SAVED = {"actor", "data.pt", *(f"transfer_queue{part}" for part in ("", ".tmp", ".old"))}
"""veRL writes these without a critic."""
_REMOVING = ".removing"


def step_folder(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / f"global_step_{step}"


def saved_step(run: Path) -> int:
    """The step of the last complete checkpoint, recorded or newer, or 0. A recorded one may be missing."""
    recorded = _number(run / TRACKER)
    newer = (step for step in reversed(_steps(run)) if step > recorded and is_whole(step_folder(run, step)))
    return next(newer, recorded)


def shard_count(actor: Path) -> int | None:
    """Number of shards of an actor's weights, or None if its `fsdp_config.json` is missing or damaged."""
    path = actor / "fsdp_config.json"
    try:
        world = json.loads(path.read_text(encoding="utf-8"))["world_size"] if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return world if type(world) is int and world > 0 else None


def is_whole(checkpoint: Path) -> bool:
    """Whether a step folder has every rank's weights and the position in the data, none of them cut off."""
    actor = checkpoint / "actor"
    world = shard_count(actor)
    is_config = (actor / "huggingface" / "config.json").is_file()
    if world is None or not is_config or (checkpoint / "transfer_queue.tmp").exists():
        return False
    shards = (actor / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world))
    # torch writes the list of a zip file's parts last.
    files = chain([checkpoint / "data.pt"], shards)
    return all(path.is_file() and zipfile.is_zipfile(path) for path in files)


@contextmanager
def saving(run: Path, step: int) -> Iterator[None]:
    """Mark a new step's folder, so that `settle_checkpoints` may remove it if the body fails."""
    if not step_folder(run, step).exists():
        atomic_write(run / _SAVING, str(step))
    yield
    (run / _SAVING).unlink(missing_ok=True)


def settle_checkpoints(run: Path, start: int | None = None) -> list[str]:
    """Set aside or remove incomplete steps, and set aside all after `start`. Returns one line per change."""
    if not run.is_dir():
        return []
    done, saving_step, recorded = [], _number(run / _SAVING), _number(run / TRACKER)
    for folder in run.glob(f".global_step_*{_REMOVING}"):
        shutil.rmtree(folder)
    for step in _steps(run):
        folder = step_folder(run, step)
        if step == recorded or is_whole(folder):
            if start is not None and step > start:
                before = folder.with_name(f"{folder.name}.earlier")
                if before.is_dir() and _is_ours(before):
                    _remove(before)  # one generation is kept
                done.append(_put_aside(folder, f"this run starts at step {start}", "earlier"))
        elif step == saving_step and _is_ours(folder):
            done.append(f"removing {folder}: a save that was cut off")
            _remove(folder)
        else:
            done.append(_put_aside(folder, "it is no complete checkpoint"))
    (run / _SAVING).unlink(missing_ok=True)
    last = saved_step(run) if start is None else max(_steps(run), default=0)
    return [*done, *_record(run, last)]


def prune_checkpoints(run: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` whole steps, if any. Folders with files of others stay."""
    whole = [folder for step in _steps(run) if is_whole(folder := step_folder(run, step))]
    for folder in whole[:-keep] if keep else []:
        if _is_ours(folder):
            _remove(folder)


def _record(run: Path, step: int) -> list[str]:
    tracker = run / TRACKER
    if _number(tracker) == step and (step or not os.path.lexists(tracker)):
        return []
    done = [_put_aside(tracker, "it is no file")] if tracker.is_dir() else []
    if step:
        atomic_write(tracker, str(step))
        return [*done, f"{tracker} was missing or wrong: the newest whole checkpoint is of step {step}"]
    tracker.unlink(missing_ok=True)
    return done


def _put_aside(path: Path, why: str, word: str = "put_aside") -> str:
    names = (path.with_name(f"{path.name}.{word}{number or ''}") for number in count())
    new = next(name for name in names if not os.path.lexists(name))
    path.rename(new)
    return f"{path} is now called {new.name}, because {why}: remove it if nobody needs it"


def _remove(folder: Path) -> None:
    gone = folder.with_name(f".{folder.name}{_REMOVING}")
    folder.rename(gone)
    shutil.rmtree(gone)


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and {path.name for path in folder.iterdir()} <= _SAVED


def _number(path: Path) -> int:
    """The step that a file names, else 0."""
    try:
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else 0


def _steps(run: Path) -> list[int]:
    names = (path.name for path in run.iterdir() if path.is_dir()) if run.is_dir() else ()
    found = (re.fullmatch("global_step_([1-9][0-9]{0,17})", name) for name in names)
    return sorted(int(match[1]) for match in found if match)
