"""Solved games for the warm start. The player spells its guess, since a small model knows no letters."""

import random
from collections.abc import Iterator

from environments.conversation import Message, Turn
from environments.wordle.game import Game
from environments.wordle.rules import answers, candidates, is_held_out


def demonstrations(seed: int, n: int) -> Iterator[list[Message]]:
    """`n` conversations of solved games, with the player's messages."""
    rng = random.Random(seed)
    secrets = [word for word in answers() if not is_held_out(word)]
    made = 0
    while made < n:
        if messages := _game(rng.choice(secrets), rng):
            made += 1
            yield messages


def written(guess: str) -> str:
    """A guess as the player writes it."""
    return f"<think>{' '.join(guess.upper())}</think>\n<guess>[{guess}]</guess>"


def _game(secret: str, rng: random.Random) -> list[Message] | None:
    game = Game(secret, turns=6)
    messages, left = list(game.messages()), list(answers())
    while True:
        guess = rng.choice(left)
        messages.append({"role": "assistant", "content": written(guess)})
        answered = game.respond(Turn(written(guess)))
        if answered is None:
            return messages if game.found else None
        messages += answered
        left = candidates(left, game.history[-1:])
