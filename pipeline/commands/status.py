"""`drzero status`: how far the self-evolution loop is, as a table.

drzero status                                        the loop under outputs/checkpoints
drzero status paths.checkpoints=/data/checkpoints    a loop elsewhere
"""

from pathlib import Path

from omegaconf import DictConfig

from ops.process.lock import lock_is_held
from pipeline.loop.manifest import Manifest
from pipeline.loop.report import print_loop


def run_status(config: DictConfig) -> None:
    """Print the table of the loop under `paths.checkpoints`; raises FileNotFoundError if there is none."""
    folder = Path(config.paths.checkpoints) / "evolve"
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"no loop has been started under {folder.parent}: start one with `drzero evolve`, or name its "
            "place with paths.checkpoints=…"
        )
    manifest = Manifest(folder / "manifest.json")
    print_loop(manifest, list(manifest.entries), running=lock_is_held(folder / "lock"))
