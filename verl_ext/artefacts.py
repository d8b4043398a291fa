"""Announces files that are complete on disk, so that a supervisor can save them while the run continues.

    announce(folder / "manifest.json")      # after the rename, never before

Use it where the disk does not outlive the run. The supervisor names a log in `DRZERO_ARTEFACT_LOG`, and every
complete checkpoint, dump, manifest, result, export and data file adds a line (docs/stopping.md):

    {"path": "/checkpoints/solver_iter1/global_step_10", "time": unix seconds}
"""

import json
import os
import time
from pathlib import Path

LOG_VARIABLE = "DRZERO_ARTEFACT_LOG"


def announce(path: Path) -> None:
    """Log that the file or folder at `path` is complete. Does nothing without the variable.

    Several processes may write to one log: a line is one append. Raises OSError if the log cannot be written,
    because the caller's work would be lost with the machine.
    """
    log = os.environ.get(LOG_VARIABLE)
    if not log:
        return
    line = json.dumps({"path": os.path.abspath(path), "time": time.time()}) + "\n"
    with open(log, "a", encoding="utf-8") as file:
        file.write(line)
