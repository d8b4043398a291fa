"""Phase heartbeats: one JSON line whenever the trainer enters a phase, for whoever watches over the run.

A line is `{"time": unix seconds, "step": n, "phase": "rollout"}`. The file is appended to by the trainer's
driver alone; it tells whoever looks, a person or a watchdog, what a silent trainer is busy with.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

Phase = Literal[
    "start-up",
    "rollout",
    "log-probs",
    "advantage",
    "update",
    "save",
    "weight-sync",
    "validation",
    "out-of-time",
    "done",
]


class Heartbeat:
    """Appends to one file; each line is flushed, so that it outlives a killed trainer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def beat(self, step: int, phase: Phase) -> None:
        """Say that the phase begins now."""
        self._file.write(json.dumps({"time": time.time(), "step": step, "phase": phase}) + "\n")
