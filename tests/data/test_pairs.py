"""A sample record and its prompt become a pair, or a reason against one."""

from typing import Any

import pytest
from made_pairs import DOCUMENT, last_turn, prompt, record, search

from data.errors import DataError, PairingError
from data.pairs import Pair, pair_of
from verl_ext.method.format_score import format_score
from verl_ext.method.trajectory import Trajectory


def made(*turns: Any, hop: int = 1) -> Pair:
    pair = pair_of(record(*turns), prompt(hop=hop))
    assert isinstance(pair, Pair)
    return pair


def test_a_pair_carries_its_sample_and_its_prompt():
    pair = pair_of(record(last_turn(), prompt_index=3, sample=2, seed=77), prompt(3, hop=2))
    assert isinstance(pair, Pair)
    assert (pair.prompt_index, pair.sample, pair.seed, pair.hop) == (3, 2, 77, 2)
    assert (pair.doc_id, pair.document) == ("doc3", DOCUMENT)
    assert (pair.question, pair.answer) == ("On which river does Drosken lie?", "Galmir")


def test_the_whole_trajectory_is_kept():
    sample = record(search(), last_turn())
    pair = pair_of(sample, prompt(hop=2))
    assert isinstance(pair, Pair)
    assert pair.trajectory == Trajectory.from_dict(sample["trajectory"])


def test_the_format_score_is_that_of_the_reward():
    pair = made(search(), "no thinking here " + last_turn(), hop=2)
    assert pair.format_score == format_score(pair.trajectory, DOCUMENT, 2, "Galmir").total < 1


def test_a_long_question_stays_whole():
    question = " ".join(f"word{i}" for i in range(120))
    assert made(last_turn(question)).question == question


def test_a_question_over_several_lines_becomes_one_line():
    assert (
        made(last_turn("On which river\n does  Drosken lie?")).question == "On which river does Drosken lie?"
    )


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("<answer>Galmir</answer>", "question"),
        ("<question>On which river?</question>", "answer"),
        ("<question> </question><answer>Galmir</answer>", "question"),
        ("<question>On which river?</question><answer>\n</answer>", "answer"),
        ("nothing", "question and no answer"),
        ("<think>" + last_turn() + "</think>", "question and no answer"),
    ],
)
def test_without_question_or_answer_the_reason_says_what_is_missing(text, missing):
    assert pair_of(record(text), prompt()) == f"pair: the last turn gives no {missing}"


def test_a_conversation_without_turns_has_no_pair():
    assert isinstance(pair_of(record(), prompt()), str)


def test_a_question_without_integrity_is_still_a_pair():
    assert made(last_turn("Is it Galmir?", "Galmir")).answer == "Galmir"


def test_a_record_of_another_prompt_is_an_error():
    with pytest.raises(PairingError, match="prompt 4 was joined with prompt 5"):
        pair_of(record(last_turn(), prompt_index=4), prompt(5))


@pytest.mark.parametrize("key", ["prompt_index", "sample", "seed", "trajectory"])
def test_a_record_that_lacks_a_field_is_an_error(key):
    broken = {name: value for name, value in record(last_turn()).items() if name != key}
    with pytest.raises(DataError, match=f"lacks {key}"):
        pair_of(broken, prompt())


@pytest.mark.parametrize("trajectory", [None, {}, {"turns": [{}]}, {"turns": 3}])
def test_a_damaged_trajectory_is_an_error(trajectory):
    with pytest.raises(DataError, match="sample 0 of prompt 0 has no readable trajectory"):
        pair_of(record(last_turn()) | {"trajectory": trajectory}, prompt())
