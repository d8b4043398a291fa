"""Child processes of a run: start, log, lock, stop, and clean up after a kill.

A child runs under a keeper that leaves none of its descendants behind. Whether a child does useful work is
judged in `drzero.ops.services` and `drzero.ops.watchdog`, not here.
"""
