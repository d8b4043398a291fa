"""A run while it runs, for the console: read from the run's folder, drawn on a terminal or printed as lines.

`run_state` reads what a run writes, `screen` draws it, `follow` does either next to a running stage; `drzero
top` draws the same from outside. Nothing here changes a run.
"""
