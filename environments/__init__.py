"""Environments to train and evaluate an agent in: their interface, and the built-in ones.

    taskset = find("wordle").load()
    row = taskset.rows("train", n=1, seed=0)[0]
    episode = taskset.episode(row)

The modules here are the interface, each folder is an environment, and `registry` finds them. Nothing here
knows veRL or a model: `verl_ext.episodes` plays an episode with one.
"""
