"""A stage that ends for lack of time: the error that says so, and the question before anything is started.

    require_time("merge", least_s=60)       # raises OutOfTime when less is left until DRZERO_STOP_AT

What is whole is kept, and the same command goes on from there: it is no failure. On the command line it is
exit code 75 (EX_TEMPFAIL). See docs/stopping.md and `verl_ext.stop_time`.
"""

from __future__ import annotations

from verl_ext.stop_time import seconds_left, told_left


class OutOfTime(RuntimeError):
    """A stage has ended by itself, or was not begun, because of its stop time."""


def require_time(what: str, least_s: float = 0.0) -> None:
    """Raise OutOfTime, before `what` is started, unless more than `least_s` seconds are left for it.

    Without a stop time there is always time.
    """
    left = seconds_left()
    if left > max(least_s, 0.0):
        return
    need = f", and {what} takes {least_s:.0f} s at least" if left > 0 else ""
    raise OutOfTime(f"{what} was not started: {told_left(left)}{need}; rerun with more time to go on")
