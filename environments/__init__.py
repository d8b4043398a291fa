"""Environments to train and evaluate an agent in. The modules here are the interface and know no model.

taskset = find("wordle").load()
episode = taskset.episode(taskset.rows("train", n=1, seed=0)[0])    # `verl_ext.episodes` plays it
"""
