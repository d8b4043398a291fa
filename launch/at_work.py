"""Is another launch of the same run at work? Two at once would pay twice and write the same checkpoints.

    if (told := other_at_work(state, calls, launch="", now=time.time())): raise LaunchError(told)

Asked at the client before anything is asked for, and once more in the container, ahead of the stage: a run is
started twice by a person who has lost the terminal of a detached launch, and by Modal, which starts an app
function anew whose container it has taken away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.spend import EVERY_S, Call

SILENT_S = 5 * EVERY_S
"""A call that has not been heard of for so long is not at work any more."""
GOES_ON = "continue"
"""State of a call's outcome after which its successor goes on."""


def other_at_work(
    state: Mapping[str, Any] | None, calls: Sequence[Call], launch: str, now: float
) -> str | None:
    """What to say when the run's `state.json` and its calls show another launch at work; else None."""
    if state is None or state["launch"] == launch:
        return None
    outcome = state["outcome"]
    if outcome is not None and outcome["state"] != GOES_ON:
        return None
    silent = now - max((call.until for call in calls), default=0.0)
    if silent > SILENT_S:
        return None
    app = state["app"] or "APP_ID"
    return (
        f"another launch of this run was at work {max(silent, 0.0):.0f} s ago: watch it with --action logs "
        f"--follow, or end it with `modal app stop {app}` and start again {SILENT_S / 60:.0f} minutes later"
    )
