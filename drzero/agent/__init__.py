"""The trained agent in use: it searches your index, answers, and shows what it read.

`ask` is the terminal's way in, `serve` the service's. Both play `SolverAgent` as `evaluate` does.
"""
