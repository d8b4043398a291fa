"""What a loop has finished: whether it still fits, what is done again, what may be removed.

Every removal is recorded before it begins and taken up again at the next start, so that a kill in between
leaves neither half a folder that passes for a whole one nor a record of what is gone.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from ops.logs import say
from pipeline.loop import StageRun
from pipeline.manifest import LoopChanged, Manifest, StageEntry
from pipeline.stage_identity import (
    changed_keys,
    identity,
    input_identities,
    same_input,
    significant_config,
)
from pipeline.summary import saved_step

Configs = dict[str, DictConfig]


def take_up(manifest: Manifest, configs: Configs, folder: Path) -> None:
    """Bring the manifest and the folders to what a killed start was about to do."""
    for name, entry in list(manifest.entries.items()):
        if entry.state == "running":
            # A stage that was killed: its time is what its log tells.
            log = log_path(folder, name)
            last = log.stat().st_mtime if log.is_file() else time.time()
            entry.seconds += max(0.0, last - (entry.started or last))
            entry.state, entry.error = "failed", "killed"
        if entry.state == "forgotten" and name in configs:
            _remove(name, configs[name], manifest)
    for name, entry in manifest.entries.items():
        if name in configs and any(output["pruned"] for output in entry.outputs.values()):
            _remove_checkpoints(configs[name])
    manifest.save()


def log_path(folder: Path, name: str) -> Path:
    """The loop's own log of a stage."""
    return folder / "logs" / f"{name}.log"


# Does it still fit ------------------------------------------------------------------------------------------


def check_finished(plan: Sequence[StageRun], configs: Configs, manifest: Manifest) -> None:
    """Raise LoopChanged when what is finished, or begun, no longer fits the settings, inputs or outputs.

    Nothing is built on an evaluation: one that no longer fits is simply done again. (Its journal keeps the
    answers that still count, and refuses others.)
    """
    first_open: str | None = None
    for run in plan:
        entry, config = manifest.entry(run.name), configs[run.name]
        if entry.state != "complete":
            _check_begun(run, config, entry)
            first_open = first_open or (run.name if run.stage != "evaluate" else None)
            continue
        if run.stage == "evaluate":
            if changes := _changes(run, config, entry):
                say("evolve", f"{run.name} is done again: {'; '.join(changes)}")
                entry.state = "pending"
            continue
        if first_open:
            raise LoopChanged(f"{run.name} is complete but {first_open} is not: say --from {first_open}")
        if changes := _changes(run, config, entry):
            raise LoopChanged(
                f"{run.name} is complete, but not with what there is now:{_listed(changes)}\n"
                f"Undo that, or do it and all that follows from it again with --from {run.name}, or give the "
                "new loop a place of its own (paths.checkpoints=…)"
            )


def _check_begun(run: StageRun, config: DictConfig, entry: StageEntry) -> None:
    """A checkpoint may only be gone on from by the stage that wrote it, with the settings it had."""
    if run.stage not in ("challenger", "solver") or not saved_step(Path(config.run.dir)):
        return
    if not entry.starts:
        raise LoopChanged(
            f"{config.run.dir} holds a run that this loop has not started: give the loop a place of its own "
            f"(paths.checkpoints=…), or remove that run with --from {run.name}"
        )
    changes = _setting_changes(run, config, entry) + _input_changes(run, config, entry)
    if changes:
        raise LoopChanged(
            f"{run.name} has been begun with other settings or inputs:{_listed(changes)}\n"
            f"Undo that to go on with it, or begin it again with --from {run.name}"
        )


def _changes(run: StageRun, config: DictConfig, entry: StageEntry) -> list[str]:
    changes = _setting_changes(run, config, entry) + _input_changes(run, config, entry)
    for name, output in entry.outputs.items():
        if not output["pruned"] and identity(output["path"]) != output["identity"]:
            what = "has changed" if Path(output["path"]).exists() else "is gone"
            changes.append(f"output {name}: {output['path']} {what}")
    return changes


def _setting_changes(run: StageRun, config: DictConfig, entry: StageEntry) -> list[str]:
    now = significant_config(run.stage, config, run.overrides)
    return [f"setting {change}" for change in changed_keys(entry.config, now)]


def _input_changes(run: StageRun, config: DictConfig, entry: StageEntry) -> list[str]:
    """Inputs of another content; one that is not there has been pruned, or is an output looked at above."""
    now = input_identities(run.stage, config)
    return [f"input {name}: it was not read" for name in now if name not in entry.inputs] + [
        f"input {name}: {'its content has changed' if name in now else 'it is no longer read'}"
        for name, was in entry.inputs.items()
        if name not in now or (now[name] is not None and not same_input(was, now[name]))
    ]


def _listed(changes: Sequence[str]) -> str:
    return "".join(f"\n  {change}" for change in changes)


# Doing it again ---------------------------------------------------------------------------------------------


def split_from(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """What follows `--from`, and the overrides; raises LoopChanged where nothing follows it."""
    rest, redo_from = [], None
    words = iter(arguments)
    for word in words:
        if word == "--from":
            redo_from = next(words, "")
        elif word.startswith("--from="):
            redo_from = word.partition("=")[2]
        else:
            rest.append(word)
    if redo_from == "":
        raise LoopChanged("--from needs a stage, for example --from solver_iter1")
    return redo_from, rest


def stages_from(name: str, plan: Sequence[StageRun], manifest: Manifest) -> list[StageRun]:
    """The stages that `--from name` does again: that one and all built on it, an evaluation alone.

    Raises LoopChanged for an unknown stage, and where a checkpoint that one of them needs has been pruned.
    """
    names = [run.name for run in plan]
    if name not in names:
        raise LoopChanged(f"--from {name}: the stages of this loop are {', '.join(names)}")
    start = names.index(name)
    again = [plan[start]] if plan[start].stage == "evaluate" else list(plan[start:])
    for run in again:
        source = _checkpoint_source(run)
        entry = manifest.entries.get(source or "")
        if entry and source not in [other.name for other in again] and _is_pruned(entry):
            raise LoopChanged(
                f"--from {name}: {run.name} needs the checkpoint of {source}, which has been pruned. Start "
                f"from {source}, or keep checkpoints from the beginning with keep_checkpoints=true"
            )
    return again


def forget(again: Sequence[StageRun], configs: Configs, manifest: Manifest) -> None:
    """Remove the results of these stages."""
    for run in again:
        manifest.entry(run.name).state = "forgotten"
    manifest.save()
    for run in again:
        _remove(run.name, configs[run.name], manifest)


def _remove(name: str, config: DictConfig, manifest: Manifest) -> None:
    for folder in (Path(config.run.dir), Path(config.run.export_dir)):
        if folder.exists():
            say("evolve", f"removing {folder}")
            shutil.rmtree(folder)
    del manifest.entries[name]
    manifest.save()


# Pruning ----------------------------------------------------------------------------------------------------


def prune(run: StageRun, configs: Configs, manifest: Manifest) -> None:
    """Remove the FSDP checkpoints that nothing will read any more, now that `run` is complete."""
    spent = _checkpoint_source(run)
    if spent not in manifest.entries or _is_pruned(manifest.entries[spent]):
        return
    # Recorded first: what a kill leaves of the folder is removed at the next start.
    manifest.entries[spent].outputs["checkpoint"]["pruned"] = True
    manifest.save()
    _remove_checkpoints(configs[spent])


def _checkpoint_source(run: StageRun) -> str | None:
    """The stage run whose checkpoint a stage reads: a merge its solver's, a challenger the last one's."""
    return {"merge": f"solver_iter{run.iteration}", "challenger": f"challenger_iter{run.iteration - 1}"}.get(
        run.stage
    )


def _is_pruned(entry: StageEntry) -> bool:
    return any(output["pruned"] for output in entry.outputs.values())


def _remove_checkpoints(config: DictConfig) -> None:
    for checkpoint in Path(config.run.dir).glob("global_step_*"):
        shutil.rmtree(checkpoint)
