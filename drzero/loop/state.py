"""The state of a loop's finished stages: whether they still fit, which to redo, which files to remove.

Every removal is recorded before it starts, so the next start completes it after a kill.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from drzero.loop.identity import changed_keys, identity, input_identities, same_input, significant_config
from drzero.loop.manifest import LoopChanged, Manifest, StageEntry
from drzero.loop.plan import StageRun, take_option
from drzero.ops.console import say
from drzero.ops.text import did_you_mean
from verl_ext.checkpoints import saved_step

Configs = dict[str, DictConfig]


def recover(manifest: Manifest, configs: Configs, folder: Path) -> None:
    """Complete a killed start's changes to the manifest and the folders."""
    for name, entry in list(manifest.entries.items()):
        if entry.state == "running":
            # The stage was killed, and its log's last line tells when.
            log = log_path(folder, name)
            last = log.stat().st_mtime if log.is_file() else time.time()
            entry.seconds += max(0.0, last - (entry.started or last))
            entry.state, entry.error = "failed", "killed"
        if entry.state == "forgotten" and name in configs:
            _remove(name, configs[name], manifest)
    for name, entry in manifest.entries.items():
        if name in configs and entry.is_pruned:
            _remove_checkpoints(configs[name])
    manifest.save()


def log_path(folder: Path, name: str) -> Path:
    """The loop's log of a stage."""
    return folder / "logs" / f"{name}.log"


def check_finished(plan: Sequence[StageRun], configs: Configs, manifest: Manifest) -> None:
    """Raise LoopChanged if a begun stage no longer fits. An evaluation is forgotten instead, to be redone."""
    first_open: str | None = None
    for run in plan:
        entry, config = manifest.entry(run.name), configs[run.name]
        if entry.state != "complete":
            is_trained = run.stage in ("challenger", "solver") and saved_step(Path(config.run.dir))
            if is_trained and not entry.starts:
                raise LoopChanged(
                    f"{config.run.dir} holds a run that this loop has not started: give the loop a folder of "
                    f"its own (paths.checkpoints=…), or remove that run with --from {run.name}"
                )
            if is_trained and (changes := _changes(run, config, entry)):
                raise LoopChanged(
                    f"{run.name} was started with other settings or inputs:{_listed(changes)}\n"
                    f"Undo that to resume it, or restart it with --from {run.name}"
                )
            first_open = first_open or (run.name if run.stage != "evaluate" else None)
            continue
        if run.stage == "evaluate":
            if changes := _changes(run, config, entry):
                say("evolve", f"{run.name} is redone: {'; '.join(changes)}")
                entry.state = "pending"
            continue
        if first_open:
            raise LoopChanged(f"{run.name} is complete but {first_open} is not: add --from {first_open}")
        if changes := _changes(run, config, entry):
            raise LoopChanged(
                f"{run.name} is complete, but these have changed since:{_listed(changes)}\n"
                f"Undo that, or redo it and all that depends on it with --from {run.name}, or give the new "
                "loop a folder of its own (paths.checkpoints=…)"
            )


def _changes(run: StageRun, config: DictConfig, entry: StageEntry) -> list[str]:
    """Differences from the record. A missing input was pruned, or a stage will write it."""
    settings = changed_keys(entry.config, significant_config(run.stage, config, run.overrides))
    changes = [f"setting {change}" for change in settings]
    now = input_identities(run.stage, config)
    changes += [f"input {name}: it was not read" for name in now if name not in entry.inputs]
    for name, was in entry.inputs.items():
        if name not in now:
            changes.append(f"input {name}: it is no longer read")
        elif now[name] is not None and not same_input(was, now[name]):
            changes.append(f"input {name}: its content has changed")
    for name, output in entry.outputs.items():
        if not output["pruned"] and identity(output["path"]) != output["identity"]:
            what = "has changed" if Path(output["path"]).exists() else "is missing"
            changes.append(f"output {name}: {output['path']} {what}")
    return changes


def _listed(changes: Sequence[str]) -> str:
    return "".join(f"\n  {change}" for change in changes)


def split_from(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The stage after `--from`, and the overrides. Raises LoopChanged if no stage follows."""
    redo_from, rest = take_option(arguments, "--from")
    if redo_from == "":
        raise LoopChanged("--from needs a stage, for example --from solver_iter1")
    return redo_from, rest


def stages_from(name: str, plan: Sequence[StageRun], manifest: Manifest) -> list[StageRun]:
    """The named stage and all that depend on it. Raises LoopChanged, also for a pruned checkpoint."""
    names = [run.name for run in plan]
    if name not in names:
        hint = did_you_mean(name, names)
        raise LoopChanged(f"--from {name}: no such stage{hint}. Stages of this loop: {', '.join(names)}")
    start = names.index(name)
    again = [plan[start]] if plan[start].stage == "evaluate" else list(plan[start:])
    for run in again:
        source = _checkpoint_source(run)
        entry = manifest.entries.get(source or "")
        if entry and source not in [other.name for other in again] and entry.is_pruned:
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


def prune(run: StageRun, configs: Configs, manifest: Manifest) -> None:
    """Remove the FSDP checkpoints that no stage will read after `run`."""
    spent = _checkpoint_source(run)
    if spent not in manifest.entries or manifest.entries[spent].is_pruned:
        return
    # Recorded first: after a kill, the next start removes the rest.
    manifest.entries[spent].outputs["checkpoint"]["pruned"] = True
    manifest.save()
    _remove_checkpoints(configs[spent])


def _checkpoint_source(run: StageRun) -> str | None:
    sources = {"merge": f"solver_iter{run.iteration}", "challenger": f"challenger_iter{run.iteration - 1}"}
    return sources.get(run.stage)


def _remove_checkpoints(config: DictConfig) -> None:
    for checkpoint in Path(config.run.dir).glob("global_step_*"):
        shutil.rmtree(checkpoint)
