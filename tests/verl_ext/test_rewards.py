"""Reward functions as veRL calls them, against HTTP peers for the search and the solver's server."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_ext.clients.question_score import right_attempts
from verl_ext.clients.solver_agent import SolverAttempt
from verl_ext.method.challenger_reward import open_book_fault
from verl_ext.method.search_calls import render_tool_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.rewards import challenger_score, solver_score

DOCUMENT = "Orrin\nOrrin is a harbour town on the river Vell."
CALL = SearchCall('{"name": "search"}', ("Vell",), response="[1] Vell: The Vell ends in the Ember Sea.")
LOST = SearchCall("r", ("q",), failed=True, error="down")
QUESTION = "<question>Into which sea does Orrin's river flow?</question>"
ASKED = f"<think>So.</think>{QUESTION}<answer>Ember Sea</answer>"
GOOD = Trajectory((Turn("<think>Look.</think>call", (CALL,)), Turn(ASKED)))


class Solver:
    """Answers completions from a list of texts and status codes, the last one forever."""

    def __init__(self, tokenizer, *replies):
        self._tokenizer, self._replies = tokenizer, list(replies)

    def __call__(self, request):
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, int):
            return reply
        ids = self._tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return {"choices": [{"index": 0, "text": reply, "finish_reason": "stop", "token_ids": ids}]}


def library(request):
    passage = {"title": "Vell", "text": "It ends in the Ember Sea.", "contents": ""}
    return {"result": [[passage] * request["topk"] for _ in request["queries"]]}


def answer(text):
    return f"<answer>{text}</answer>"


@pytest.fixture
def retrieval(start_peer):
    return start_peer("/retrieve", library)


@pytest.fixture
def score(start_peer, retrieval, tiny_model, tokenizer):
    def run(made, *replies, hop=2, **changes):
        solver = start_peer("/v1/completions", Solver(tokenizer, *replies))
        checks = {name: changes.pop(name, False) for name in ("hop_check", "open_book_check")}
        values = {"url": solver.url, "model_name": "solver", "tokenizer": str(tiny_model)}
        values |= {"prompt_form": "short", "temperature": 1.0, "max_turns": 3, "max_tokens_per_turn": 64}
        values |= {"max_context_tokens": 900, "tool_response_limit": 300, "deadline_s": 30.0}
        values |= {"concurrency": 2, "retrieval": {"url": retrieval.url, "topk": 2, "deadline_s": 2.0}}
        # veRL passes its own config objects.
        arguments = OmegaConf.create({"attempts": 4, **checks, "solver": values | changes})
        extra_info = {"trajectory": made.to_dict(), "document": DOCUMENT, "hop": hop}
        named = {str(name): arguments[name] for name in arguments}
        got = asyncio.run(challenger_score("search_zero_2", "", {"target": None}, extra_info, **named))
        assert json.loads(json.dumps(got)) == got, "veRL can pass it on, and the dump can write it"
        return got, solver

    return run


def test_one_right_attempt_of_four_gives_full_difficulty(score):
    got, _ = score(GOOD, answer("the Ember sea!"), answer("North Sea"), answer("Vell"), "no idea")
    # Difficulty (4 - 1) / (4 - 1); format (1 + 2/2 turns think + tool min(2/2, 1) + answer 1) / 4, halved.
    assert (got["k"], got["n"], got["difficulty"], got["format"]) == (1, 4, 1.0, 1.0)
    assert got["score"] == pytest.approx(1.0 + 0.5 * 1.0)
    assert got["valid"] and got["integrity"] and got["reason_invalid"] is None


def test_a_question_that_fails_the_hop_check_is_not_attempted(score):
    got, solver = score(Trajectory((Turn(ASKED),)), answer("Ember Sea"), hop_check=True)
    assert (got["valid"], got["k"], got["difficulty"], got["attempts_finished"]) == (True, None, 0.0, 0)
    assert "take 1" in got["hop_fault"] and solver.requests == []


@pytest.mark.parametrize(("read", "attempted"), [("Ember Sea", 4), ("North Sea", 0)], ids=["same", "other"])
def test_the_open_book_is_read_first_and_may_refuse(score, tokenizer, read, attempted):
    got, solver = score(GOOD, answer(read), answer("Vell"), open_book_check=True)
    assert (got["valid"], got["attempts_finished"], got["k"]) == (True, attempted, 0 if attempted else None)
    refused = "open_book: from what the challenger read, the solver answers 'North Sea'"
    assert got["refused"] == (None if attempted else refused)
    asked = tokenizer.decode(solver.requests[0]["prompt"])
    assert "Orrin is a harbour town" in asked and "The Vell ends in the Ember Sea" in asked
    assert [request["temperature"] for request in solver.requests] == [0.0] + [1.0] * attempted


def test_an_unread_open_book_makes_the_sample_invalid(score):
    got, _ = score(GOOD, 503, retries=0, open_book_check=True)
    assert (got["valid"], got["refused"]) == (False, None) and "HTTP 503" in got["reason_invalid"]


def test_the_solver_searches_and_everything_is_counted(score, retrieval):
    got, _ = score(GOOD, *[render_tool_call(["Vell"])] * 4, answer("Ember Sea"), concurrency=4)
    attempts = json.loads(got["attempts"])
    assert [attempt["right"] for attempt in attempts] == [True] * 4
    assert (got["k"], got["difficulty"], got["attempt_searches"], got["attempts_finished"]) == (4, 0.0, 4, 4)
    assert got["attempt_tokens"] == sum(attempt["tokens_out"] for attempt in attempts) > 0
    assert [request["queries"] for request in retrieval.requests] == [["Vell"]] * 4
    assert "Ember Sea" in attempts[0]["trajectory"]["turns"][0]["calls"][0]["response"]


def test_one_failed_attempt_makes_the_sample_invalid(score):
    got, _ = score(GOOD, answer("Ember Sea"), *[500] * 5, answer("x"), concurrency=1)
    assert (got["valid"], got["score"], got["k"]) == (False, 0.0, None)
    assert (got["attempts_finished"], got["attempts_failed"]) == (3, 1)
    assert "fewer than 4" in got["reason_invalid"] and "HTTP 500" in got["reason_invalid"]


@pytest.mark.parametrize(
    ("made", "valid"),
    [
        (Trajectory((Turn("<question>Is it Vell?</question><answer>Vell</answer>"),)), True),
        (Trajectory((Turn("no question at all"),)), True),
        (Trajectory((Turn("c", (LOST,)), Turn(ASKED))), False),
    ],
    ids=["gives itself away", "nothing asked", "spoiled by a failed search"],
)
def test_a_question_without_integrity_costs_no_attempt(score, made, valid):
    got, solver = score(made, answer("x"))
    assert (got["score"], got["valid"], got["attempts_finished"], solver.requests) == (0.0, valid, 0, [])


def solved(*turns, source="search_zero"):
    extra_info = {"trajectory": Trajectory(turns).to_dict()}
    return asyncio.run(solver_score(source, "", {"target": ["Ember Sea", "-5"]}, extra_info))


@pytest.mark.parametrize(("source", "score"), [("search_zero", 0.0), ("searchR1_nq", 1.0)])
def test_synthesized_pairs_compare_numbers_and_benchmarks_keep_squads_rules(source, score):
    got = solved(Turn("<answer>5</answer>"), source=source)
    assert (got["score"], got["filter_score"], got["valid"]) == (score, score, True)
    assert right_attempts([attempt("314"), attempt("3.14")], "3.14", 2) == 1
    assert open_book_fault("314", "3.14") and open_book_fault("1914.0", "1914") is None


def test_a_solver_that_lost_a_search_is_not_scored_or_filtered():
    got = solved(Turn("c", (LOST,)), Turn(answer("Ember Sea")))
    assert (got["score"], got["valid"]) == (0.0, False)
    assert np.std([got["filter_score"]] * 5) != 0  # veRL drops a group where this is 0


def attempt(text, finished=True):
    return SolverAttempt(Trajectory(), finished, None if finished else "down", 0, 0, 0, 0.0, text)


@given(st.lists(st.sampled_from(["ember sea", "The Ember Sea!", "north", None]), min_size=1, max_size=6))
def test_attempts_that_match_the_challengers_answer_are_right(answers):
    right = right_attempts([attempt(text) for text in answers], "Ember Sea", len(answers))
    assert right == sum(text is not None and "mber" in text for text in answers)


def test_right_attempts_are_not_counted_unless_all_finished():
    unfinished = [attempt("a"), attempt("a", finished=False)]
    for attempts in (unfinished, [attempt("a")], []):
        assert right_attempts(attempts, "a", 2) is None
    assert right_attempts([attempt("a")] * 2, None, 2) is None
