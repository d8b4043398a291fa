"""`--action status`, in its container: every launch with its state and cost, then the loop as a table.

python -m launch.status
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from rich import box
from rich.console import Console
from rich.table import Table

from launch.at_work import SILENT_S
from launch.spend import Spend
from launch.volumes import LAUNCHES, place


def main() -> int:
    """Print both tables; 0 also where nothing was launched yet."""
    folders = sorted(path.parent for path in (place("checkpoints") / LAUNCHES).glob("*/state.json"))
    if not folders:
        print("nothing was launched on this volume yet")
        return 0
    table = Table(title="launches", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("run", "action", "state", "calls", "hours", "usd", "app"):
        table.add_column(column, justify="right" if column in ("calls", "hours", "usd") else "left")
    for folder in folders:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        spend = Spend(folder)
        hours = sum(call.until - call.began for call in spend.calls) / 3600
        table.add_row(
            folder.name,
            state["action"],
            _state(state, spend),
            str(len(spend.calls)),
            f"{hours:.2f}",
            f"{spend.usd:.2f}",
            state["app"] or "–",
        )
    Console(width=118).print(table)
    if not (place("checkpoints") / "evolve" / "manifest.json").is_file():
        return 0
    roots = [f"paths.{kind}={place(kind)}" for kind in ("corpus", "checkpoints")]
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "pipeline.cli", "status", *roots], check=False).returncode


def _state(state: dict[str, object], spend: Spend) -> str:
    outcome = state["outcome"]
    if isinstance(outcome, dict):
        return str(outcome["state"])
    silent = time.time() - max((call.until for call in spend.calls), default=0.0)
    return f"silent for {silent / 60:.0f} min" if silent > SILENT_S else "running"


if __name__ == "__main__":
    sys.exit(main())
