"""Wordle: a secret word of five letters, and six guesses. Unlike TextArena's, this one runs offline."""

from environments.wordle.game import Wordle


def load(turns: int = 6) -> Wordle:
    """The taskset, with this many guesses a game."""
    return Wordle(turns)
