"""A game of Wordle as an episode, with the reward of TextArena's Wordle in the library verifiers.

- `exact`: 1 for finding the secret, and `turns`: 1 / turns taken
- `partial`: otherwise 0.2 for each green and 0.1 for each yellow letter of the last guess
- `format`: 0.2 times the share of turns with exactly one `<guess>[word]</guess>` of five letters
"""

import random
import re
from collections.abc import Sequence

from environments.conversation import Message, Turn, user_message
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score
from environments.taskset import Taskset
from environments.turn_text import after_thinking
from environments.wordle.rules import GREEN, LENGTH, YELLOW, answers, colours, guesses, is_held_out

GREEN_WORTH, YELLOW_WORTH, FORMAT_WORTH = 0.2, 0.1, 0.2

_GUESS = re.compile(r"<guess>\s*\[\s*([A-Za-z]+)\s*\]\s*</guess>")


def read_guess(text: str) -> tuple[str | None, bool]:
    """The last guess after the thinking, in lower case, and whether the turn keeps the format."""
    said = after_thinking(text)
    found = _GUESS.findall(said)
    keeps = len(found) == 1 and said.count("<guess>") == 1 and len(found[0]) == LENGTH
    return found[-1].lower() if found else None, keeps


class Game(Episode):
    """One secret. The game ends when it is found, or after the last turn."""

    def __init__(self, secret: str, turns: int) -> None:
        self.secret, self.turns = secret, turns
        self.history: list[tuple[str, str]] = []  # valid guesses and colours
        self._taken = self._in_format = 0

    def messages(self) -> Sequence[Message]:
        """The rules."""
        return [
            user_message(
                f"Play Wordle: find the secret word of {LENGTH} letters in at most {self.turns} guesses. "
                "Write a guess as <guess>[word]</guess>. Under the letters of each guess you are shown G for "
                "a letter in its place, Y for one that is elsewhere in the word, X for one that is not in it."
            )
        ]

    def respond(self, turn: Turn) -> Sequence[Message] | None:
        """The colours of the guess or its fault, or None at the end of the game."""
        guess, keeps = read_guess(turn.text)
        self._taken += 1
        self._in_format += keeps
        shown = self._fault(guess)
        if guess is not None and shown is None:
            seen = colours(guess, self.secret)
            self.history.append((guess, seen))
            shown = f"{' '.join(guess.upper())}\n{' '.join(seen)}"
        left = self.turns - self._taken
        if self.found or not left:
            return None
        return [user_message(f"{shown}\n{left} {'guess' if left == 1 else 'guesses'} left.")]

    @property
    def found(self) -> bool:
        """Whether the last guess was the secret."""
        return bool(self.history) and self.history[-1][0] == self.secret

    def score(self) -> Score:
        """The reward and its parts, also of an unfinished game."""
        seen = self.history[-1][1] if self.history and not self.found else ""
        taken = max(self._taken, 1)
        parts = {
            "exact": float(self.found),
            "partial": GREEN_WORTH * seen.count(GREEN) + YELLOW_WORTH * seen.count(YELLOW),
            "turns": 1 / taken if self.found else 0.0,
            "format": FORMAT_WORTH * self._in_format / taken,
        }
        return Score(sum(parts.values()), self.found, parts)

    def _fault(self, guess: str | None) -> str | None:
        """Why a guess does not count. It uses up its turn."""
        if guess is None:
            return f"There was no guess: write <guess>[word]</guess> with a word of {LENGTH} letters."
        if len(guess) != LENGTH:
            return f"A guess has {LENGTH} letters, {guess} has {len(guess)}."
        if guess in (word for word, _ in self.history):
            return f"You have guessed {guess} before."
        return None if guess in guesses() else f"{guess} is not in the word list."


class Wordle(Taskset):
    """A row is a secret: a common word. A fifth of them is held out."""

    filters_groups = True
    held_out = "A fifth of the answers, chosen by their hash, are no secret of any training row."

    def __init__(self, turns: int) -> None:
        if not 1 <= turns <= 20:
            raise ValueError(f"a game has 1 to 20 turns, not {turns}")
        self.max_turns = turns

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """The secrets of a split, shuffled by the seed."""
        words = [word for word in answers() if is_held_out(word) == (split == "eval")]
        random.Random(seed).shuffle(words)
        return [Row(f"{split}-{word}", {"secret": word}) for word in words[:n]]

    def episode(self, row: Row) -> Game:
        """A game with the row's secret."""
        return Game(str(row.data["secret"]), self.max_turns)
