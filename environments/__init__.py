"""Environments that an agent is trained and evaluated in: what one is, and those that come along.

What one is: `taskset`, `row`, `episode`, `conversation`, `call`, `score`, `fault`; where they are found:
`registry`. Each folder here is an environment. Nothing of veRL, and no model: `verl_ext.episodes` plays an
episode with one.

    taskset = find("wordle").load()
    row = taskset.rows("train", n=1, seed=0)[0]
    episode = taskset.episode(row)
"""
