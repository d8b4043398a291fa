"""The prompts both sides continue: a stage's rows as token ids, with the stage's score."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data.benchmarks import load_benchmark
from data.parquet_io import arrow_faults, read_parquet
from data.question_rows import FieldNames
from verl_ext.method.challenger_reward import challenger_reward
from verl_ext.method.chat import call_form, read_turn, render_prompt_ids, turn_ends
from verl_ext.method.prompts import Message, PromptForm, solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA, parse_tool_calls
from verl_ext.method.solver_reward import solver_reward
from verl_ext.method.trajectory import Trajectory, Turn

OF_CHALLENGER = "format of the question"
OF_SOLVER = "exact match"


@dataclass(frozen=True)
class Prompt:
    """One prompt, and its stage's score of an answer."""

    name: str
    messages: Sequence[Message]
    ids: list[int]
    scored_by: str
    score: Callable[[Trajectory], float] = field(repr=False)

    def score_of(self, tokenizer: Any, ids: Sequence[int]) -> float:
        """The score of a conversation that ends with this one turn."""
        text = read_turn(tokenizer, self.ids, ids)
        cut = turn_ends(tokenizer).isdisjoint(ids)
        calls = parse_tool_calls(text, call_form(tokenizer))
        return self.score(Trajectory((Turn(text, tuple(calls), cut),)))


@dataclass(frozen=True)
class Wording:
    """How to word benchmark questions as prompts."""

    form: PromptForm
    max_turns: int
    fields: FieldNames


def load_prompts(path: str, tokenizer: Any, wording: Wording, n: int, seed: int) -> list[Prompt]:
    """At most `n` rows or benchmark questions, drawn by `seed`. Raises DataError or FileNotFoundError."""
    columns: list[str] = []
    if path.endswith(".parquet") and Path(path).is_file():
        with arrow_faults(Path(path), "prepare the data again"):
            columns = pq.read_schema(path).names
    if "agent_name" in columns:
        found = read_parquet(Path(path)).to_pylist()
        rows = [(f"row {number}", row["prompt"], *_score_of(row)) for number, row in enumerate(found)]
    else:
        rows = _questions(path, wording)
    chosen = sorted(random.Random(seed).sample(range(len(rows)), min(n, len(rows))))
    return [
        Prompt(name, messages, render_prompt_ids(tokenizer, messages, [SEARCH_TOOL_SCHEMA]), by, score)
        for name, messages, by, score in (rows[index] for index in chosen)
    ]


ScoredRow = tuple[str, Sequence[Message], str, Callable[[Trajectory], float]]


def _score_of(row: dict[str, Any]) -> tuple[str, Callable[[Trajectory], float]]:
    """A solver's row has accepted answers. A challenger's is scored by format, as the rest needs a solver."""
    targets, info = row["reward_model"]["ground_truth"]["target"], row["extra_info"]
    if targets:
        return OF_SOLVER, functools.partial(_exact, targets, str(row["data_source"]))
    document, hop = str(info["document"]), int(info["hop"] or 1)
    return OF_CHALLENGER, lambda trajectory: challenger_reward(trajectory, document, hop, k=None).format


def _exact(targets: Sequence[str], source: str, trajectory: Trajectory) -> float:
    return solver_reward(trajectory, targets, source).score


def _questions(path: str, wording: Wording) -> list[ScoredRow]:
    return [
        (
            question.key,
            solver_messages(question.question, wording.form, wording.max_turns),
            OF_SOLVER,
            functools.partial(_exact, question.targets, ""),
        )
        for question in load_benchmark(path, wording.fields)
    ]
