"""The evaluate stage: exact match of a model, or of an endpoint that serves one, on benchmarks.

    drzero evaluate iteration=1                               # the solver of iteration 1; 0 is the base model
    drzero evaluate solver.model_path=Qwen/Qwen2.5-3B-Instruct run.name=evaluate_qwen
    drzero evaluate endpoint=http://127.0.0.1:8001/v1 tokenizer=outputs/corpus/models/demo-policy run.name=x

Each answer is appended to `answers.jsonl` in the run folder at once; a rerun asks only the missing questions.
A question that failed twice because of a service is not scored: it is counted, and the next run asks it. The
answers of an endpoint are recorded under both its address and its name for the model, because neither alone
identifies the model.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.benchmarks import BenchmarkQuestion, benchmark_file
from data.journal import Journal
from drzero.ops.bearer import MODEL_KEY
from drzero.ops.files import atomic_write, remove_temporaries
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.preflight.inputs import load_questions
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.fingerprint import fingerprint, fingerprint_index, fingerprint_model
from drzero.recipe.tables import console
from drzero.stages.conversations import (
    Failed,
    check_failed_share,
    completions_url,
    journal_settings,
    play_all,
    served_agent,
    with_services,
)
from drzero.stages.endpoint import key_variable, served_name
from drzero.stages.result import write_result
from drzero.stages.scores import ANSWERS, REPORT, evaluation_table, score_all
from drzero.stages.services import check_and_resolve, search_spec, solver_spec
from verl_ext.artefacts import announce
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.answers import exact_match, f1


@dataclass(frozen=True)
class Served:
    """The model under evaluation, as the agent reaches it."""

    url: str
    """Its completions endpoint."""
    name: str
    """The server's name for it."""
    key: str
    """The environment variable whose key the server gets."""
    tokenizer: Any
    identity: str
    """Distinguishes it from any other model."""
    shown: str
    """Its origin, for the reader."""


def run_evaluate(config: DictConfig) -> None:
    """Ask the unanswered questions, then print the table and write `report.json` and `result.json`.

    Raises PreflightFailed or AlreadyRunning before anything starts, OutOfTime if the stop time comes before
    all are asked, ServiceDied if a service ends, ConversationsFailed if too many questions got no answer.
    """
    config = check_and_resolve(config, "evaluate")
    model = check_model(config)
    questions = load_questions(config)
    folder, conditions = Path(config.run.dir), answer_conditions(config, model.identity)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        with Journal(folder / ANSWERS, conditions) as journal:
            failed = _ask_missing(config, model, questions, journal)
            asked = {question.key for question in questions}
            records = [record for record in journal.records if record["key"] in asked]
        _report(config, model.shown, conditions, questions, records, failed)


def check_model(config: DictConfig) -> Served:
    """The model to evaluate, checked to exist and to speak ChatML with tools; raises PreflightFailed.

    Preflight has seen to it that an endpoint comes with a tokenizer.
    """
    if config.endpoint is None:
        path = config.solver.model_path
        tokenizer = load_chat_tokenizer(path, "solver.model_path")
        identity = fingerprint_model(path)
        return Served(completions_url(config), "solver", MODEL_KEY, tokenizer, identity, path)
    tokenizer = load_chat_tokenizer(config.tokenizer, "tokenizer")
    base = config.endpoint.rstrip("/").removesuffix("/completions").removesuffix("/v1") + "/v1"
    key = key_variable(config)
    name = served_name(base, config.endpoint_model, key)
    shown = f"{name} at {base}"
    return Served(f"{base}/completions", name, key, tokenizer, f"served as {shown}", shown)


def answer_conditions(config: DictConfig, model: str) -> dict[str, Any]:
    """Everything an answer depends on: answers under other conditions must not be mixed in."""
    return {
        "model": model,
        "benchmarks": [fingerprint(benchmark_file(source)) for source in config.benchmarks],
        "collection": fingerprint_index(config),
    } | journal_settings(config, "evaluate")


def answer_record(question: BenchmarkQuestion, attempt: SolverAttempt) -> dict[str, Any]:
    """The journal's record of a finished attempt."""
    turns, calls = attempt.trajectory.turns, attempt.trajectory.calls
    return {
        "key": question.key,
        "benchmark": question.benchmark,
        "id": question.id,
        "hop": question.hop,
        "question": question.question,
        "targets": list(question.targets),
        "answer": attempt.answer,
        "right": exact_match(attempt.answer, question.targets),
        "f1": f1(attempt.answer, question.targets),
        "searches": attempt.searches,
        "turns": len(turns),
        "truncated_turns": sum(turn.truncated for turn in turns),
        "calls": len(calls),
        "invalid_calls": sum(not call.valid for call in calls),
        "tokens_in": attempt.tokens_in,
        "tokens_out": attempt.tokens_out,
        "latency_s": round(attempt.latency_s, 2),
        "trajectory": attempt.trajectory.to_dict(),
    }


def _ask_missing(
    config: DictConfig, model: Served, questions: Sequence[BenchmarkQuestion], journal: Journal
) -> list[Failed[BenchmarkQuestion]]:
    """Ask the questions that the journal lacks; returns those that failed twice, unless too many did."""
    answered = {record["key"] for record in journal.records}
    waiting = [question for question in questions if question.key not in answered]
    print(f"{len(questions)} questions, {len(waiting)} of them still to ask, {model.shown}")
    if not waiting:
        return []

    async def play(services: ServiceGroup) -> list[Failed[BenchmarkQuestion]]:
        served = model.url, model.name, model.tokenizer
        async with served_agent(SolverAgent, config, *served, key_variable=model.key) as agent:
            return await play_all(
                waiting,
                lambda question: agent.attempt(question.question),
                lambda question, attempt: journal.append(answer_record(question, attempt)),
                services,
                concurrency=config.solver.concurrency,
                description="evaluate",
            )

    specs = [search_spec(config), *([] if config.endpoint else [solver_spec(config)])]
    failed = with_services(config, specs, journal.path, play)
    check_failed_share(failed, len(questions), config.run.max_failed_share)
    return failed


def _report(
    config: DictConfig,
    model: str,
    conditions: dict[str, Any],
    questions: Sequence[BenchmarkQuestion],
    records: Sequence[dict[str, Any]],
    failed: Sequence[Failed[BenchmarkQuestion]],
) -> None:
    """Print the table, write it to `report.json`, and write the stage's result."""
    folder = Path(config.run.dir)
    benchmarks = list(dict.fromkeys(question.benchmark for question in questions))
    failures = Counter(failure.job.benchmark for failure in failed)
    reasons = Counter(failure.reason for failure in failed)
    scores, averages = score_all(records, failures, benchmarks)
    console().print(evaluation_table(f"{config.run.name}: {model}", scores, averages))
    for reason, times in reasons.most_common(3):
        print(f"failed {times} times: {reason}")
    report = {
        "model": model,
        "conditions": conditions,
        "benchmarks": {name: asdict(row) for name, row in scores.items()},
        "averages": {name: asdict(row) for name, row in averages.items()},
        "failures": reasons,
    }
    atomic_write(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    announce(folder / REPORT)
    tokens = sum(record["tokens_in"] + record["tokens_out"] for record in records)
    figures = {name: row.em for name, row in {**scores, **averages}.items()} | {"failed": len(failed)}
    write_result(config, {"answers": folder / ANSWERS, "report": folder / REPORT}, tokens, figures)
