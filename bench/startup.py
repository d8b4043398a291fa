"""CPU seconds that a command takes before it does any work: user + system time of its process tree.

    python -m bench.startup                                  # commands that need no data
    python -m bench.startup --corpus outputs/corpus          # with preflight on the demo (`drzero demo-data`)

Each command runs RUNS times, and the median counts. CPU time, not wall time, so that other programs on the
machine matter less; on a busy machine it still rises.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile

from rich.console import Console
from rich.table import Table

RUNS = 3


def commands(corpus: str | None, checkpoints: str) -> dict[str, tuple[list[str], float]]:
    """Arguments of `drzero` and the goal in CPU seconds, by name."""
    place = f"paths.checkpoints={checkpoints}"
    found = {
        "--help": (["--help"], 0.5),
        "a mistyped key": (["challenger", "data.train_batch_sise=8"], 1.5),
        "status": (["status", place], 1.5),
    }
    if corpus:
        demo = ["hardware=cpu", "model=demo-policy", "retrieval.embedder=packaged-minilm"]
        places = [f"paths.corpus={corpus}", place, "run.min_free_gb=0.1"]
        found["preflight on the demo"] = (["preflight", "challenger", *demo, *places], 6.0)
    return found


def cpu_seconds(arguments: list[str]) -> float:
    """User and system seconds of one command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "drzero.cli", *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure every command and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", help="folder of the demo's corpus")
    table = Table("drzero", "CPU s", "goal", title=f"start-up, median of {RUNS}", title_justify="left")
    with tempfile.TemporaryDirectory() as checkpoints:
        for name, (arguments, goal) in commands(parser.parse_args().corpus, checkpoints).items():
            seconds = statistics.median(cpu_seconds(arguments) for _ in range(RUNS))
            table.add_row(name, f"{seconds:.2f}", f"< {goal:g}", style=None if seconds < goal else "red")
    Console().print(table)


if __name__ == "__main__":
    main()
