"""The recipe: one command line, the stages, and the loop over them.

A stage composes a config, checks it, starts its services, runs veRL, and writes down the results. Imports run
one way: cli, commands, loop, stages, preflight, checkpoints, compose, overrides. The method, data sets and
retrieval are in `verl_ext`, `data` and `search`, process supervision is in `ops`. Nothing here imports Modal
or `launch`.
"""
