"""BFCL, the Berkeley Function Calling Leaderboard, as two environments.

`single_turn` asks for the right calls, `multi_turn` for the right state after a conversation. Both: `source`
(rows from the package `bfcl-eval` or a file), `schema` (its function documents as tools). `match` compares
calls, `replay` plays them on the package's own classes. No string of a model is ever evaluated.

What is read of the package: its data, the converters of Java and JavaScript literals, the classes that the
conversations are about, and the comparison of their states. Its own scorer needs numpy 1.26.4 and the clients
of a dozen vendors; `bench/bfcl_scorer.py` holds ours against it.
"""
