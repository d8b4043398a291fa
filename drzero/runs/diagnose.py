"""`drzero diagnose RUN_DIR`: how a run ended and why, from its logs and samples alone.

    drzero diagnose outputs/checkpoints/challenger_iter1

`drzero top RUN_DIR` shows one that still runs; docs/debugging.md lists symptoms.
"""

from collections.abc import Sequence

from rich.console import Console

from drzero.ops.process.lock import lock_is_held
from drzero.ops.watchdog.post_mortem import examine
from drzero.runs.run_folder import named_run
from drzero.stages.flight_recorder import dumps_of
from drzero.stages.watch import CAUSES


def run_diagnose(arguments: Sequence[str]) -> None:
    """Print how the run in a folder ended; raises NotARun for a folder without a run."""
    folder = named_run(arguments, "diagnose").folder
    death, running = examine(folder, CAUSES), lock_is_held(folder / "lock")
    console = Console(width=110, highlight=False)
    state = death.state
    if running:  # without an end it is not cut off
        state = "still running" if state == "cut off" else f"still running; until now: {state}"
    console.print(f"{arguments[0]}: {state}", markup=False, soft_wrap=True)
    if running and death.state != "stalled":
        return
    log = folder / "logs" / f"{death.culprit}.log"
    lines = [
        ("what", death.sentence),
        ("culprit", death.culprit),
        ("first error", death.first_error),
        ("what to do", death.advice),
        *zip(("evidence", *[""] * len(death.evidence)), death.evidence, strict=False),
        *death.facts.items(),
        ("log", str(log) if log.is_file() else None),
        ("collectives", f"torchfrtrace {dumps} -p rank_" if (dumps := dumps_of(folder)) else None),
    ]
    for name, text in lines:
        if text:
            console.print(f"  {name:<14}{text}", markup=False, soft_wrap=True)
