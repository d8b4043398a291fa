"""The evaluate stage: score a model, or an endpoint that serves one, on benchmarks or in an environment.

    drzero evaluate iteration=1                                   # a solver of the loop; 0 is the base model
    drzero evaluate endpoint=http://127.0.0.1:8001/v1 tokenizer=outputs/corpus/models/demo-policy run.name=x
    drzero evaluate endpoint=https://api.example.com/v1 api=chat model=a-model run.name=hosted
    drzero evaluate env=wordle model=qwen2.5-3b num_examples=50   # a model in an environment

Each answer is appended to `answers.jsonl` at once, so a rerun asks or plays only the missing ones. If
services fail a question twice, it is counted instead of scored, and the next run tries it again.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.journal import Journal
from drzero.ops.files import remove_temporaries
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.recipe.tables import console
from drzero.stages.conversations import Failed, play_all, with_services
from drzero.stages.evaluate import ANSWERS
from drzero.stages.evaluate.benchmarks import benchmark_evaluation
from drzero.stages.evaluate.environment import environment_evaluation
from drzero.stages.evaluate.evaluation import Evaluation
from drzero.stages.models import (
    StageModel,
    cost_line,
    costs,
    greet,
    request_lines,
    requests_report,
    stage_model,
    usd,
)
from drzero.stages.result import REPORT, write_report, write_result
from drzero.stages.services import check_and_resolve, search_spec, solver_spec


def run_evaluate(config: DictConfig) -> None:
    """Run the missing jobs, then print the table and write `report.json` and `result.json`.

    Raises PreflightFailed, AlreadyRunning, OutOfTime, ServiceDied or ConversationsFailed.
    """
    config = check_and_resolve(config, "evaluate")
    model = stage_model(config, "solver")
    folder = Path(config.run.dir)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        greet(config, model)
        evaluate = environment_evaluation if config.environment.name else benchmark_evaluation
        evaluation = evaluate(config, model)
        with Journal(folder / ANSWERS, evaluation.conditions) as journal:
            failed = _run_missing(config, evaluation, model, journal)
            wanted = {evaluation.key(job) for job in evaluation.jobs}
            records = [record for record in journal.records if record["key"] in wanted]
        _report(config, evaluation, model, records, failed)


def _run_missing(
    config: DictConfig, evaluation: Evaluation, model: StageModel, journal: Journal
) -> list[Failed[Any]]:
    done = {record["key"] for record in journal.records}
    total, waiting = len(evaluation.jobs), [job for job in evaluation.jobs if evaluation.key(job) not in done]
    console().print(
        f"{evaluation.to_do.format(total=total, missing=len(waiting))}, {model.shown}", soft_wrap=True
    )
    if not waiting:
        return []

    async def play(services: ServiceGroup) -> list[Failed[Any]]:
        async with evaluation.agent() as attempt:
            return await play_all(
                config,
                waiting,
                attempt,
                lambda job, played: journal.append(evaluation.record(job, played)),
                services,
                total=total,
                description="evaluate",
            )

    specs = [search_spec(config)] if evaluation.searches else []
    specs += [] if config.endpoint else [solver_spec(config)]
    return with_services(config, specs, journal.path, play)


def _report(
    config: DictConfig,
    evaluation: Evaluation,
    model: StageModel,
    records: Sequence[dict[str, Any]],
    failed: Sequence[Failed[Any]],
) -> None:
    folder, reasons = Path(config.run.dir), Counter(failure.reason for failure in failed)
    title = f"{config.run.name}: {model.shown}"
    scores, cost = evaluation.scores(records, [failure.job for failure in failed], title), costs(records)
    report = {"model": model.shown, "conditions": evaluation.conditions, **scores.report, "failures": reasons}
    report["cost"] = cost | {"usd": usd(config, cost)}
    lines = [*scores.lines, cost_line(cost, report["cost"]["usd"])]
    if model.endpoint:
        report["endpoint"] = requests_report(model.endpoint)
        lines += request_lines(report["endpoint"])
    console().print(scores.table)
    for line in [*lines, *(f"failed {n} times: {why}" for why, n in reasons.most_common(3))]:
        console().print(line, soft_wrap=True)
    write_report(folder, report)
    outputs = {"answers": folder / ANSWERS, "report": folder / REPORT}
    write_result(
        config, outputs, cost["tokens_in"] + cost["tokens_out"], scores.figures | {"failed": len(failed)}
    )
