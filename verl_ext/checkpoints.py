"""A run's checkpoints on disk: which are whole, which one a rerun resumes from, and which may be removed.

    settle_checkpoints(run)           # before veRL resumes: remove what a kill left half-written
    saved_step(run)                   # 40

veRL 0.9.1 saves in place, in this order: the actor's files into `global_step_N/actor`, then `data.pt` (the
position in the data), then the number N into `latest_checkpointed_iteration.txt`. So a kill may leave

- a step folder above the recorded number, which is removed; the rerun resumes from the recorded step.
- an empty number: the file had been opened for writing, so its step is complete. The rerun resumes from the
  newest whole step: one with a `data.pt` and a complete actor.

veRL prunes old actors, and only these, before the new step has its `data.pt` and its number. Our trainer
therefore prunes with `prune_checkpoints`: whole folders, and only below a recorded step.
"""

import json
import re
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"


def step_folder(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / f"global_step_{step}"


def saved_step(run: Path) -> int:
    """The step of the run's last complete checkpoint, 0 if it has none."""
    tracker = run / TRACKER
    if not tracker.is_file():
        return 0
    text = tracker.read_text().strip()
    if text.isdecimal():
        return int(text)
    return max((step for step in _steps(run) if is_whole(step_folder(run, step))), default=0)


def is_whole(checkpoint: Path) -> bool:
    """Whether a step folder has every rank's weights, and the position in the data, which is written last."""
    actor = checkpoint / "actor"
    try:
        ranks = int(json.loads((actor / "fsdp_config.json").read_text())["world_size"])
    except (OSError, ValueError, KeyError):
        return False
    shards = [actor / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    needed = (*shards, actor / "huggingface" / "config.json", checkpoint / "data.pt")
    return all(path.is_file() for path in needed)


def settle_checkpoints(run: Path) -> list[str]:
    """Repair a run's folder so that veRL resumes from the last complete step; returns what was done."""
    if not run.is_dir():
        return []
    done = []
    step = saved_step(run)
    tracker = run / TRACKER
    if tracker.is_file() and tracker.read_text().strip() != str(step):
        done.append(f"{tracker} was torn by a kill; the newest whole checkpoint is of step {step}")
        if step:
            tracker.write_text(str(step))  # if another kill truncates it, this same case repairs it
        else:
            tracker.unlink()
    for other in _steps(run):
        folder = step_folder(run, other)
        if other > step:
            what = f"a save that was cut off, the last complete one is of step {step}"
        elif other < step and not is_whole(folder):
            what = "the rest of an old checkpoint"
        else:
            continue
        done.append(f"removing {folder}: {what}")
        shutil.rmtree(folder)
    return done


def prune_checkpoints(run: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` step folders, never the recorded one; None or 0 keeps them all."""
    last = saved_step(run)
    old = [step for step in _steps(run) if step < last]
    surplus = max(0, len(old) + 1 - keep) if keep else 0
    for step in old[:surplus]:
        shutil.rmtree(step_folder(run, step))


def _steps(run: Path) -> list[int]:
    found = (re.fullmatch(r"global_step_(\d+)", path.name) for path in run.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match)
