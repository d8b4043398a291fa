"""Answers that a question gives away, and answers that only look like it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.leaks import given_away, words_of

GIVEN_AWAY = [
    ("Who leads Oslo, Vell?", "Vell"),
    ("Who leads \u041e\u0455l\u043e?", "Oslo"),  # Cyrillic
    ("Who leads \u039fsl\u03bf?", "Oslo"),  # Greek
    ("Who leads Ｏｓｌｏ?", "Oslo"),
    ("Who leads O\u200bs\u200bl\u00ado?", "Oslo"),
    ("Who leads O\u0301s\u0301lo?", "Oslo"),
    ("Who leads O s l o now?", "Oslo"),
    ("Who leads O-s-l-o?", "The Oslo"),
    ("Who leads A n n a V e l l?", "Anna Vell"),
    ("Who leads olsO?", "Oslo"),
    ("Who is lleV annA?", "Anna Vell"),
    ("Who is annA lleV?", "Anna Vell"),
    ("Who leads Oslo: Vell, Anna?", "Anna Vell"),
    ("Where was Vell born?", "Anna Vell"),
    ("Which Parisian square is it?", "Paris"),
    ("Which apple is grown there?", "apples"),
    ("Which cherries grow there?", "cherry"),
    ("What happened in MCMXIV?", "1914"),
    ("What happened in nineteen fourteen?", "1914"),
    ("What happened in eighteen hundred and five?", "1805"),
    ("What happened in nineteen oh-five?", "1905"),
    ("What happened in one thousand six hundred and forty-two?", "1642"),
    ("What happened in two thousand and five?", "2005"),
    ("挪威的首都奥斯陆在哪里？", "奥斯陆"),
]
HIDDEN = [
    ("Which craft did the starting guild practise?", "art"),
    ("Which grain is grown in Oatlands?", "oat"),
    ("Who was the wife of Bill Clinton?", "Hillary Clinton"),
    ("Who was the father of Johann Christian Bach?", "Johann Sebastian Bach"),
    ("Which firm does the founder of Kelm House work for?", "Drosken House"),
    ("What did J. R. R. Tolkien teach?", "English"),
    ("When did World War II end?", "1945"),
    ("How many of the nineteen crossed?", "14"),
    ("Which town is it?", "?!"),
]


@pytest.mark.parametrize(("question", "answer"), [*GIVEN_AWAY, *HIDDEN])
def test_an_answer_that_is_given_away_is_found(question, answer):
    assert (given_away(question, answer) is not None) == ((question, answer) in GIVEN_AWAY)


@given(st.text(max_size=30), st.text(max_size=10))
def test_any_two_texts_can_be_compared(question, answer):
    assert (given_away(f"{question} {answer}.", answer) is not None) or not words_of(answer)
