"""BFCL, the Berkeley Function Calling Leaderboard, as two environments. No text of a model is evaluated.

The package `bfcl-eval` supplies data, classes, literal converters and the comparison of states. Its scorer
needs numpy 1.26.4 and the clients of a dozen vendors, so `bench/bfcl_scorer.py` compares ours with it.
"""
