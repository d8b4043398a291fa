"""Wordle: a secret word of five letters, six guesses, and the colours of the letters after each.

    drzero train env=wordle model=demo-policy steps=20

TextArena's Wordle (`verifiers:textarena`) has the same reward, but needs the extra `environments` and
downloads word lists when it starts. This one runs offline, and its rules make the games of the warm start.
"""

from environments.wordle.game import Wordle


def load(turns: int = 6) -> Wordle:
    """The taskset, with this many guesses a game."""
    return Wordle(turns)
