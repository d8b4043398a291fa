"""A sample record and its prompt become a pair, or a reason against one."""

import pytest
from made_pairs import DOCUMENT, last_turn, prompt, record, search

from data.errors import DataError, PairingError
from data.pairs import Pair, pair_of
from verl_ext.method.format_score import format_score
from verl_ext.method.trajectory import Trajectory


def test_a_pair_carries_its_sample_and_its_prompt():
    sample = record(search(), "no thinking here " + last_turn(), prompt_index=3, sample=2, seed=77)
    pair = pair_of(sample, prompt(3, hop=2))
    assert isinstance(pair, Pair)
    assert (pair.prompt_index, pair.sample, pair.seed, pair.hop) == (3, 2, 77, 2)
    assert (pair.doc_id, pair.document) == ("doc3", DOCUMENT)
    assert (pair.question, pair.answer) == ("On which river does Drosken lie?", "Galmir")
    assert pair.trajectory == Trajectory.from_dict(sample["trajectory"])
    assert pair.format_score == format_score(pair.trajectory, DOCUMENT, 2, "Galmir").total < 1


LONG = " ".join(f"word{i}" for i in range(120))


@pytest.mark.parametrize(
    ("written", "question"),
    [
        (LONG, LONG),
        ("On which river\n does  Drosken lie?", "On which river does Drosken lie?"),
        ("Is it Galmir?", "Is it Galmir?"),  # the gates judge it
    ],
)
def test_a_question_stays_whole_on_one_line(written, question):
    pair = pair_of(record(last_turn(written)), prompt())
    assert isinstance(pair, Pair) and (pair.question, pair.answer) == (question, "Galmir")


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (["<answer>Galmir</answer>"], "question"),
        (["<question>On which river?</question>"], "answer"),
        (["<question> </question><answer>Galmir</answer>"], "question"),
        (["<question>On which river?</question><answer>\n</answer>"], "answer"),
        (["<think>" + last_turn() + "</think>"], "question and no answer"),
        ([], "question and no answer"),
    ],
)
def test_without_question_or_answer_the_reason_says_what_is_missing(text, missing):
    assert pair_of(record(*text), prompt()) == f"pair: the last turn gives no {missing}"


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
