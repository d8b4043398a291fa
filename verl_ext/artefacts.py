"""Announces files that are complete on disk, so that a supervisor can save them while the run continues.

    announce(folder / "manifest.json")      # after the rename, never before

Needed where the disk does not outlive the run: its supervisor names a file in `DRZERO_ARTEFACT_LOG`, to which
every complete checkpoint, rollout dump, manifest, result, export and data file adds a line:

    {"path": "/checkpoints/solver_iter1/global_step_10", "time": unix seconds}

A line says nothing about the path's neighbours (docs/stopping.md). Free of veRL: `pipeline` announces what
`data` and `search` have written.
"""

import json
import os
import time
from pathlib import Path

LOG_VARIABLE = "DRZERO_ARTEFACT_LOG"


def announce(path: Path) -> None:
    """Log that the file or folder at `path` is complete on disk; without the variable do nothing.

    Any number of processes may announce to one file: a line is one append. Raises OSError when the file
    cannot be written, since the caller's work would then be lost with the machine.
    """
    log = os.environ.get(LOG_VARIABLE)
    if not log:
        return
    line = json.dumps({"path": os.path.abspath(path), "time": time.time()}) + "\n"
    with open(log, "a", encoding="utf-8") as file:
        file.write(line)
