"""The live view of a run at one moment, as a picture for the docs.

    python -m bench.console_picture outputs/checkpoints/demo docs/console.svg --at 0.75

It draws the run's own files with the live view's code, without later lines. Paths start at the run's folder.
"""

import argparse
import io
import re
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from drzero.ops.notices import notice_of
from drzero.ops.records import EVENTS_FILE, SAMPLES_FILE, append_json_lines, read_json_lines
from drzero.recipe.compose import RESOLVED
from drzero.runs.view.run_state import RunFacts, RunFiles, shown_time
from drzero.runs.view.screen import screen

_WIDTH, _HEIGHT = 100, 30
_TIMED = (f"logs/{EVENTS_FILE}", "heartbeats.jsonl", SAMPLES_FILE)


def draw(run: Path, target: Path, share: float) -> None:
    """Write the picture of a run folder when that share of its start had passed."""
    config = OmegaConf.load(run / f"{RESOLVED}.yaml")
    assert isinstance(config, DictConfig)
    beats = read_json_lines(run / "heartbeats.jsonl")
    first, last = beats[0]["time"], beats[-1]["time"]
    now = first + (last - first) * share
    with tempfile.TemporaryDirectory() as folder:
        _copy_until(run, Path(folder), now)
        files = RunFiles(Path(folder), RunFacts.of(config))
        _, events = files.poll()
        for event in events:
            event |= {
                key: event[key].replace(f"{config.run.dir}/", "") for key in ("text", "log") if key in event
            }
        notices = [notice for event in events if (notice := notice_of(event))]
        console = Console(record=True, width=_WIDTH, force_terminal=True, file=io.StringIO())
        console.print(screen(files.state, notices, now, _WIDTH, _HEIGHT))
    picture = console.export_svg(title=f"drzero, {shown_time(now)}")
    # rich's template loads a font from a server.
    target.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL), encoding="utf-8")


def _copy_until(run: Path, target: Path, now: float) -> None:
    """Copy everything the run had written by then. A step's metrics count once its weights are synced."""
    records: dict[str, list[dict[str, Any]]] = {
        name: [record for record in read_json_lines(run / name) if record["time"] <= now] for name in _TIMED
    }
    ended = {beat["step"] - 1 for beat in records["heartbeats.jsonl"] if beat["phase"] in ("rollout", "done")}
    for path in sorted((run / "metrics").glob("attempt_*.jsonl")):
        records[f"metrics/{path.name}"] = [r for r in read_json_lines(path) if r["step"] in ended]
    for name, kept in records.items():
        append_json_lines(target / name, *kept)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--at", type=float, default=0.75)
    words = parser.parse_args()
    draw(words.run, words.target, words.at)


if __name__ == "__main__":
    main()
