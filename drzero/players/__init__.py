"""Plays episodes whose conversation somebody else holds: an agent of your own, or the package `verifiers`.

A taskset names its player (`Taskset.player`), and `verl_ext.rollout.environment_agent_loop` calls it for each
row. veRL's workers import this room, so it imports nothing above `verl_ext`.
"""
