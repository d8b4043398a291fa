"""One page for a run: what ran, how it went, and every trajectory.

- `write` makes `report.html`, `watch` serves it while the run continues, `page` puts the file together.
- `trajectories` reads conversations, `figures` adds them up by step, `charts` draws, `checklist` judges.
- `reasons` explains a reward, `conversation` shows a trajectory, `table` packs them, `loop` is for loops.
- `inspect_log` writes the same trajectories for Inspect AI.
"""
