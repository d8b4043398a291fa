"""Runs of an agent before it trains: what one is, its runs, and what is watched and recorded meanwhile.

Nothing here knows of training or veRL, and nothing listens but the recorder, on 127.0.0.1.
"""
