"""Wordle: the colours of repeated letters, the reward by its parts, and answers that are held out."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.conversation import Turn
from environments.registry import find
from environments.wordle.game import Game, read_guess
from environments.wordle.rules import (
    GREEN,
    GREY,
    YELLOW,
    answers,
    candidates,
    colours,
    guesses,
    is_held_out,
)

# Few letters, so that they repeat.
WORD = st.text("abc", min_size=5, max_size=5)


@given(WORD, WORD)
def test_green_is_where_both_words_have_the_letter_and_nowhere_else(guess, secret):
    seen = colours(guess, secret)
    assert [colour == GREEN for colour in seen] == [a == b for a, b in zip(guess, secret, strict=True)]


@given(WORD, WORD)
def test_of_letters_out_of_place_the_first_ones_are_yellow(guess, secret):
    seen = colours(guess, secret)
    for letter in set(guess):
        out_of_place = [c for a, c in zip(guess, seen, strict=True) if a == letter and c != GREEN]
        assert out_of_place == sorted(out_of_place, reverse=True)  # Y before X


def test_a_game_cut_short_before_its_first_turn_has_no_reward():
    assert Game("crane", 6).score().reward == 0


@given(WORD, WORD)
def test_a_letter_is_coloured_as_often_as_both_words_have_it(guess, secret):
    seen = colours(guess, secret)
    coloured = Counter(letter for letter, colour in zip(guess, seen, strict=True) if colour != GREY)
    assert coloured == Counter(guess) & Counter(secret)


@given(WORD, WORD, WORD)
def test_the_secret_agrees_with_every_guess_and_a_guess_only_with_itself(guess, other, secret):
    history = [(word, colours(word, secret)) for word in (guess, other)]
    assert secret in candidates([guess, other, secret], history)
    assert (colours(guess, secret) == GREEN * 5) == (guess == secret)
    assert YELLOW not in colours(guess, guess)


def turn(word):
    return Turn(f"<guess>[{word}]</guess>")


def game(secret, *turns, limit=6):
    """A game played so far."""
    played = Game(secret, limit)
    for each in turns:
        played.respond(each)
    return played


def test_a_found_secret_is_worth_more_the_earlier_it_is_found():
    first, third = (game("crane", *map(turn, words)) for words in (["crane"], ["slate", "grade", "crane"]))
    assert dict(first.score().parts) == {"exact": 1.0, "partial": 0.0, "turns": 1.0, "format": 0.2}
    assert dict(third.score().parts) == pytest.approx(
        {"exact": 1.0, "partial": 0.0, "turns": 1 / 3, "format": 0.2}
    )
    assert first.score().success and first.score().reward == pytest.approx(2.2)


def test_a_wrong_guess_is_worth_its_colours_and_only_the_last_one_counts():
    played = game("crane", turn("crate"), turn("nacho"))  # X? n Y, a Y, c Y, h X, o X
    assert played.history == [("crate", "GGGXG"), ("nacho", "YYYXX")]
    assert dict(played.score().parts) == pytest.approx(
        {"exact": 0.0, "partial": 0.3, "turns": 0.0, "format": 0.2}
    )
    assert not played.score().success


def test_the_colours_are_shown_under_the_letters_with_the_guesses_left():
    (shown,) = Game("crane", 6).respond(turn("Crate")) or ()
    assert shown == {"role": "user", "content": "C R A T E\nG G G X G\n5 guesses left."}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("I would say crane.", "There was no guess: write <guess>[word]</guess> with a word of 5 letters."),
        ("<guess>crane</guess>", "There was no guess: write <guess>[word]</guess> with a word of 5 letters."),
        ("<guess>[cranes]</guess>", "A guess has 5 letters, cranes has 6."),
        ("<guess>[qwert]</guess>", "qwert is not in the word list."),
        ("<guess>[slate]</guess>", "You have guessed slate before."),
    ],
)
def test_what_is_no_guess_is_told_and_costs_a_turn(text, said):
    played = game("crane", turn("slate"))
    assert played.respond(Turn(text)) == [{"role": "user", "content": f"{said}\n4 guesses left."}]
    assert [word for word, _ in played.history] == ["slate"]


def test_a_game_is_over_with_the_secret_or_the_last_turn():
    assert Game("crane", 6).respond(turn("crane")) is None
    assert game("crane", turn("slate"), limit=2).respond(turn("grade")) is None


@pytest.mark.parametrize(
    ("text", "guess", "keeps"),
    [
        ("<guess>[crane]</guess>", "crane", True),
        ("<think>[slate]? <guess>[slate]</guess> no</think> <guess>[ Crane ]</guess>", "crane", True),
        ("<guess>[slate]</guess> <guess>[crane]</guess>", "crane", False),
        ("<guess>[cranes]</guess>", "cranes", False),
        ("<guess>[crane]</guess> <guess>[cra", "crane", False),
        ("crane", None, False),
    ],
)
def test_the_format_is_one_guess_after_the_thinking(text, guess, keeps):
    assert read_guess(text) == (guess, keeps)


def test_every_answer_may_be_guessed_and_has_five_letters():
    assert set(answers()) <= guesses() and len(set(answers())) == len(answers()) > 500
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in guesses())


def test_a_fifth_of_the_answers_is_held_out_of_training():
    taskset = find("vf_wordle").load()
    train, held_out = (
        {row.data["secret"] for row in taskset.rows(split, None, 0)} for split in ("train", "eval")
    )
    assert train | held_out == set(answers()) and not train & held_out
    assert all(map(is_held_out, held_out)) and len(held_out) / len(answers()) == pytest.approx(0.2, abs=0.04)


def test_a_seed_always_gives_the_same_rows_and_another_one_others():
    taskset = find("wordle").load()
    assert taskset.rows("eval", 50, 1) == taskset.rows("eval", 50, 1) != taskset.rows("eval", 50, 2)
    assert len(taskset.rows("eval", 50, 1)) == 50
