"""A run while it runs: `run_state` reads its files, `screen` draws them, `follow` shows them next to a stage.

`drzero top` draws the same from outside. Nothing here changes a run.
"""
