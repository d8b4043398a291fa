"""Selection: one pair for each prompt or a rejection with reasons, whatever the order of the samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pairs import last_turn, prompt, record, search

from data.benchmarks import BenchmarkQuestion
from data.errors import DataError
from data.gates import Gates, GateSettings
from data.selection import Selection, select

ASKED = "On which river does Drosken lie?"
REPHRASED = "Does Drosken lie on which river?"


def by_length(texts: Sequence[str]) -> np.ndarray:
    """An embedding by hand: texts of the same length are the same."""
    return np.array([[1.0, 0.0] if len(text) == len(ASKED) else [0.0, 1.0] for text in texts])


def gates(**changes: Any) -> Gates:
    settings = GateSettings(near_duplicate_cosine=0.9, **changes)
    known = BenchmarkQuestion("b", "1", "Who wrote Hamlet?", ("Shakespeare",), 1)
    return Gates(settings, embed=by_length, benchmark_questions=[known])


def choose(prompts: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], **changes: Any) -> Selection:
    by_prompt: dict[int, list[dict[str, Any]]] = {}
    for each in records:
        by_prompt.setdefault(each["prompt_index"], []).append(each)
    return select(by_prompt, prompts, gates(**changes))


# --- which sample ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "records",
    [
        [record("well. " + last_turn()), record(last_turn(), sample=1)],
        [record(last_turn(), sample=2), record(last_turn(), sample=1)],
        [record(last_turn("Drosken is a town.")), record("well. " + last_turn(), sample=1)],
    ],
    ids=["the best format score", "in a tie the lower sample", "only past every gate"],
)
def test_the_best_sample_is_taken(records):
    assert [pair.sample for pair in choose([prompt()], records).accepted] == [1]


# --- rejections --------------------------------------------------------------------------------------------


def test_a_rejection_lists_each_sample_s_reasons():
    records = [
        record(last_turn("Drosken is a town.", "Zolvan")),
        record("nothing", sample=1),
        record("<question>Who?</question>", sample=2),
    ]
    [rejection] = choose([prompt(hop=2)], records).rejected
    assert (rejection.prompt_index, rejection.hop, rejection.doc_id) == (0, 2, "doc0")
    samples = [(sample.sample, sample.question, sample.answer) for sample in rejection.samples]
    assert samples == [(0, "Drosken is a town.", "Zolvan"), (1, None, None), (2, "Who?", None)]
    gates_named = [[reason.partition(":")[0] for reason in sample.reasons] for sample in rejection.samples]
    assert gates_named == [["evidence", "hops", "integrity"], ["pair"], ["pair"]]


def test_a_prompt_without_samples_is_rejected_too():
    [rejection] = choose([prompt()], []).rejected
    assert rejection.samples == ()
    assert rejection.reason == "no sample: services failed"


# --- duplicates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("again", "gate"), [(ASKED.upper(), "duplicates"), (REPHRASED, "near_duplicates")])
def test_a_question_of_an_earlier_prompt_is_not_accepted_twice(again, gate):
    records = [record(last_turn(ASKED)), record(last_turn(again), prompt_index=1)]
    selection = choose([prompt(0), prompt(1)], records)
    assert [pair.prompt_index for pair in selection.accepted] == [0]
    assert selection.rejected[0].samples[0].reasons[0].startswith(f"{gate}: prompt 0")


def test_another_sample_takes_the_place_of_a_duplicate():
    records = [
        record(last_turn()),
        record(last_turn(), prompt_index=1),
        record("well. " + last_turn("Which river flows past this Drosken town?"), prompt_index=1, sample=1),
    ]
    assert [p.sample for p in choose([prompt(0), prompt(1)], records).accepted] == [0, 1]


def test_samples_of_one_prompt_are_no_duplicates_of_each_other():
    records = [record(last_turn()), record(last_turn(), sample=1)]
    selection = choose([prompt()], records)
    assert selection.counts["gates"]["duplicates"] == {"judged": 2, "refused": 0}


def test_a_sample_that_was_not_taken_makes_no_duplicates():
    records = [
        record(last_turn(ASKED)),
        record("well. " + last_turn("Which water is it at Drosken town?"), sample=1),
        record(last_turn("Which water is it at Drosken town?"), prompt_index=1),
    ]
    assert len(choose([prompt(0), prompt(1)], records).accepted) == 2


# --- counts and bad input ----------------------------------------------------------------------------------


def test_counts_hold_samples_pairs_and_each_gate():
    records = [
        record(last_turn()),
        record("nothing", sample=1),
        record(last_turn("Drosken is a town."), sample=2),
        record(last_turn(answer="Zolvan"), prompt_index=1),
    ]
    counts = choose([prompt(0), prompt(1), prompt(2)], records).counts
    assert counts == {
        "prompts": 3,
        "samples": 4,
        "pairs": 3,
        "accepted": 1,
        "rejected": 2,
        "gates": {
            "evidence": {"judged": 3, "refused": 1},
            "hops": {"judged": 3, "refused": 0},
            "integrity": {"judged": 3, "refused": 1},
            "contamination": {"judged": 3, "refused": 0},
            "duplicates": {"judged": 1, "refused": 0},
            "near_duplicates": {"judged": 1, "refused": 0},
        },
    }


def test_without_a_benchmark_no_pair_counts_as_judged_for_contamination_and_a_note_says_why():
    bare = Gates(GateSettings(near_duplicate_cosine=0.9), embed=by_length)
    counts = select({0: [record(last_turn())]}, [prompt()], bare).counts
    assert counts["gates"]["contamination"] == {"judged": 0, "refused": 0, "note": "no benchmark given"}
    off = Gates(GateSettings(near_duplicate_cosine=0.9, contamination=False), embed=by_length)
    assert "contamination" not in select({0: [record(last_turn())]}, [prompt()], off).counts["gates"]


TWICE = [record(last_turn(), sample=1), record("nothing", sample=1)]


@pytest.mark.parametrize(
    ("prompts", "records", "message"),
    [
        ([prompt()], [record(last_turn(), prompt_index=7)], "prompt 7, which is not among the 1 prompts"),
        ([prompt()], TWICE, "sample 1 of prompt 0 occurs twice"),
        ([prompt(3), prompt(3)], [], r"share an index with another \(3\)"),
    ],
)
def test_samples_that_do_not_fit_the_prompts_are_an_error(prompts, records, message):
    with pytest.raises(DataError, match=message):
        choose(prompts, records)


# --- properties --------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    [
        last_turn(),
        last_turn(REPHRASED),
        last_turn("Who leads Drosken?", "Kelm"),
        last_turn("Drosken is a town."),
        "well. " + last_turn(),
        "none",
    ]
)


@st.composite
def sampled(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Some prompts and some samples of each."""
    prompts = [prompt(index, hop=draw(st.integers(1, 2))) for index in range(draw(st.integers(1, 5)))]
    records = [
        record(*([search()] if draw(st.booleans()) else []), draw(TEXTS), prompt_index=index, sample=sample)
        for index in range(len(prompts))
        for sample in range(draw(st.integers(0, 3)))
    ]
    return prompts, records


@given(sampled())
def test_every_prompt_is_accepted_once_or_rejected_with_reasons(data):
    prompts, records = data
    selection = choose(prompts, records)
    accepted = [pair.prompt_index for pair in selection.accepted]
    rejected = [rejection.prompt_index for rejection in selection.rejected]
    assert sorted(accepted + rejected) == list(range(len(prompts)))
    assert accepted == sorted(accepted) and rejected == sorted(rejected)
    for rejection in selection.rejected:
        own = [each for each in records if each["prompt_index"] == rejection.prompt_index]
        assert [sample.sample for sample in rejection.samples] == [each["sample"] for each in own]
        assert all(sample.reasons for sample in rejection.samples)
    questions = [pair.question.lower() for pair in selection.accepted]
    assert len(questions) == len(set(questions))


@given(sampled(), st.randoms(use_true_random=False))
def test_the_order_of_samples_and_prompts_changes_nothing(data, rng):
    prompts, records = data
    straight = choose(prompts, records)
    rng.shuffle(prompts)
    rng.shuffle(records)
    assert choose(prompts, records) == straight
