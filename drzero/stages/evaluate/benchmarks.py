"""Evaluate on benchmarks: the model answers questions as a search agent, scored by exact match."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig

from data.benchmarks import BenchmarkQuestion, benchmark_file
from drzero.preflight.inputs import load_questions
from drzero.recipe.fingerprint import fingerprint
from drzero.stages.conversations import journal_conditions, served_agent
from drzero.stages.evaluate import Records
from drzero.stages.evaluate.benchmark_scores import evaluation_table, score_all
from drzero.stages.evaluate.evaluation import Evaluation, Scores
from drzero.stages.models import StageModel, spent
from verl_ext.clients.solver_agent import SolverAgent, SolverAttempt
from verl_ext.method.answers import exact_match, f1


def benchmark_evaluation(config: DictConfig, model: StageModel) -> Evaluation:
    """The questions of `benchmarks`, asked as in training."""
    questions = load_questions(config)
    benchmarks = list(dict.fromkeys(question.benchmark for question in questions))
    files = [fingerprint(benchmark_file(source)) for source in config.benchmarks]
    api = {"api": config.api} if config.endpoint else {}

    @asynccontextmanager
    async def agent() -> AsyncIterator[Callable[[BenchmarkQuestion], Awaitable[SolverAttempt]]]:
        async with served_agent(SolverAgent, config, model) as solver:
            yield lambda question: solver.attempt(question.question)

    def scores(records: Records, failed: Sequence[BenchmarkQuestion], title: str) -> Scores:
        by_name, averages = score_all(records, Counter(job.benchmark for job in failed), benchmarks)
        rows = {
            "benchmarks": {name: asdict(row) for name, row in by_name.items()},
            "averages": {name: asdict(row) for name, row in averages.items()},
        }
        figures = {name: row.em for name, row in {**by_name, **averages}.items()}
        return Scores(evaluation_table(title, by_name, averages), rows, figures)

    return Evaluation(
        jobs=questions,
        key=lambda question: question.key,
        conditions=journal_conditions(config, "evaluate", model, benchmarks=files, **api),
        to_do="{total} questions, {missing} of them still to ask",
        agent=agent,
        record=answer_record,
        scores=scores,
    )


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
        **spent(attempt),
        "trajectory": attempt.trajectory.to_dict(),
    }
