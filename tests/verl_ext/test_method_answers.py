"""Normalization, exact match, F1 and tags."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.answers import (
    contains_answer,
    exact_match,
    extract_last_tag,
    f1,
    lost_in_comparison,
    normalize_answer,
    same_answer,
)

NORMAL = [("The  Eiffel Tower!", "eiffel tower"), ("U.S.A.", "usa"), ("an apple a day", "apple day")]
NORMAL += [("theatre another", "theatre another"), ("\tÉmile\n Zola ", "émile zola"), ("The", "")]


@pytest.mark.parametrize(("text", "normal"), NORMAL)
def test_normal_form_is_squads(text, normal):
    assert normalize_answer(text) == normal


@given(st.text())
def test_normalizing_twice_changes_nothing_more(text):
    once = normalize_answer(text)
    assert normalize_answer(once) == once


def test_exact_match_needs_one_of_the_targets():
    assert exact_match("the Beatles.", ["Queen", "Beatles"])
    assert not exact_match("Beatles band", ["Queen", "Beatles"])
    assert not exact_match(None, ["", "the"])


WORDLESS = [("", "The", False), ("!", "the", False), ("a", "The", False), ("The.", "the", True)]
WORDLESS += [("a", "A", True), ("an", "A", False), ("", "A", False), ("A", "Oslo", False)]
WORDLESS += [("++", "++", True), ("+", "++", False), ("", "?!", False), ("the", "?!", False)]
WORDLESS += [("", "", False)]


@pytest.mark.parametrize(("prediction", "target", "is_right"), WORDLESS)
def test_an_answer_without_other_words_is_compared_by_those_it_has(prediction, target, is_right):
    assert exact_match(prediction, [target]) == is_right == (f1(prediction, [target]) == 1.0)


NUMBERS = [("5", "-5", True, False), ("-5", "−5", False, True), ("-5 °C", "5 °C", True, False)]
NUMBERS += [("314", "3.14", True, False), ("3,14", "3.14", True, True), ("3.1400", "3.14", False, True)]
NUMBERS += [("5", ".5", True, False), ("0.5", ".5", False, True), ("1914", "1914.0", False, True)]
NUMBERS += [("19140", "1914.0", True, False), ("1914.", "1914", True, True)]
NUMBERS += [("5,000", "5000", True, True), ("5", "5,000", False, False), ("1.914", "1914", True, True)]
NUMBERS += [("1,234,567.0", "1234567", False, True), ("$5", "5", True, True), ("007", "7", False, False)]
NUMBERS += [("COVID-19", "COVID19", True, True), ("1914-1918", "19141918", True, False)]
NUMBERS += [("minus 5", "-5", False, False), ("U.S.", "us", True, True), ("1/2", "12", True, False)]
NUMBERS += [("5:30", "530", True, False), ("14/07/1789", "14.07.1789", True, True)]
NUMBERS += [("3.0 km", "3 km", False, True), ("–5 °C", "-5 °C", False, True)]
NUMBERS += [("F-16", "F 16", False, False), ("1,00,000", "100000", True, True), ("٣", "3", False, True)]
NUMBERS += [("1-0", "10", True, False), ("3.140", "3.14", False, True)]
NUMBERS += [("2.500 km", "2.5 km", False, True), ("2.500", "2500", True, True), ("C", "C++", True, True)]
NUMBERS += [(None, "5", False, False), ("", "5", False, False)]


@pytest.mark.parametrize(("prediction", "target", "official", "by_numbers"), NUMBERS)
def test_numbers_are_compared_as_squad_does_or_as_numbers(prediction, target, official, by_numbers):
    assert (exact_match(prediction, [target]), same_answer(prediction, [target])) == (official, by_numbers)


LOST = [("C++", "c"), ("3.14", "314"), ("-5", "5"), ("1914-1918", "19141918"), ("AC/DC", "acdc")]
LOST += [("The", "the"), ("?!", "?!"), ("50%", "50"), ("1914.0", "19140"), ("5:30", "530")]
LOST += [("Oslo", None), ("5,000", None), ("U.S.", None), ("O'Neill", None), ("1914", None)]


@pytest.mark.parametrize(("target", "compared"), LOST)
def test_signs_that_a_comparison_loses_are_known(target, compared):
    assert lost_in_comparison(target) == compared


@given(st.text(alphabet="0123456789.,-'’ a−", max_size=12), st.text(alphabet="0123456789.,-", max_size=8))
def test_any_answer_is_the_same_as_itself(text, other):
    assert same_answer(text, [text]) == exact_match(text, [text])
    assert same_answer(text, [other]) in (True, False)


def test_f1_is_the_harmonic_mean_of_precision_and_recall_with_the_best_target():
    assert f1("a b c", ["b c d"]) == pytest.approx(2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3))
    assert f1("x x", ["x"]) == pytest.approx(2 / 3)
    assert f1("x", ["y"]) == f1("", [""]) == f1(None, ["x"]) == 0.0
    assert f1("red fox", ["blue whale", "red fox"]) == 1.0


FOUND = [("He moved to New  York, in 1950.", "new york"), ("Oslo's port", "Oslo")]
FOUND += [("Oslo’s port", "Oslo"), ("“Oslo”, she said", "Oslo"), ("to Oslo—at last", "Oslo")]
FOUND += [("an Oslo-based firm", "Oslo"), ("Oslo™ and Oslo²", "Oslo"), ("the war of 1914–1918", "1914")]
FOUND += [("born 14.07.1789", "1789"), ("it cost €5,000", "5,000"), ("it cost 5\u202f000 €", "5,000")]
FOUND += [("pi is 3.14…", "3.14"), ("Jean-Paul’s house", "Jean Paul"), ("in the U.S. alone", "US")]
FOUND += [("Thomas Mu\u0308ller", "Müller"), ("ＯＳＬＯ", "oslo"), ("os\u00adlo", "Oslo")]
FOUND += [
    ("№5 and ５，０００", "5000"),
    ("挪威的首都是奥斯陆。", "奥斯陆"),
    ("ノルウェーの首都はオスロです", "オスロ"),
]
FOUND += [("ソニーPS5の発売", "PS5"), ("ออสโลเป็นเมืองหลวง", "ออสโล"), ("수도는 오슬로입니다", "오슬로")]
FOUND += [("1914년에", "1914")]


@pytest.mark.parametrize(("text", "answer"), FOUND)
def test_an_answer_is_found_in_ordinary_typography(text, answer):
    assert contains_answer(text, answer)


PARTS = [("the 1950s", "1950"), ("starting", "art"), ("it cost 5,000", "5"), ("it cost 5,000", "000")]
PARTS += [("pi is 3.14", "14"), ("東京都", "京東"), ("ก่", "ก"), ("anything", "the"), ("anything …", "—")]


@pytest.mark.parametrize(("text", "answer"), PARTS)
def test_part_of_a_word_or_number_is_not_an_answer(text, answer):
    assert not contains_answer(text, answer)


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_text_contains_an_inserted_answer(before, answer, after):
    assert contains_answer(f"{before} {answer} {after}", answer) or not normalize_answer(answer)


MARKS = st.characters(categories=["Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So"])


@given(MARKS, st.sampled_from(["Oslo", "1914", "Müller", "5,000"]), MARKS)
def test_every_punctuation_mark_and_symbol_ends_a_word(before, answer, after):
    assert contains_answer(f"x{before}{answer}{after}x", answer)


TAGGED = st.lists(st.sampled_from(["<answer>", "</answer>", "<question>", " ", "x", "y"]), max_size=12)


TAGS = [("<answer>one</answer> <answer> two </answer> <answer>three", "two")]
TAGS += [("<answer>draft <answer>final</answer>", "final"), ("<answer>Oslo</answer></answer>", "Oslo")]
TAGS += [("<answer>Oslo</answer> </answer> so", "Oslo"), ("</answer><answer>Oslo</answer>", "Oslo")]
TAGS += [("", None), ("</answer><answer>", None), ("<question>x</question>", None)]


@pytest.mark.parametrize(("text", "content"), TAGS)
def test_the_last_closed_tag_counts(text, content):
    assert extract_last_tag(text, "answer") == content


@given(TAGGED)
def test_a_tags_content_has_no_such_tag(parts):
    content = extract_last_tag("".join(parts), "answer")
    assert content is None or "answer>" not in content


@given(TAGGED, st.sampled_from(["x", "x y", "<question>x</question>"]), TAGGED)
def test_a_closed_tag_is_found_in_any_context(before, content, after):
    closed_again = "<answer>" in after
    text = "".join([*before, f"<answer>{content}</answer>", *after])
    assert closed_again or extract_last_tag(text, "answer") == content
