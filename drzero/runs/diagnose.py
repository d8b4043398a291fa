"""`drzero diagnose RUN_DIR`: how a run ended and why, read from its logs and samples alone.

    drzero diagnose outputs/checkpoints/challenger_iter1

`drzero top RUN_DIR` shows a run that still goes on. docs/failures.md lists symptoms.
"""

from collections.abc import Sequence

from drzero.ops.notices import one_line
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.tables import console
from drzero.runs.run_folder import named_run
from drzero.stages.flight_recorder import dumps_of
from drzero.stages.watch import CAUSES


def run_diagnose(arguments: Sequence[str]) -> None:
    """Print how the run in a folder ended. Raises NotARun for a folder without a run."""
    run = named_run(arguments, "diagnose")
    death = examine(run, CAUSES)
    out = console()
    state = death.state
    if run.is_running:
        state = "still running" if state == "cut off" else f"still running; until now: {state}"
    out.print(f"{arguments[0]}: {state}", soft_wrap=True)
    if run.is_running and death.state != "stalled":
        return
    log = run.folder / "logs" / f"{death.culprit}.log"
    dumps = dumps_of(run.folder)
    lines = [
        ("what", death.sentence),
        ("culprit", death.culprit),
        ("first error", death.first_error),
        ("what to do", death.advice),
        *zip(("evidence", *[""] * len(death.evidence)), death.evidence, strict=False),
        *death.facts.items(),
        ("log", str(log) if log.is_file() else None),
        ("collectives", f"torchfrtrace {dumps} -p rank_" if dumps else None),
    ]
    for name, text in lines:
        if text:
            out.print(one_line(f"  {name:<14}{text}"), soft_wrap=True)
