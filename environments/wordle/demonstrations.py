"""Games of a player that heeds every colour, for the warm start of a small model.

    for messages in demonstrations(seed=0, n=1200): …

The player guesses a common word that agrees with all colours so far, whichever; it writes its letters one by
one first, since a small model knows words as a whole and not how they are spelled. Held-out words are guessed
like any other, but are never the secret.
"""

import random
from collections.abc import Iterator

from environments.conversation import Message, Turn
from environments.wordle.game import Game
from environments.wordle.rules import candidates
from environments.wordle.words import answers, is_held_out


def demonstrations(seed: int, n: int, turns: int = 6) -> Iterator[list[Message]]:
    """`n` conversations of solved games, the messages of the player included."""
    rng = random.Random(seed)
    secrets = [word for word in answers() if not is_held_out(word)]
    made = 0
    while made < n:
        if messages := _game(rng.choice(secrets), turns, rng):
            made += 1
            yield messages


def written(guess: str) -> str:
    """A guess as the player writes it."""
    return f"<think>{' '.join(guess.upper())}</think>\n<guess>[{guess}]</guess>"


def _game(secret: str, turns: int, rng: random.Random) -> list[Message] | None:
    """A game's messages; None where the secret was not found."""
    game = Game(secret, turns)
    messages = list(game.messages())
    left = list(answers())
    while True:
        guess = rng.choice(left)
        messages.append({"role": "assistant", "content": written(guess)})
        answered = game.respond(Turn(written(guess)))
        if answered is None:
            return messages if game.found else None
        messages += answered
        left = candidates(left, game.history[-1:])
