"""The loop as a table: which stages are finished (`drzero status`)."""

import time
from collections.abc import Sequence

from drzero.loop.manifest import Manifest, StageEntry
from drzero.recipe.tables import console, new_table

_STATES = {"failed": "stopped", "forgotten": "to redo", "pending": "–"}
"""What the table calls a state; the others by their own name."""


def print_loop(
    manifest: Manifest, names: Sequence[str], title: str = "self-evolution loop", *, running: bool
) -> None:
    """One row a stage: state, starts, time, tokens, figures.

    `running`: whether a loop runs now. If none does, a stage recorded as running was killed.
    """
    columns = ("stage", "state", ">starts", ">minutes", ">tokens", "figures")
    table = new_table(title, *columns)
    for name in names:
        entry = manifest.entries.get(name, StageEntry())
        state = _STATES.get(entry.state, entry.state)
        if state == "running" and not running:
            state = "killed"
        seconds = entry.seconds + (time.time() - (entry.started or 0) if state == "running" else 0)
        figures = (
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in entry.figures.items()
        )
        minutes = f"{seconds / 60:.1f}" if seconds else "–"
        tokens = f"{entry.tokens:,}" if entry.tokens else "–"
        outcome = entry.error or ", ".join(figures)
        table.add_row(name, state, str(entry.starts or "–"), minutes, tokens, outcome)
    console().print(table)
