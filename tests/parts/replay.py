"""A recorded run as a separate process: it writes its files again within seconds, and shows itself meanwhile.

    python tests/parts/replay.py RUN_DIR SECONDS [--shout TEXT] [--hold] [--wait | --fail]

It adds a supervisor's events itself, and appends heartbeats, metrics, samples and the trainer's events like
other processes. `--shout` adds a warning, `--hold` stops in the second update until RUN_DIR/go exists,
`--wait` never ends, and with `--fail` another start of the trainer fails. It ends like any command of
`drzero`.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from drzero import cli
from drzero.ops.console import say
from drzero.ops.process.child import Command
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE, append_json_lines
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import run_supervised
from drzero.runs.view.follow import following

RECORDED = Path(__file__).parents[1] / "recorded" / "demo"
CONFIG = {
    "run": {"dir": "demo", "name": "demo"},
    "method": "hrpo",
    "trainer": {"total_training_steps": 4},
    "machine": {"device": "cpu", "gpus": 1, "nodes": 1, "gpu": None},
    "compute": {"provider": "modal", "type": "H100", "count": 1, "cpu": 8, "memory": 65536, "region": None},
}
"""The part of a config that the view reads. The machine has a price."""
SUPERVISOR = 1
"""The recording's process id of the supervisor."""


def recorded() -> list[tuple[float, str, dict[str, Any]]]:
    """Every record with its time and file, oldest first. A metrics line has its step's last heartbeat."""
    lines = []
    for path in sorted(RECORDED.rglob("*.jsonl")):
        name = path.relative_to(RECORDED).as_posix()
        lines += [(name, json.loads(line)) for line in path.read_text().splitlines()]
    synced = {r["step"]: r["time"] for name, r in lines if r.get("phase") == "weight-sync"}
    timed = [(r.get("time") or synced[r["step"]], name, r) for name, r in lines]
    return sorted(timed, key=lambda each: each[0])


def replay(events: EventLog, folder: Path, seconds: float, shout: str | None, hold: bool) -> None:
    """Write everything within so many seconds, plus the time it is held."""
    records = recorded()
    first, last = records[0][0], records[-1][0]
    began = time.time()
    for at, name, record in records:
        due = began + (at - first) / (last - first) * seconds
        time.sleep(max(due - time.time(), 0))
        if record.get("pid") == SUPERVISOR:
            event = {key: value for key, value in record.items() if key not in ("time", "pid")}
            events.add(event.pop("kind"), event.pop("component"), event.pop("text"), **event)
            continue
        if "time" in record:
            record["time"] = time.time()
        append_json_lines(folder / name, record)
        while hold and (record.get("phase"), record.get("step")) == ("update", 2):
            time.sleep(0.05)
            hold = not (folder / "go").exists()
        if shout and record.get("phase") == "update":
            say("solver", shout, "warning")
            shout = None


FAILS = """
import sys
print("Traceback (most recent call last):")
print("  File 'a.py', line 1, in <module>")
print("ValueError: \\x1b[31mno such thing\\x1b[0m\\x1b[2J", flush=True)
sys.exit(3)
"""


def run_replay(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--shout")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--fail", action="store_true")
    words = parser.parse_args(arguments)
    config = OmegaConf.create(CONFIG | {"run": {"dir": str(words.folder), "name": "demo"}})
    logs = words.folder / "logs"
    with following(config), ServiceGroup([], events=EventLog(logs / EVENTS_FILE)) as services:
        replay(services.events, words.folder, words.seconds, words.shout, words.hold)
        while words.wait:
            time.sleep(0.1)
        if words.fail:
            command = (sys.executable, "-c", FAILS)
            trainer = Command(name="trainer", command=command, log_path=logs / "trainer.log")
            run_supervised(trainer, services)


if __name__ == "__main__":
    cli.COMMANDS["replay"] = cli.CliCommand("replay:run_replay")
    sys.exit(cli.main(["replay", *sys.argv[1:]]))
