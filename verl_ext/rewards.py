"""Reward functions as veRL calls them (veRL 0.9.1): `reward.custom_reward_function.{path,name}`.

veRL calls them once per trajectory as soon as it is complete, while other rollouts still run, so the solver
tries a challenger's question at once (the *streamed* reward) and not after the whole batch. Both read the
structured turns that `search_agent` left in `extra_info["trajectory"]`.
"""

import asyncio
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from search.client import SearchClient
from verl_ext.method.answers import exact_match
from verl_ext.method.challenger_reward import challenger_reward, extract_pair, has_integrity
from verl_ext.method.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory
from verl_ext.telemetry import waiting


async def challenger_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """Score one challenger trajectory; the solver first tries a question with integrity n times.

    `settings` are the keys of `reward.custom_reward_function.reward_kwargs`. Returns `score` with every
    component of `ChallengerScore`, counters of the attempts, and the attempts themselves as JSON.
    """
    trajectory = Trajectory.from_dict(extra_info["trajectory"])
    question, answer = extract_pair(trajectory)
    n: int = settings["attempts"]
    attempts: list[SolverAttempt] = []
    started = time.monotonic()
    # A sample that a failed search has already made invalid is not worth n solver attempts.
    if question and answer and has_integrity(question, answer) and not trajectory.failed_calls:
        with waiting("reward"):
            solver = OmegaConf.to_container(OmegaConf.create(settings["solver"]))
            agent = _agent(json.dumps(solver, sort_keys=True), asyncio.get_running_loop())
            attempts = await agent.attempts(question, n)
    seconds = time.monotonic() - started
    k = right_attempts(attempts, answer, n)
    score = challenger_reward(trajectory, extra_info["document"], int(extra_info["hop"]), n=n, k=k)
    reason = score.reason_invalid
    failures = [attempt.failure for attempt in attempts if not attempt.finished]
    if reason and failures:
        reason = f"{reason}: {failures[0]}"
    return asdict(score) | {"reason_invalid": reason} | _attempt_fields(attempts, answer, seconds)


async def solver_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """Score one solver trajectory: exact match of its answer with a target.

    The result includes `hop`, because validation sees nothing but what this function returns.
    """
    trajectory = Trajectory.from_dict(extra_info["trajectory"])
    score = solver_reward(trajectory, list(ground_truth["target"]))
    return asdict(score) | {"hop": int(extra_info.get("hop") or 0)}


def right_attempts(attempts: Sequence[SolverAttempt], answer: str | None, n: int) -> int | None:
    """How many of n attempts gave the challenger's answer; None unless all n finished."""
    if answer is None or len(attempts) < n or not all(attempt.finished for attempt in attempts):
        return None
    return sum(exact_match(attempt.answer, [answer]) for attempt in attempts)


def _attempt_fields(attempts: Sequence[SolverAttempt], answer: str | None, seconds: float) -> dict[str, Any]:
    copied = ("answer", "finished", "failure", "searches", "tokens_out")
    records = [
        {
            **{name: getattr(attempt, name) for name in copied},
            "right": answer is not None and exact_match(attempt.answer, [answer]),
            "latency_s": round(attempt.latency_s, 2),
            "trajectory": attempt.trajectory.to_dict(),
        }
        for attempt in attempts
    ]
    return {
        # As text: veRL's bookkeeping averages numbers and passes strings through untouched.
        "attempts": json.dumps(records, ensure_ascii=False),
        "attempts_finished": sum(attempt.finished for attempt in attempts),
        "attempts_failed": sum(not attempt.finished for attempt in attempts),
        "attempt_searches": sum(attempt.searches for attempt in attempts),
        "attempt_tokens": sum(attempt.tokens_out for attempt in attempts),
        "attempt_tokens_in": sum(attempt.tokens_in for attempt in attempts),
        "attempts_s": seconds,
    }


@functools.cache
def _agent(settings_json: str, loop: asyncio.AbstractEventLoop) -> SolverAgent:
    """One agent per worker process and event loop, so that it bounds the concurrency of all its questions."""
    settings = json.loads(settings_json)
    retrieval = settings.pop("retrieval")
    search = SearchClient(retrieval["url"], topk=retrieval["topk"], deadline_s=retrieval["deadline_s"])
    tokenizer = AutoTokenizer.from_pretrained(settings.pop("tokenizer"))
    url = settings.pop("url").rstrip("/") + "/v1/completions"
    return SolverAgent(url, settings.pop("model_name"), tokenizer, search, topk=retrieval["topk"], **settings)
