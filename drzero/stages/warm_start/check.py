"""What the model does before and after, in the real agent loop, on documents that training did not see."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.journal import Journal
from data.pairs import Pair, question_and_answer
from data.spread import spread
from drzero.checkpoints.export import ABOUT
from drzero.ops.console import say
from drzero.ops.services.services import ServiceGroup
from drzero.recipe.fingerprint import fingerprint
from drzero.stages.conversations import (
    Failed,
    check_failed_share,
    journal_conditions,
    play_all,
    served_agent,
    with_services,
)
from drzero.stages.models import StageModel, own_model, spent
from drzero.stages.services import search_spec, solver_spec
from drzero.stages.synthesize import sample_seed
from verl_ext.clients.search_agent import Conversation
from verl_ext.clients.solver_agent import SolverAgent
from verl_ext.method.answers import same_answer
from verl_ext.method.challenger_reward import has_integrity
from verl_ext.method.prompts import challenger_messages, solver_messages
from verl_ext.method.solver_reward import solver_answer

_SERVICE = "model"


@dataclass(frozen=True)
class _Job:
    number: int
    role: str
    pair: Pair


def play_check(config: DictConfig, model_path: str, when: str, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Let a model ask about the pairs' documents and answer their questions. Resumes `when`.jsonl.

    Raises OutOfTime, ServiceDied or ConversationsFailed.
    """
    served = OmegaConf.merge(
        config,
        {"solver": {"model_path": model_path, "temperature": config.rollout.temperature}, "endpoint": None},
    )
    assert isinstance(served, DictConfig)
    model = own_model(served, _SERVICE)
    if (export := Path(model_path) / ABOUT).is_file():
        # Its card is written after the check, so the folder as a whole is no identity.
        model = replace(model, identity=fingerprint(export))
    chosen = spread(pairs, lambda pair: pair.hop)[: config.check]
    jobs = [
        _Job(2 * n + k, role, pair)
        for n, pair in enumerate(chosen)
        for k, role in enumerate(("challenger", "solver"))
    ]
    asked = json.dumps([(pair.hop, pair.question, pair.answer, pair.document) for pair in chosen])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    conditions = journal_conditions(served, "warm_start", model, asked=digest)
    with Journal(Path(config.run.dir) / f"{when}.jsonl", conditions) as journal:
        done = {record["number"] for record in journal.records}
        missing = [job for job in jobs if job.number not in done]
        say("check", f"{when}: {len(jobs)} conversations, {len(missing)} still to play, {model_path}")
        if missing:
            specs = [search_spec(served), solver_spec(served, _SERVICE)]
            with_services(served, specs, journal.path, partial(_play, served, model, missing, journal))
        return journal.records


async def _play(
    config: DictConfig, model: StageModel, jobs: Sequence[_Job], journal: Journal, services: ServiceGroup
) -> list[Failed[_Job]]:
    form, turns = config.prompts.form, config.rollout.max_turns

    async with served_agent(SolverAgent, config, model) as agent:

        async def converse(job: _Job) -> Conversation:
            seed = sample_seed(config.data.seed, job.number, 0)
            if job.role == "solver":
                return await agent.converse(solver_messages(job.pair.question, form, turns), seed)
            return await agent.converse(
                challenger_messages(job.pair.document, job.pair.hop, form, turns), seed
            )

        failed = await play_all(
            jobs,
            converse,
            lambda job, said: journal.append(_judged(job, said)),
            services,
            concurrency=config.solver.concurrency,
            description="check",
        )
    check_failed_share(failed, len(journal.records) + len(failed), config.run.max_failed_share)
    return failed


def _judged(job: _Job, said: Conversation) -> dict[str, Any]:
    record = {
        "number": job.number,
        "role": job.role,
        "hop": job.pair.hop,
        "doc_id": job.pair.doc_id,
        "trajectory": said.trajectory.to_dict(),
        "searched": bool(said.trajectory.searches),
        **spent(said),
    }
    if job.role == "challenger":
        question, answer = question_and_answer(said.trajectory)
        is_valid = bool(question and answer and has_integrity(question, answer))
        return record | {"question": question, "answer": answer, "valid": is_valid}
    answer = solver_answer(said.trajectory)
    right = same_answer(answer, [job.pair.answer])
    asked = {"question": job.pair.question, "target": job.pair.answer}
    return record | asked | {"answer": answer, "answered": answer is not None, "right": right}
