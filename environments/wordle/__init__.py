"""Wordle: a secret word of five letters, six guesses, and after each the colours of its letters.

    drzero train env=wordle model=demo-policy steps=20
    drzero evaluate env=wordle model=demo-policy num_examples=50

`rules` has the colours, `words` the lists, `game` the episode, its reward and the split, `demonstrations`
games of a player that heeds every colour, for a warm start.
"""

from environments.wordle.game import Wordle


def load(turns: int = 6) -> Wordle:
    """The taskset, with so many guesses a game."""
    return Wordle(turns)
