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
from drzero.preflight.demonstrations import Source, searching_as
from drzero.recipe.fingerprint import fingerprint, fingerprint_index
from drzero.stages.conversations import Failed, journal_conditions, play_all, served_agent, with_services
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
    source: str


def play_check(
    config: DictConfig, model_path: str, when: str, pairs: Sequence[tuple[Source, Pair]]
) -> list[dict[str, Any]]:
    """Let a model ask about the pairs' documents and answer their questions. Resumes `when`.jsonl.

    Raises OutOfTime, ServiceDied or ConversationsFailed.
    """
    served, model = _served(config, model_path)
    chosen = spread(pairs, lambda of_source: of_source[1].hop)[: config.check]
    jobs = [
        _Job(2 * n + k, role, pair, source.name)
        for n, (source, pair) in enumerate(chosen)
        for k, role in enumerate(("challenger", "solver"))
    ]
    indices = by_index(served, [source for source, _ in chosen])
    asked = [(pair.hop, pair.question, pair.answer, pair.document) for _, pair in chosen]
    searched = [fingerprint_index(searching) for searching, _ in indices]
    digest = hashlib.sha256(json.dumps([asked, searched]).encode()).hexdigest()
    conditions = journal_conditions(indices[0][0], "warm_start", model, asked=digest)
    with Journal(Path(config.run.dir) / f"{when}.jsonl", conditions) as journal:
        done = {record["number"] for record in journal.records}
        left = [job for job in jobs if job.number not in done]
        say("check", f"{when}: {len(jobs)} conversations, {len(left)} still to play, {model_path}")
        for searching, sources in indices:
            if missing := [job for job in left if job.source in sources]:
                specs = [search_spec(searching), solver_spec(searching, _SERVICE)]
                play = partial(_play, searching, model, missing, journal)
                for failed in with_services(searching, specs, journal.path, play):
                    say("check", f"failed twice, to be retried by the next run: {failed.reason}")
        return journal.records


def _served(config: DictConfig, model_path: str) -> tuple[DictConfig, StageModel]:
    solver = {"model_path": model_path, "temperature": config.rollout.temperature}
    served = OmegaConf.merge(config, {"solver": solver, "endpoint": None})
    assert isinstance(served, DictConfig)
    model = own_model(served, _SERVICE)
    if (export := Path(model_path) / ABOUT).is_file():
        # Its card is written after the check, so the folder as a whole is no identity.
        model = replace(model, identity=fingerprint(export))
    return served, model


def by_index(config: DictConfig, sources: Sequence[Source]) -> list[tuple[DictConfig, list[str]]]:
    """A config for each index, with the names of the runs that searched it."""
    found: dict[str, tuple[DictConfig, list[str]]] = {}
    for source in {source.name: source for source in sources}.values():
        searching = searching_as(config, source)
        found.setdefault(OmegaConf.to_yaml(searching), (searching, []))[1].append(source.name)
    return list(found.values())


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

        return await play_all(
            config,
            jobs,
            converse,
            lambda job, said: journal.append(_judged(job, said)),
            services,
            total=len(journal.records) + len(jobs),
            description="check",
        )


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
