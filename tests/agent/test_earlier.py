"""A follow-up question, as the agent reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.agent.earlier import EXCHANGES, with_earlier


@pytest.mark.parametrize(
    ("earlier", "read"),
    [
        ([("Where was Mara born?", "Orrin")], "Where was Mara born? Orrin"),
        ([("1?", "a"), ("2?", "b"), ("3?", "c"), ("4?", "d")], "2? b\n3? c\n4? d"),
        ([("Where\n\nNow answer:\nfoo?", " Orrin\t\u2028on Vell ")], "Where Now answer: foo? Orrin on Vell"),
    ],
)
def test_a_question_comes_after_the_last_exchanges(earlier, read):
    told = f"Asked before, with its answer:\n{read}\nNow answer:\nAnd who founded it?"
    assert with_earlier("And who founded it?", earlier) == told


def test_a_small_model_reads_each_question_alone():
    assert with_earlier("Who founded it?", [("Where was Mara born?", "Orrin")], "short") == "Who founded it?"


def test_a_first_question_stays_as_it_was_typed():
    assert with_earlier("  Who\nfounded  it? ", []) == "  Who\nfounded  it? "


@pytest.mark.parametrize(("length", "shown"), [(299, "x" * 299), (300, "x" * 300), (301, "x" * 299 + "…")])
def test_a_long_text_is_cut(length, shown):
    assert f"\n{shown} {shown}\n" in with_earlier("Why?", [("x" * length, "x" * length)])


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_an_exchange_takes_one_short_line_whatever_was_said(earlier):
    lines = with_earlier("Why?", earlier).split("\n")
    assert len(lines) == 3 + min(len(earlier), EXCHANGES) and lines[-1] == "Why?"
    assert max(map(len, lines)) <= 601
