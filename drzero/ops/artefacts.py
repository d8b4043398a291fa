"""Announces complete files, so that a supervisor can save them while the run continues (docs/stopping.md).

    announce(folder / "manifest.json")      # after the rename, never before

Each call adds a line to `$DRZERO_ARTEFACT_LOG`, if set: `{"path": "/checkpoints/…", "time": unix seconds}`.
"""

import json
import os
import time
from pathlib import Path

LOG_VARIABLE = "DRZERO_ARTEFACT_LOG"


def announce(path: Path) -> None:
    """Log the file or folder at `path` in one append. Raises OSError."""
    log = os.environ.get(LOG_VARIABLE)
    if not log:
        return
    line = json.dumps({"path": os.path.abspath(path), "time": time.time()}) + "\n"
    with open(log, "a", encoding="utf-8") as file:
        file.write(line)
