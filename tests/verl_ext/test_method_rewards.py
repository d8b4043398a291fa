"""Challenger and solver rewards, part by part."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.method.challenger_reward import (
    FORMAT_WEIGHT,
    challenger_reward,
    difficulty,
    extract_pair,
    has_integrity,
)
from verl_ext.method.format_score import answer_part, format_score, think_part, tool_part
from verl_ext.method.passages import format_passages
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

DOCUMENT = "Brann Halvorsen designed the Ostrel lighthouse in 1893."
ANSWERED = SearchCall("raw", ("q",), response="[1] Halvorsen: He was born in the village of Kestmoor.")
NAMED = replace(ANSWERED, queries=("the Halvorsen",))
UNANSWERED = SearchCall("raw", ("q",))
INVALID = SearchCall("raw", None, response="Error", error="the call is not JSON")
FAILED = SearchCall("raw", ("q",), failed=True, error="HTTP 503")

NOTHING_FOUND = SearchCall("raw", ("q",), response="No results.")


def searches(*queries):
    """One call per query, each with one passage."""
    return tuple(SearchCall("raw", (query,), response=f"[1] {query}: a passage.") for query in queries)


def ask(question, answer, thinking="<think>hm</think>"):
    return Turn(f"{thinking}<question>{question}</question>\n<answer>{answer}</answer>")


def trajectory(*calls, last):
    return Trajectory((*(Turn("<think>search</think>", (call,)) for call in calls), last))


GOOD = trajectory(ANSWERED, last=ask("Where was the designer of the Ostrel lighthouse born?", "Kestmoor"))


@given(st.integers(2, 20).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_difficulty_falls_evenly_from_one_right_attempt_to_all(k_of_n):
    k, n = k_of_n
    expected = Fraction(n - k, n - 1) if k else Fraction(0)
    assert difficulty(k, n) == pytest.approx(float(expected))


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (1, 1), (0, 0)])
def test_impossible_counts_are_refused(k, n):
    with pytest.raises(ValueError, match=f"{k} right of {n}"):
        difficulty(k, n)


THINKING = [(["<think>a</think> x", "\n<think>b</think>"], 1.0)]
THINKING += [(["<think>a</think>", "x <think>b</think>"], 0.5), (["<think>never closed"], 0.0), ([], 0.0)]


@pytest.mark.parametrize(("texts", "share"), THINKING)
def test_thinking_counts_in_turns_that_open_with_it(texts, share):
    assert think_part(Trajectory(tuple(map(Turn, texts)))) == share


STEPS = [((), 1, 1.0), ((UNANSWERED,), 1, 1.0), ((), 2, 0.0), ((INVALID,), 2, 0.0), ((ANSWERED,), 2, 1.0)]
STEPS += [((ANSWERED,), 3, 2 / 3), ((ANSWERED,), 4, 0.5), ((ANSWERED, INVALID), 4, 0.5)]
STEPS += [((ANSWERED, UNANSWERED), 4, 0.0), (searches("k", "l", "m"), 4, 1.0)]
STEPS += [(searches("k", "l", "m", "n", "o"), 4, 1.0), (searches("Orrin", "orrin!", "the Orrin"), 4, 0.5)]
STEPS += [((NOTHING_FOUND,), 2, 0.0), ((NOTHING_FOUND, ANSWERED), 3, 2 / 3)]


@pytest.mark.parametrize(("calls", "hop", "score"), STEPS)
def test_the_tool_part_counts_queries_that_found_something_new(calls, hop, score):
    turns = tuple(Turn("", (call,)) for call in calls)
    assert tool_part(Trajectory(turns), hop) == pytest.approx(score)


def test_calls_and_queries_of_one_turn_are_one_step():
    at_once = Turn("", searches("k", "l", "m"))
    several = Turn("", (SearchCall("raw", ("d", "e"), response="d:\n[1] D: d\ne:\n[2] E: e"),))
    assert tool_part(Trajectory((at_once,)), 4) == 0.5
    assert tool_part(Trajectory((at_once, several)), 4) == 0.75
    # A query without results is no step, even next to one that finds something known.
    again = Turn("", (SearchCall("raw", ("k", "l"), response="k:\n[1] K: k\nl:\nNo results."),))
    assert tool_part(Trajectory((Turn("", searches("k")), again)), 4) == 0.5


@given(st.lists(st.lists(st.sampled_from("klm"), max_size=3), max_size=5), st.integers(2, 5))
def test_repetition_never_raises_the_tool_part(turns, hop):
    made = tuple(Turn("", searches(*queries)) for queries in turns)
    once = tool_part(Trajectory(made), hop)
    assert tool_part(Trajectory((*made, *made)), hop) == once
    assert once <= (1 + min(len(made), len({query for queries in turns for query in queries}))) / hop


SUPPORTED = [("the Ostrel lighthouse", 1.0), ("Yes", 1.0), ("no.", 1.0)]
SUPPORTED += [("Halvorsen designed the Ostrel lighthouse in 1893", 0.5), ("Paris", 0.0), ("strel", 0.0)]
SUPPORTED += [("the", 0.0)]


@pytest.mark.parametrize(("answer", "score"), SUPPORTED)
def test_the_answer_part_needs_few_words_with_evidence(answer, score):
    assert answer_part(answer, [DOCUMENT]) == score


@pytest.mark.parametrize(("words", "score"), [(1, 1.0), (5, 1.0), (6, 0.5), (10, 0.5), (11, 0.0)])
def test_the_answer_part_falls_after_five_and_ten_words(words, score):
    answer = " ".join(f"w{i}" for i in range(words))
    assert answer_part(answer, [f"x {answer} y"]) == score


def test_evidence_is_one_text_with_the_answer_as_written():
    assert answer_part("Jean-Paul", ["“Jean-Paul”"]) == 1.0
    assert answer_part("red fox", ["it is red", "fox hunting"]) == 0.0


def test_an_answer_in_the_models_own_query_is_not_evidence():
    shown = format_passages(["Kestmoor", "x"], [[{"title": "Ostrel", "text": "A lighthouse."}], []])
    assert "Kestmoor" in shown
    call = SearchCall("raw", ("Kestmoor", "x"), response=shown)
    planted = trajectory(call, last=ask("Where was the designer born?", "Kestmoor"))
    assert format_score(planted, DOCUMENT, 2, "Kestmoor").answer == 0.0
    assert format_score(GOOD, DOCUMENT, 2, "Kestmoor").answer == 1.0


def test_an_answer_in_the_document_counts_for_one_hop_only():
    there = trajectory(ANSWERED, last=ask("What did Halvorsen design?", "the Ostrel lighthouse"))
    scores = [format_score(there, DOCUMENT, hop, "the Ostrel lighthouse").answer for hop in (1, 2, 4)]
    assert scores == [1.0, 0.0, 0.0]


FAULTS = [("Who?", "Ann", None), (None, "Ann", "no_question"), ("Who?", None, "no_answer")]
FAULTS += [("?!", "Ann", "question_without_words"), ("Who?", "The", "answer_without_words")]
FAULTS += [("What is Oslo's river?", "Oslo", "answer_in_question")]
FAULTS += [("Which U.S. state?", "us", "answer_in_question")]
FAULTS += [("What did the Osloers build?", "Oslo", None)]
FAULTS += [("What did the Parisians build?", "Paris", "answer_in_question")]
FAULTS += [("Is it in Norway?", "No", None), ("Did it open in 1914?", "1", None)]
FAULTS += [("What happened in 1914?", "1914", "answer_in_question")]
FAULTS += [("Who was born in 11914?", "1914", None), ("What is another name of it?", "Other", None)]
FAULTS += [("Where do New Yorkers go?", "New York", "answer_in_question")]
FAULTS += [("Who is a New-Yorker?", "New York", "answer_in_question")]
FAULTS += [("東京都の区は?", "東京", "answer_in_question")]


@pytest.mark.parametrize(("question", "answer", "fault"), FAULTS)
def test_the_fault_of_a_question_is_named(question, answer, fault):
    assert has_integrity(question, answer) is (fault is None)
    tags = [("question", question), ("answer", answer)]
    last = Turn("".join(f"<{tag}>{text}</{tag}>" for tag, text in tags if text is not None))
    assert challenger_reward(Trajectory((last,)), DOCUMENT, 1, n=5, k=0).integrity_fault == fault


def test_the_pair_comes_from_the_last_turn_after_its_thinking():
    last = ask("Q2?", "A2", thinking="<think><question>no</question><answer>no</answer></think>")
    assert extract_pair(Trajectory((ask("Q1?", "A1"), last))) == ("Q2?", "A2")
    thought = Turn("<think><question>Q</question><answer>A</answer></think>")
    assert extract_pair(Trajectory((thought,))) == (None, None)


@given(st.integers(0, 5), st.integers(1, 4))
def test_the_reward_is_difficulty_plus_half_the_format_score(k, hop):
    score = challenger_reward(GOOD, DOCUMENT, hop, n=5, k=k)
    tool = Fraction(min(2, hop), hop) if hop > 1 else Fraction(1)
    assert score.valid and (score.think, score.tool, score.answer_part) == (1, pytest.approx(float(tool)), 1)
    expected = (Fraction(5 - k, 4) if 0 < k < 5 else 0) + Fraction(1, 2) * (3 + tool) / 4
    assert score.score == pytest.approx(float(expected))


UNSEARCHED = trajectory(last=ask("What did Halvorsen design?", "the Ostrel lighthouse"))


def test_a_refused_question_earns_only_its_format_score():
    plain = challenger_reward(UNSEARCHED, DOCUMENT, 2, n=5, k=1)
    refused = challenger_reward(UNSEARCHED, DOCUMENT, 2, n=5, k=None, refused="hops: none")
    assert (plain.valid, plain.difficulty, refused.valid, refused.difficulty) == (True, 1.0, True, 0.0)
    assert plain.score == 1.0 + refused.score and refused.score == FORMAT_WEIGHT * refused.format


DESIGN = trajectory(ANSWERED, last=ask("What did he design?", "the Ostrel lighthouse"))
ZH = replace(ANSWERED, queries=("奥林天文台",), response="[1] 奥林: 建于凯姆村。")
BORN = trajectory(NAMED, last=ask("Where was Brann Halvorsen born?", "Kestmoor"))


@pytest.mark.parametrize(
    ("made", "hop", "fault"),
    [
        (GOOD, 2, None),
        (GOOD, 3, "1 turn found passages with a new query, 3 hops take 2"),
        (UNSEARCHED, 1, None),
        (UNSEARCHED, 2, "0 turns found passages with a new query, 2 hops take 1"),
        (DESIGN, 2, "the answer stands in the document that 2 hops should lead away from"),
        (BORN, 2, "one search for the question's own words 'the Halvorsen' shows the answer"),
        (
            trajectory(ZH, last=ask("奥林天文台位于哪个村？", "凯姆村")),
            2,
            "one search for the question's own words '奥林天文台' shows the answer",
        ),
        (trajectory(ZH, last=ask("那座天文台位于哪个村？", "凯姆村")), 2, None),
    ],
)
def test_missing_hops_are_named(made, hop, fault):
    assert challenger_reward(made, DOCUMENT, hop, n=5, k=0).hop_fault == fault


def test_a_bad_question_scores_zero_and_an_unfinished_one_is_invalid():
    leaked = trajectory(last=ask("Is it Kestmoor?", "Kestmoor"))
    score = challenger_reward(leaked, DOCUMENT, 1, n=5, k=None)
    assert (score.score, score.valid, score.reason_invalid) == (0.0, True, None)
    assert challenger_reward(Trajectory(), DOCUMENT, 1, n=5, k=None).score == 0.0
    score = challenger_reward(GOOD, DOCUMENT, 2, n=5, k=None)
    assert (score.score, score.valid) == (0.0, False)
    assert score.reason_invalid == "fewer than 5 solver attempts finished"


@pytest.mark.parametrize("last", [ask("Where?", "Kestmoor"), Turn("gave up")])
def test_a_failed_search_makes_any_sample_invalid(last):
    score = challenger_reward(trajectory(ANSWERED, FAILED, last=last), DOCUMENT, 3, n=5, k=3)
    assert (score.score, score.valid) == (0.0, False)
    assert "1 of the challenger's searches failed: HTTP 503" in str(score.reason_invalid)


ATTEMPTS = [("<think>x</think><answer>the Kestmoor.</answer>", 1.0)]
ATTEMPTS += [("<answer>Kestmoor village</answer>", 0.0), ("It is Kestmoor.", 0.0)]
ATTEMPTS += [("<think><answer>Kestmoor</answer></think>", 0.0)]


@pytest.mark.parametrize(("text", "score"), ATTEMPTS)
def test_a_solver_is_rewarded_for_an_exact_match(text, score):
    assert solver_reward(Trajectory((Turn(text),)), ["Kestmoor"]).score == score


@pytest.mark.parametrize(
    "last",
    [
        Turn("<answer>Kestmoor</answer>\n<answer>Kestmoor</answer>"),
        Turn("<answer>Kestmoor</answer>\n<answer>Kestmoor</ans", truncated=True),
        Turn("<answer>Kestmoor</answer>\nThat is all that I", truncated=True),
    ],
)
def test_a_repeated_or_cut_off_answer_does_not_count(last):
    score = solver_reward(Trajectory((last,)), ["Kestmoor"])
    assert (score.score, score.answer, score.valid) == (0.0, None, True)


def test_a_solvers_failed_search_is_invalid_and_missing_targets_are_refused():
    score = solver_reward(trajectory(FAILED, last=Turn("<answer>x</answer>")), ["x"])
    assert (score.score, score.valid) == (0.0, False)
    with pytest.raises(ValueError, match=r"ground_truth\.target"):
        solver_reward(GOOD, [])
