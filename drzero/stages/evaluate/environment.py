"""Evaluate in an environment: the held-out tasks a model solves, and its reward by part."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drzero.recipe.environment import limits_of, load_taskset, rows_of
from drzero.recipe.fingerprint import fingerprint
from drzero.stages.evaluate import Records
from drzero.stages.evaluate.environment_scores import environment_table, score_episodes
from drzero.stages.evaluate.evaluation import Evaluation, Scores
from drzero.stages.models import StageModel
from environments.row import Row
from verl_ext.clients.environment_agent import EnvironmentAgent, EpisodeAttempt, fitting
from verl_ext.episodes import episode_turns


def environment_evaluation(config: DictConfig, model: StageModel) -> Evaluation:
    """Rows of the environment's `eval` split, played as in training."""
    taskset, solver = load_taskset(config), config.solver

    @asynccontextmanager
    async def open_agent() -> AsyncIterator[Callable[[Row], Awaitable[EpisodeAttempt]]]:
        agent = EnvironmentAgent(
            model.url,
            model.name,
            model.tokenizer,
            taskset=taskset,
            limits=fitting(limits_of(config, model.tokenizer), solver.max_context_tokens),
            temperature=solver.temperature,
            concurrency=solver.concurrency,
            deadline_s=solver.deadline_s,
            key_variable=model.key_variable,
        )
        try:
            yield agent.attempt
        finally:
            await agent.aclose()

    def scores(records: Records, failed: Sequence[Row], title: str) -> Scores:
        score = score_episodes(records, len(failed))
        rows = {"held_out": taskset.held_out, "benchmarks": {taskset.name: asdict(score)}, "averages": {}}
        table = environment_table(title, taskset.name, score)
        figures = {"solved": score.em, "reward": score.reward}
        return Scores(table, rows, figures, [f"held out: {taskset.held_out}"])

    return Evaluation(
        jobs=rows_of(taskset, "eval", config.num_examples, config.data.seed),
        key=lambda row: row.id,
        conditions=episode_conditions(config, model.identity, taskset.files),
        to_do=f"{taskset.name}: {{total}} rows, {{missing}} of them still to play",
        agent=open_agent,
        record=partial(episode_record, taskset.name),
        scores=scores,
        searches=taskset.needs_retrieval,
    )


def episode_conditions(config: DictConfig, model: str, files: Sequence[Path]) -> dict[str, Any]:
    """Model, environment with its files, and the limits and sampling of an episode."""
    keys = ["solver.temperature", "rollout.max_tokens_per_turn", "data.max_prompt_length"]
    keys += ["data.max_response_length", "solver.max_context_tokens"]
    keys += [] if config.endpoint else ["solver.engine", "solver.dtype"]
    environment = OmegaConf.to_container(config.environment, resolve=True)
    assert isinstance(environment, dict)
    # A service may listen elsewhere at each start.
    options = environment["options"].items()
    environment["options"] = {name: value for name, value in options if name not in ("url", "search_url")}
    chosen = {key: OmegaConf.select(config, key) for key in keys}
    contents = {file.name: fingerprint(file) for file in files}
    return {"model": model, "environment": environment, "files": contents, **chosen}


def episode_record(environment: str, row: Row, attempt: EpisodeAttempt) -> dict[str, Any]:
    """The journal's record of a finished episode."""
    played = attempt.played
    assert played is not None and played.score is not None
    rows = played.extra.get("rows", [played])
    turns = episode_turns(rows)
    calls = [call for turn in turns for call in turn.calls]
    of_agent = [{"trajectory": one.conversation.to_dict(), "agent": one.agent} for one in rows]
    return {
        "key": row.id,
        "benchmark": environment,
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
        **({"rows": of_agent} if played.agent else {}),
    }
