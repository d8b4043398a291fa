"""`drzero status`: how far the self-evolution loop is, as a table.

    drzero status                                        the loop of outputs/checkpoints, or its seeds' loops
    drzero status paths.checkpoints=/data/checkpoints    a loop elsewhere

It reads only what runs write down, so you may ask at any time.
"""

from pathlib import Path

from omegaconf import DictConfig

from drzero.loop.manifest import Manifest
from drzero.loop.report import print_loop
from drzero.ops.process.lock import lock_is_held
from drzero.ops.records import RunRecords
from drzero.recipe.tables import console


def run_status(config: DictConfig) -> None:
    """Print the loops under `paths.checkpoints`, and runs outside them. Raises FileNotFoundError for none."""
    root = Path(config.paths.checkpoints)
    found = [root / "evolve", *sorted(root.glob("seed*/evolve"))]
    loops = [folder for folder in found if (folder / "manifest.json").is_file()]
    locks = sorted(root.glob("*/lock"), key=lambda lock: lock.stat().st_mtime)
    alone = [lock.parent for lock in locks if lock_is_held(lock)]
    in_loop = any(lock_is_held(loop / "lock") for loop in loops)
    for folder in alone:
        doing = RunRecords(folder).startup
        if doing or not in_loop:
            does = f"starts ({doing})" if doing else "runs"
            console().print(f"{folder.name} {does}: `drzero top {folder}` shows it", soft_wrap=True)
    if not loops and not alone:
        last = f"; of its last run `drzero diagnose {locks[-1].parent}` tells" if locks else ""
        raise FileNotFoundError(
            f"no loop has been started under {root}: start one with `drzero evolve`, or name its "
            f"place with paths.checkpoints=…{last}"
        )
    for folder in loops:
        manifest = Manifest(folder / "manifest.json")
        title = "self-evolution loop" + ("" if folder.parent == root else f", {folder.parent.name}")
        print_loop(manifest, list(manifest.entries), title, running=lock_is_held(folder / "lock"))
