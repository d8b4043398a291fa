"""Child processes of a run: start, log, lock, stop, and clean up after a kill."""
