"""Reward functions for veRL 0.9.1, called when a trajectory is complete, while other rollouts still run."""

import asyncio
import functools
import json
import math
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from drzero.ops.bearer import MODEL_KEY
from drzero.ops.telemetry import waiting
from search.client import SearchClient
from verl_ext.clients.question_score import score_question
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.challenger_reward import open_book_messages
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory


async def challenger_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """Score one challenger trajectory as `score_question` does. `settings` are the `reward_kwargs`."""
    solver = OmegaConf.to_container(OmegaConf.create(settings["solver"]))
    assert isinstance(solver, dict)
    with waiting("reward"):
        return await score_question(
            Trajectory.from_dict(extra_info["trajectory"]),
            extra_info["document"],
            int(extra_info["hop"]),
            _agent(solver),
            attempts=settings["attempts"],
            hop_check=settings["hop_check"],
            read=functools.partial(_read, solver) if settings["open_book_check"] else None,
        )


async def solver_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """Score one solver trajectory by exact match. A NaN `filter_score` keeps invalid answers."""
    with waiting("reward"):
        trajectory = Trajectory.from_dict(extra_info["trajectory"])
        score = solver_reward(trajectory, list(ground_truth["target"]), data_source)
    filter_score = score.score if score.valid else math.nan
    return asdict(score) | {"hop": int(extra_info.get("hop") or 0), "filter_score": filter_score}


async def _read(
    solver: dict[Any, Any], question: str, document: str, trajectory: Trajectory
) -> SolverAttempt:
    reader = _agent({**solver, "temperature": 0.0, "max_turns": 1})
    form, turns, limit = (solver[name] for name in ("prompt_form", "max_turns", "tool_response_limit"))
    return await reader.answer(open_book_messages(question, document, trajectory, form, turns, limit))


def _agent(settings: dict[Any, Any]) -> SolverAgent:
    return _agent_of(json.dumps(settings, sort_keys=True), asyncio.get_running_loop())


@functools.cache
def _agent_of(settings_json: str, loop: asyncio.AbstractEventLoop) -> SolverAgent:
    settings = json.loads(settings_json)
    retrieval = settings.pop("retrieval")
    search = SearchClient(retrieval["url"], topk=retrieval["topk"], deadline_s=retrieval["deadline_s"])
    tokenizer = AutoTokenizer.from_pretrained(settings.pop("tokenizer"))
    url = settings.pop("url").rstrip("/") + "/v1/completions"
    name, topk = settings.pop("model_name"), retrieval["topk"]
    return SolverAgent(url, name, tokenizer, search, topk=topk, key_variable=MODEL_KEY, **settings)
