"""The evaluate stage in an environment: how many held-out tasks a model solves, and its reward by part.

    drzero evaluate env=wordle model=qwen2.5-3b num_examples=50
    drzero evaluate env=wordle solver.model_path=outputs/checkpoints/train_wordle_hf run.name=evaluate_after
    drzero compare outputs/checkpoints/evaluate_wordle outputs/checkpoints/evaluate_after

Each episode is appended to `answers.jsonl` in the run folder at once; a rerun plays only the missing ones. An
episode that failed twice, by the environment's code or a service, is not scored: it is counted, and the next
run plays it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.journal import Journal
from drzero.ops.files import atomic_write, remove_temporaries
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.recipe.environment import limits_of, load_taskset, rows_of
from drzero.recipe.tables import console
from drzero.stages.conversations import Failed, check_failed_share, play_all, with_services
from drzero.stages.environment_scores import EnvironmentScore, environment_table, score_episodes
from drzero.stages.evaluate import Served, check_model
from drzero.stages.result import write_result
from drzero.stages.scores import ANSWERS, REPORT
from drzero.stages.services import check_and_resolve, search_spec, solver_spec
from environments.row import Row
from environments.taskset import Taskset
from verl_ext.artefacts import announce
from verl_ext.clients.environment_agent import EnvironmentAgent, EpisodeAttempt, fitting


def run_evaluate_environment(config: DictConfig) -> None:
    """Play the rows that are missing, then print the table and write `report.json` and `result.json`.

    Raises PreflightFailed or AlreadyRunning before anything starts, OutOfTime, ServiceDied, or
    ConversationsFailed if too many episodes got no score.
    """
    config = check_and_resolve(config, "evaluate")
    model = check_model(config)
    taskset, folder = load_taskset(config), Path(config.run.dir)
    rows = rows_of(taskset, "eval", config.num_examples, config.data.seed)
    conditions = episode_conditions(config, model.identity)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        with Journal(folder / ANSWERS, conditions) as journal:
            failed = _play_missing(config, model, taskset, rows, journal)
            asked = {row.id for row in rows}
            records = [record for record in journal.records if record["key"] in asked]
        _report(config, model.shown, conditions, taskset, records, failed)


def episode_conditions(config: DictConfig, model: str) -> dict[str, Any]:
    """Everything an episode depends on: those under other conditions must not be mixed in."""
    keys = [
        *("solver.temperature", "rollout.max_tokens_per_turn", "data.max_prompt_length"),
        *("data.max_response_length", "solver.max_context_tokens"),
    ]
    engine = [] if config.endpoint else ["solver.engine", "solver.dtype"]
    environment = OmegaConf.to_container(config.environment, resolve=True)
    assert isinstance(environment, dict)
    # Where a service listens differs from start to start.
    environment["options"] = {name: value for name, value in environment["options"].items() if name != "url"}
    return {"model": model, "environment": environment} | {
        key: OmegaConf.select(config, key) for key in (*keys, *engine)
    }


def episode_record(taskset: Taskset, row: Row, attempt: EpisodeAttempt) -> dict[str, Any]:
    """The journal's record of a finished episode."""
    played = attempt.played
    assert played is not None and played.score is not None
    turns, calls = played.conversation.turns, played.conversation.calls
    return {
        "key": row.id,
        "benchmark": taskset.name,
        "right": played.score.success,
        "reward": played.score.reward,
        "parts": dict(played.score.parts),
        "turns": len(turns),
        "truncated_turns": sum(turn.truncated for turn in turns),
        "calls": len(calls),
        "invalid_calls": sum(not call.valid for call in calls),
        "undeclared_calls": sum(call.undeclared for call in calls),
        "ended": played.ended,
        "token_drift": played.token_drift,
        "tokens_in": played.tokens_in,
        "tokens_out": played.tokens_out,
        "latency_s": round(attempt.latency_s, 2),
        "trajectory": played.conversation.to_dict(),
    }


def _play_missing(
    config: DictConfig, model: Served, taskset: Taskset, rows: Sequence[Row], journal: Journal
) -> list[Failed[Row]]:
    """Play the rows that the journal lacks; returns those that failed twice, unless too many did."""
    played = {record["key"] for record in journal.records}
    waiting = [row for row in rows if row.id not in played]
    print(f"{taskset.name}: {len(rows)} rows, {len(waiting)} of them still to play, {model.shown}")
    if not waiting:
        return []

    async def play(services: ServiceGroup) -> list[Failed[Row]]:
        agent = _agent(config, model, taskset)
        try:
            return await play_all(
                waiting,
                agent.attempt,
                lambda row, attempt: journal.append(episode_record(taskset, row, attempt)),
                services,
                concurrency=config.solver.concurrency,
                description="evaluate",
            )
        finally:
            await agent.aclose()

    specs = [search_spec(config)] if taskset.needs_retrieval else []
    specs += [] if config.endpoint else [solver_spec(config)]
    failed = with_services(config, specs, journal.path, play)
    check_failed_share(failed, len(rows), config.run.max_failed_share)
    return failed


def _agent(config: DictConfig, model: Served, taskset: Taskset) -> EnvironmentAgent:
    solver = config.solver
    return EnvironmentAgent(
        model.url,
        model.name,
        model.tokenizer,
        taskset=taskset,
        limits=fitting(limits_of(config), solver.max_context_tokens),
        temperature=solver.temperature,
        concurrency=solver.concurrency,
        deadline_s=solver.deadline_s,
        key_variable=model.key,
    )


def _report(
    config: DictConfig,
    model: str,
    conditions: dict[str, Any],
    taskset: Taskset,
    records: Sequence[dict[str, Any]],
    failed: Sequence[Failed[Row]],
) -> None:
    folder, reasons = Path(config.run.dir), Counter(failure.reason for failure in failed)
    score: EnvironmentScore = score_episodes(records, len(failed))
    console().print(environment_table(f"{config.run.name}: {model}", taskset.name, score))
    print(f"held out: {taskset.held_out}")
    for reason, times in reasons.most_common(3):
        print(f"failed {times} times: {reason}")
    report = {
        "model": model,
        "conditions": conditions,
        "held_out": taskset.held_out,
        "benchmarks": {taskset.name: asdict(score)},
        "averages": {},
        "failures": reasons,
    }
    atomic_write(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    announce(folder / REPORT)
    tokens = sum(record["tokens_in"] + record["tokens_out"] for record in records)
    figures = {"solved": score.em, "reward": score.reward, "failed": len(failed)}
    write_result(config, {"answers": folder / ANSWERS, "report": folder / REPORT}, tokens, figures)
