"""Reward functions as veRL calls them, against real HTTP peers for the search and the solver's server."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Peer, StartPeer, unused_port
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from verl_ext.clients.question_score import right_attempts
from verl_ext.method.tool_calls import render_tool_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn
from verl_ext.rewards import challenger_score, solver_score

DOCUMENT = "Orrin\nOrrin is a harbour town on the river Vell."
CALL = SearchCall('{"name": "search"}', ("Vell",), response="[1] Vell: The Vell ends in the Ember Sea.")
ASKED = (
    "<think>So.</think><question>Into which sea does Orrin's river flow?</question><answer>Ember Sea</answer>"
)
GOOD = Trajectory((Turn("<think>Look.</think>call", (CALL,)), Turn(ASKED)))
OPEN_BOOK = "from what the challenger read, the solver answers"
SEARCH_TURN = render_tool_call(["Vell"])


class Solver:
    """Answers completions from a list, whatever is asked; a status code is an answer too."""

    def __init__(self, tokenizer: Any, *replies: str | int) -> None:
        self._tokenizer, self._replies = tokenizer, list(replies)

    def __call__(self, request: dict[str, Any]) -> Any:
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if isinstance(reply, int):
            return reply
        ids = self._tokenizer.encode(reply + "<|im_end|>", add_special_tokens=False)
        return {"choices": [{"index": 0, "text": reply, "finish_reason": "stop", "token_ids": ids}]}


def library(request: dict[str, Any]) -> dict[str, Any]:
    passage = {"title": "Vell", "text": "It ends in the Ember Sea.", "contents": ""}
    return {"result": [[passage] * request["topk"] for _ in request["queries"]]}


def answer(text: str) -> str:
    return f"<answer>{text}</answer>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def settings(tiny_model: Path, solver: str, retrieval: str, **changes: Any) -> dict[str, Any]:
    """`reward_kwargs` as config/challenger.yaml has them."""
    values: dict[str, Any] = {"url": solver, "model_name": "solver", "tokenizer": str(tiny_model)}
    values |= {"prompt_form": "short", "temperature": 1.0, "max_turns": 3, "max_tokens_per_turn": 64}
    values |= {"max_context_tokens": 900, "tool_response_limit": 300, "concurrency": 2, "deadline_s": 30.0}
    values["retrieval"] = {"url": retrieval, "topk": 2, "deadline_s": 2.0}
    return {"attempts": 4, "hop_check": False, "open_book_check": False, "solver": values | changes}


def score(trajectory: Trajectory, arguments: dict[str, Any], hop: int = 2) -> dict[str, Any]:
    extra_info = {"trajectory": trajectory.to_dict(), "document": DOCUMENT, "hop": hop}
    return asyncio.run(challenger_score("search_zero_2", "", {"target": None}, extra_info, **arguments))


@pytest.fixture
def retrieval(start_peer: StartPeer) -> Peer:
    return start_peer("/retrieve", library)


def test_a_question_that_one_of_four_attempts_solves_gets_the_full_difficulty(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    replies = [answer("the Ember sea!"), answer("North Sea"), answer("Vell"), "no idea"]
    solver = start_peer("/v1/completions", Solver(tokenizer, *replies))
    got = score(GOOD, settings(tiny_model, solver.url, retrieval.url))
    # Difficulty (4 - 1) / (4 - 1); format (1 + 2/2 turns think + tool min(2/2, 1) + answer 1) / 4, halved.
    assert (got["k"], got["n"], got["difficulty"], got["format"]) == (1, 4, 1.0, 1.0)
    assert got["score"] == pytest.approx(1.0 + 0.5 * 1.0)
    assert got["valid"] and got["integrity"] and got["reason_invalid"] is None


def test_the_score_of_a_worse_question_by_hand(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    replies = [answer("Ember Sea")] * 3 + [answer("none")]
    solver = start_peer("/v1/completions", Solver(tokenizer, *replies))
    unthinking = Trajectory((Turn("call", (CALL,)), Turn(ASKED)))
    got = score(unthinking, settings(tiny_model, solver.url, retrieval.url), hop=4)
    # Difficulty (4 - 3) / (4 - 1); think 1/2, tool (1 + 1) / 4, answer 1.
    assert got["score"] == pytest.approx(1 / 3 + 0.5 * (1 + 0.5 + 0.5 + 1) / 4)


def test_a_question_that_fails_the_hop_check_is_not_attempted(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, answer("Ember Sea")))
    checked = settings(tiny_model, solver.url, retrieval.url) | {"hop_check": True}
    got = score(Trajectory((Turn(ASKED),)), checked)
    assert (got["valid"], got["k"], got["difficulty"], got["attempts_finished"]) == (True, None, 0.0, 0)
    assert "take 1" in got["hop_fault"] and solver.requests == []


@pytest.mark.parametrize(
    ("read", "attempted"), [("Ember Sea", 4), ("North Sea", 0)], ids=["the same answer", "another answer"]
)
def test_the_open_book_comes_before_the_attempts_and_may_refuse_them(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any, read: str, attempted: int
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, answer(read), answer("Vell")))
    checked = settings(tiny_model, solver.url, retrieval.url) | {"open_book_check": True}
    got = score(GOOD, checked)
    assert (got["valid"], got["attempts_finished"], got["k"]) == (True, attempted, 0 if attempted else None)
    assert got["refused"] == (None if attempted else f"open_book: {OPEN_BOOK} 'North Sea'")
    asked = tokenizer.decode(solver.requests[0]["prompt"])
    assert "Orrin is a harbour town" in asked and "The Vell ends in the Ember Sea" in asked
    assert [request["temperature"] for request in solver.requests] == [0.0] + [1.0] * attempted


def test_an_open_book_that_a_dead_solver_leaves_unread_makes_the_sample_invalid(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, 503))
    checked = settings(tiny_model, solver.url, retrieval.url, retries=0) | {"open_book_check": True}
    got = score(GOOD, checked)
    assert (got["valid"], got["refused"]) == (False, None)
    assert "HTTP 503" in got["reason_invalid"]


def test_the_solver_searches_the_real_service_and_everything_is_counted(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, *[SEARCH_TURN] * 4, answer("Ember Sea")))
    got = score(GOOD, settings(tiny_model, solver.url, retrieval.url, concurrency=4))
    attempts = json.loads(got["attempts"])
    assert [attempt["right"] for attempt in attempts] == [True] * 4
    assert (got["k"], got["difficulty"], got["attempt_searches"], got["attempts_finished"]) == (4, 0.0, 4, 4)
    assert got["attempt_tokens"] == sum(attempt["tokens_out"] for attempt in attempts) > 0
    assert [request["queries"] for request in retrieval.requests] == [["Vell"]] * 4
    assert "Ember Sea" in attempts[0]["trajectory"]["turns"][0]["calls"][0]["response"]


def test_one_failed_attempt_makes_the_sample_invalid_and_not_wrong(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, answer("Ember Sea"), *[500] * 5, answer("x")))
    got = score(GOOD, settings(tiny_model, solver.url, retrieval.url, concurrency=1))
    assert (got["valid"], got["score"], got["k"]) == (False, 0.0, None)
    assert (got["attempts_finished"], got["attempts_failed"]) == (3, 1)
    assert "fewer than 4" in got["reason_invalid"] and "HTTP 500" in got["reason_invalid"]


def test_a_solver_that_is_down_makes_the_sample_invalid(retrieval: Peer, tiny_model: Path) -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    got = score(GOOD, settings(tiny_model, url, retrieval.url, deadline_s=1.0))
    assert (got["valid"], got["attempts_failed"]) == (False, 4)


@pytest.mark.parametrize(
    ("trajectory", "valid"),
    [
        (Trajectory((Turn("<question>Is it Vell?</question><answer>Vell</answer>"),)), True),
        (Trajectory((Turn("no question at all"),)), True),
        (Trajectory((Turn("c", (SearchCall("r", ("q",), failed=True, error="down"),)), Turn(ASKED))), False),
    ],
    ids=["gives itself away", "nothing asked", "spoiled by a failed search"],
)
def test_a_question_without_integrity_costs_no_attempt(
    start_peer: StartPeer,
    retrieval: Peer,
    tiny_model: Path,
    tokenizer: Any,
    trajectory: Trajectory,
    valid: bool,
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, answer("x")))
    got = score(trajectory, settings(tiny_model, solver.url, retrieval.url))
    assert (got["score"], got["valid"], got["attempts_finished"], solver.requests) == (0.0, valid, 0, [])


def test_settings_may_be_verls_own_config_objects(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, answer("Ember Sea")))
    arguments = OmegaConf.create(settings(tiny_model, solver.url, retrieval.url))
    got = score(GOOD, {str(name): arguments[name] for name in arguments})
    assert got["k"] == 4


def test_the_score_has_only_values_that_veRL_can_pass_on_and_the_dump_can_write(
    start_peer: StartPeer, retrieval: Peer, tiny_model: Path, tokenizer: Any
) -> None:
    solver = start_peer("/v1/completions", Solver(tokenizer, answer("Ember Sea")))
    got = score(GOOD, settings(tiny_model, solver.url, retrieval.url))
    assert json.loads(json.dumps(got)) == got


@pytest.mark.parametrize(
    ("text", "expected"),
    [(answer("The Ember Sea."), 1.0), (answer("Vell"), 0.0), ("Ember Sea", 0.0)],
)
def test_a_solver_is_scored_by_exact_match(text: str, expected: float) -> None:
    extra_info = {"trajectory": Trajectory((Turn(text),)).to_dict()}
    got = asyncio.run(solver_score("search_zero", "", {"target": ["Ember Sea", "sea"]}, extra_info))
    assert (got["score"], got["filter_score"], got["valid"]) == (expected, expected, True)


def test_a_solver_that_lost_a_search_is_not_scored_and_no_filter_takes_it_for_wrong() -> None:
    lost = SearchCall("r", ("q",), failed=True, error="down")
    extra_info = {"trajectory": Trajectory((Turn("c", (lost,)), Turn(answer("Ember Sea")))).to_dict()}
    got = asyncio.run(solver_score("search_zero", "", {"target": ["Ember Sea"]}, extra_info))
    assert (got["score"], got["valid"]) == (0.0, False)
    # veRL drops a group where this is 0.
    assert np.std([got["filter_score"]] * 5) != 0


def attempt(text: str | None, finished: bool = True) -> Any:
    from verl_ext.clients.solver_agent import SolverAttempt

    return SolverAttempt(Trajectory(), finished, None if finished else "down", 0, 0, 0, 0.0, text)


@given(st.lists(st.sampled_from(["ember sea", "The Ember Sea!", "north", None]), min_size=1, max_size=6))
def test_right_attempts_are_those_that_match_the_challengers_answer(answers: list[str | None]) -> None:
    right = right_attempts([attempt(text) for text in answers], "Ember Sea", len(answers))
    assert right == sum(text is not None and "mber" in text for text in answers)


@pytest.mark.parametrize(
    ("attempts", "own_answer"),
    [
        ([attempt("a"), attempt("a", finished=False)], "a"),
        ([attempt("a")], "a"),
        ([], "a"),
        ([attempt("a"), attempt("a")], None),
    ],
    ids=["one unfinished", "too few", "none run", "no answer to compare with"],
)
def test_there_is_no_count_unless_all_attempts_finished(attempts: list[Any], own_answer: str | None) -> None:
    assert right_attempts(attempts, own_answer, 2) is None
