"""Wordle: a secret word of five letters, and six guesses. Unlike TextArena's, this one runs offline.

drzero train env=wordle model=demo-policy steps=20
"""

from environments.wordle.game import Wordle


def load(turns: int = 6) -> Wordle:
    """The taskset, with this many guesses a game."""
    return Wordle(turns)
