"""BFCL, the Berkeley Function Calling Leaderboard, as two environments.

`single_turn` asks for the right calls, `multi_turn` for the right state after a conversation. `source` has
the rows, `schema` the tools, `match` compares calls, `replay` runs them on the package's own classes. No text
of a model is ever evaluated.

The package `bfcl-eval` supplies data, classes, converters of Java and JavaScript literals, and the comparison
of states. Its scorer needs numpy 1.26.4 and the clients of a dozen vendors, so `bench/bfcl_scorer.py`
compares ours with it.
"""
