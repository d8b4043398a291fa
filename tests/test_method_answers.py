"""Normalisation, exact match, F1 and tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.answers import (
    after_thinking,
    contains_answer,
    exact_match,
    extract_last_tag,
    f1,
    normalize_answer,
)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("U.S.A.", "usa"),
        ("an apple a day", "apple day"),
        ("theatre another", "theatre another"),
        ("\tÉmile\n Zola ", "émile zola"),
        ("The", ""),
    ],
)
def test_normal_form_is_squads(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@given(st.text())
def test_normalising_twice_changes_nothing_more(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@given(st.text(alphabet="ab the.,-", max_size=30))
def test_normal_form_has_no_article_no_punctuation_and_single_spaces(text: str) -> None:
    words = normalize_answer(text).split(" ")
    assert not {"a", "an", "the"} & set(words)
    assert not set(".,-") & set("".join(words))
    assert words == [""] or "" not in words


def test_exact_match_needs_one_of_the_targets() -> None:
    assert exact_match("the Beatles.", ["Queen", "Beatles"])
    assert not exact_match("Beatles band", ["Queen", "Beatles"])


def test_no_prediction_matches_nothing_not_even_an_empty_target() -> None:
    assert not exact_match(None, ["", "the"])
    assert f1(None, ["x"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "target", "expected"),
    [
        ("a b c", "b c d", 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),
        ("x", "y", 0.0),
        ("x x", "x", 2 / 3),
        ("", "", 0.0),
    ],
)
def test_f1_is_the_harmonic_mean_of_token_precision_and_recall(
    prediction: str, target: str, expected: float
) -> None:
    assert f1(prediction, [target]) == pytest.approx(expected)


def test_f1_takes_the_best_target() -> None:
    assert f1("red fox", ["blue whale", "red fox"]) == 1.0


def test_an_answer_is_contained_on_word_boundaries_only() -> None:
    assert contains_answer("He moved to New  York, in 1950.", "new york")
    assert not contains_answer("the 1950s", "1950")
    assert not contains_answer("anything", "the")


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_text_contains_what_is_written_into_it(before: str, answer: str, after: str) -> None:
    assert contains_answer(f"{before} {answer} {after}", answer) == bool(normalize_answer(answer))


def test_the_last_closed_tag_counts() -> None:
    assert extract_last_tag("<answer>one</answer> <answer> two </answer> <answer>three", "answer") == "two"


def test_an_opening_tag_left_open_does_not_swallow_the_next_block() -> None:
    assert extract_last_tag("<answer>draft <answer>final</answer>", "answer") == "final"


@pytest.mark.parametrize("text", ["", "<answer>", "</answer>", "</answer><answer>", "<question>x</question>"])
def test_without_a_closed_tag_there_is_none(text: str) -> None:
    assert extract_last_tag(text, "answer") is None


def test_tags_inside_the_thinking_do_not_count() -> None:
    assert after_thinking("<think><answer>x</answer></think>So: y") == "So: y"


def test_text_without_thinking_is_kept_whole() -> None:
    assert after_thinking("plain") == "plain"
