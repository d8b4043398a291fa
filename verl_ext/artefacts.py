"""Says which files are whole on disk, for whoever keeps a run's results safe while it goes on.

    announce(folder / "manifest.json")      # after the rename, never before

Where the disk outlives the run there is nothing to do. Where it does not (a container, whose volume has to be
committed), whoever starts the run names a file in `DRZERO_ARTEFACT_LOG`; every complete checkpoint, rollout
dump, manifest, result, export and data file then adds a line to it, and the supervisor outside commits:

    {"path": "/checkpoints/solver_iter1/global_step_10", "time": unix seconds}

A line says that this path is whole, and nothing about its neighbours. The function lives here and not in
`ops/`, because the trainer calls it too, and what veRL's processes import must not import `ops`
(CONTRIBUTING.md); `pipeline` announces what `data` and `search` have written. Free of veRL.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

LOG_VARIABLE = "DRZERO_ARTEFACT_LOG"


def announce(path: Path) -> None:
    """Say that the file or folder at `path` is whole on disk; without the variable do nothing.

    Any number of processes may announce to one file: a line is one append. Raises OSError when the file
    cannot be written, since the caller's work would then be lost with the machine.
    """
    log = os.environ.get(LOG_VARIABLE)
    if not log:
        return
    line = json.dumps({"path": os.path.abspath(path), "time": time.time()}) + "\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
