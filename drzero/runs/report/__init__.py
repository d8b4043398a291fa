"""One page for a run: what ran, how it went, and every trajectory.

`write` makes `report.html` of a run's folder, `watch` serves it. `run_folder` reads the folder,
`trajectories` its conversations, `loop` what the self-evolution loop left. `figures` adds up by step,
`charts` draws, `checklist` judges, `reasons` explains a reward, `conversation` shows one, `table` packs
them, `page` puts all into one file. `inspect_log` writes the same trajectories for another viewer. Nothing
here changes a run.
"""
