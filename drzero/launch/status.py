"""`python -m drzero.launch.status`: every launch with state and cost, then the loop's table."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drzero.launch.request import Request
from drzero.launch.spend import SILENT_S, Spend
from drzero.launch.volumes import LAUNCHES, folder_overrides, place
from drzero.ops.records import RunRecords
from drzero.recipe.metrics import read_metrics
from drzero.recipe.tables import console, new_table
from verl_ext.checkpoints import saved_step

_SCORES = {
    "drzero/reward/score": "reward",
    "drzero/reward/em": "exact match",
    "drzero/reward/success": "solved",
}


def main() -> int:
    """Print both tables. Returns 0 even if nothing was launched yet."""
    folders = sorted(path.parent for path in (place("checkpoints") / LAUNCHES).glob("*/state.json"))
    if not folders:
        print("nothing was launched on this volume yet")
        return 0
    table = new_table("launches", "run", "action", "state", ">calls", ">hours", ">usd", "app")
    reasons = []
    for folder in folders:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        spend = Spend(folder)
        silent = time.time() - max((call.until for call in spend.calls), default=float("-inf"))
        shown = f"silent for {silent / 60:.0f} min" if silent > SILENT_S else "running"
        if state["outcome"] is not None:
            shown = state["outcome"]["state"]
            if shown == "failed":
                reasons.append(state["outcome"]["message"])
        if failed := sum(call.failed_commits for call in spend.calls):
            shown += f", {failed} failed commits"
        hours = sum(call.until - call.began for call in spend.calls) / 3600
        amounts = [str(len(spend.calls)), f"{hours:.2f}", f"{spend.usd:.2f}"]
        table.add_row(folder.name, state["action"], shown, *amounts, state["app"] or "–")
    console().print(table)
    for reason in reasons:
        console().print(reason, soft_wrap=True)
    if not (place("checkpoints") / "evolve" / "manifest.json").is_file():
        return 0
    sys.stdout.flush()
    command = [sys.executable, "-m", "drzero.cli", "status", *folder_overrides()]
    return subprocess.run(command, check=False).returncode


def status_line(request: Request, usd: float, seconds: float) -> str:
    """`step 12, reward 0.54, checkpoint of step 10, 1 h 05 min, $13.20 of $130.00`."""
    minutes = int(seconds // 60)
    duration = f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
    limit = request.compute.max_usd
    cost = f"${usd:.2f}" + (f" of ${limit:.2f}" if limit else "")
    try:
        progress = [*_progress(request), *_stalls(request, time.time() - seconds)]
    except (OSError, ValueError) as error:
        # The stage may be writing these files right now, which is no reason to end a run.
        progress = [f"no status this time: {error}"]
    return ", ".join([*progress, duration, cost])


def stall_of(request: Request, since: float) -> str | None:
    """The lasting stall that ended a run, or None. Stalls before `since` (Unix time) do not count."""
    lasting = [(run, stall) for run in _runs(request) if (stall := RunRecords(run).lasting_stall)]
    found = [(run, stall) for run, stall in lasting if stall["time"] >= since]
    if not found:
        return None
    run, stall = max(found, key=lambda one: float(one[1]["time"]))
    page = f"{run.name}/logs/{stall['report'].rpartition('/')[2]}"
    return f"{_verdict(stall)}. {stall['advice']}. The page: --action download {page}"


def _stalls(request: Request, since: float) -> list[str]:
    events = [event for run in _runs(request) for event in RunRecords(run).events]
    stalls = [event for event in events if event["kind"] == "stall" and event["time"] >= since]
    if not stalls:
        return []
    last = max(stalls, key=lambda stall: float(stall["time"]))
    what = "stalled" if stall_of(request, since) else f"{len(stalls)} stalls so far, the last"
    return [f"{what}: {_verdict(last)}"]


def _verdict(stall: dict[str, Any]) -> str:
    return f"{stall['text']} (culprit: {stall['component']})"


def _runs(request: Request) -> list[Path]:
    """The run folders a launch writes. The loop writes one for each stage."""
    root = place("checkpoints")
    return [root / request.name] if request.action != "evolve" else list(root.glob("*_iter*"))


def _progress(request: Request) -> list[str]:
    known = [run for run in _runs(request) if (run / "metrics").is_dir()]
    folder = max(known, key=lambda run: (run / "metrics").stat().st_mtime, default=None)
    if folder is None:
        return [request.name]
    steps = read_metrics(folder)
    if not steps:
        doing = RunRecords(folder).startup
        return [f"{folder.name}: no step yet", *([doing] if doing else [])]
    step, metrics = max(steps.items())
    scores = [f"{word} {metrics[key]:.3g}" for key, word in _SCORES.items() if key in metrics]
    return [f"{folder.name}: step {step}", *scores, f"checkpoint of step {saved_step(folder)}"]


if __name__ == "__main__":
    sys.exit(main())
