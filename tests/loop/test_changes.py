"""Changes of exact match over questions and seeds: by hand, published examples, and bounds."""

import json
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scored_answers import answers, evaluated

from drzero.loop.report import report_scores
from drzero.stages.evaluate.changes import ALL, loop_changes, newcombe, over_seeds, paired

COUNTS = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


def change_of(both, lost, gained, neither):
    """The change with so many questions right in both, before alone, after alone, in neither."""
    before = [1] * both + [1] * lost + [0] * gained + [0] * neither
    after = [1] * both + [0] * lost + [1] * gained + [0] * neither
    change = paired(answers(before), answers(after))
    assert change
    return change


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [((1, 1, 7, 12), 0.026, 0.507), ((59, 6, 16, 80), 0.0046, 0.1186)],
    ids=["Bentur 2009", "Cavo 2012"],
)
def test_the_interval_agrees_with_published_examples(counts, low, high):
    # As R's contingencytables gives them, with the opposite sign.
    assert newcombe(*counts) == pytest.approx((low, high), abs=5e-4)


def test_the_p_value_is_binomial_in_the_questions_that_differ():
    change = change_of(both=20, lost=1, gained=8, neither=71)
    assert (change.n, change.before, change.after, change.effect) == (100, 0.21, 0.28, 0.07)
    assert change.p == pytest.approx(2 * (comb(9, 0) + comb(9, 1)) / 2**9)


def test_without_any_right_answer_the_interval_still_has_a_width():
    change = change_of(both=0, lost=0, gained=0, neither=100)
    assert (change.effect, change.p) == (0, 1)
    assert change.low == pytest.approx(-0.037, abs=1e-3) and change.high == pytest.approx(0.037, abs=1e-3)


@settings(max_examples=40)
@given(COUNTS)
def test_a_change_and_its_reverse_are_mirrored_and_within_their_bounds(counts):
    both, lost, gained, neither = counts
    change, back = change_of(*counts), change_of(both, gained, lost, neither)
    assert -1 <= change.low < change.high <= 1 and change.low <= change.effect <= change.high
    assert 0 < change.p <= 1
    assert (back.effect, back.p) == pytest.approx((-change.effect, change.p))
    assert (back.low, back.high) == pytest.approx((-change.high, -change.low))


def test_only_questions_that_both_have_answered_are_compared():
    before, after = answers([1, 0, 0]), answers([1, 1, 0], first=1)
    change = paired(before, after)
    assert change and (change.n, change.gained, change.lost) == (2, 2, 0)
    assert paired(before, answers([1], first=9)) is None


def test_one_seed_has_the_interval_of_its_questions():
    change = change_of(10, 2, 9, 79)
    found = over_seeds([change])
    assert (found.effect, found.p) == (change.effect, None)
    assert (found.low, found.high) == pytest.approx((change.low, change.high))


def test_seeds_that_differ_widen_the_interval_by_students():
    changes = [change_of(0, 0, gained, 100 - gained) for gained in (9, 12, 4)]
    found = over_seeds(changes)
    assert found.effect == pytest.approx(0.25 / 3)
    # Standard deviation of .09, .12, .04 is .0404; t of 2 degrees of freedom 4.303; p by the same.
    of_seeds = 4.303 * 0.0404 / 3**0.5
    above = sum(change.high - change.effect for change in changes) / 3
    assert found.high - found.effect == pytest.approx((of_seeds**2 + above**2) ** 0.5, abs=1e-3)
    assert found.p == pytest.approx(0.0702, abs=1e-3)


@settings(max_examples=25)
@given(st.lists(COUNTS, min_size=1, max_size=4))
def test_an_interval_over_seeds_has_a_width_and_holds_the_mean(counts):
    found = over_seeds([change_of(*each) for each in counts])
    assert -1 <= found.low < found.high <= 1 and found.low <= found.effect <= found.high


def test_each_iteration_is_compared_with_base_and_with_the_last():
    of_loop = {
        iteration: answers([1] * right + [0] * (10 - right)) + answers([0, 0], "demo_1hop")
        for iteration, right in enumerate((1, 4, 9))
    }
    changes = loop_changes(of_loop)
    compared = [(change["benchmark"], change["earlier"], change["later"]) for change in changes]
    assert compared == [
        (name, *which) for name in ("demo_2hop", "demo_1hop", ALL) for which in ((0, 1), (0, 2), (1, 2))
    ]
    assert [change["gained"] for change in changes] == [3, 8, 5, 0, 0, 0, 3, 8, 5]
    assert changes[-1]["n"] == 12


def test_the_loop_reports_scores_and_changes(tmp_path, capsys):
    folders = {
        0: evaluated(tmp_path / "evaluate_iter0", [0] * 20),
        1: evaluated(tmp_path / "evaluate_iter1", [1] * 8 + [0] * 12),
    }
    report_scores(folders, tmp_path)
    shown = capsys.readouterr().out
    assert "0.400 [0.100, 0.900]" in shown
    (line,) = [line for line in shown.splitlines() if "+0.400" in line]
    assert line.split()[:7] == ["demo_2hop", "base", "iteration", "1", "20", "8", "0"]
    assert line.split()[-1] == "0.0078"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["scores"]["1"]["demo_2hop"]["em"] == 0.4
    assert [change["p"] for change in report["changes"]] == [pytest.approx(2 / 2**8)]


def test_a_loop_without_evaluations_has_no_scores(tmp_path, capsys):
    report_scores({}, tmp_path)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())
