"""Search of a corpus as an environment: the solver's task, tool and reward as `env=search`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from data.benchmarks import load_benchmark
from environments.conversation import Message, Turn, tool_message
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score
from environments.taskset import Taskset
from search.client import SearchClient, SearchUnavailable
from verl_ext.clients.search_agent import answered
from verl_ext.method import trajectory as method
from verl_ext.method.prompts import PromptForm, solver_messages
from verl_ext.method.search_calls import MAX_CALLS_PER_TURN, SEARCH_TOOL_SCHEMA, parse_tool_calls, search_call
from verl_ext.method.solver_reward import solver_reward


class SearchTaskset(Taskset):
    """Questions that the model answers by searching."""

    needs_retrieval = True
    filters_groups = True
    held_out = "The questions of the evaluation's own file."

    def __init__(
        self,
        *,
        train: str,
        eval: str,
        url: str,
        topk: int,
        deadline_s: float,
        response_limit: int,
        form: PromptForm,
        turns: int,
    ) -> None:
        self._files: dict[str, str] = {"train": train, "eval": eval}
        self.files = [Path(eval)]
        self.client = SearchClient(url, topk=topk, deadline_s=deadline_s)  # shared by all episodes
        self.response_limit, self.form, self.max_turns = response_limit, form, turns
        self.timeout_s = 2 * deadline_s

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """Return questions of the split's file, shuffled by the seed."""
        questions = load_benchmark(Path(self._files[split]))
        Random(seed).shuffle(questions)
        return [
            Row(question.key, {"question": question.question, "targets": list(question.targets)})
            for question in questions[:n]
        ]

    def episode(self, row: Row) -> "SearchEpisode":
        """Return the episode of one question."""
        return SearchEpisode(self, str(row.data["question"]), list(row.data["targets"]))


class SearchEpisode(Episode):
    """One question, answered after any number of searches."""

    def __init__(self, taskset: SearchTaskset, question: str, targets: Sequence[str]) -> None:
        self._taskset, self._question, self._targets = taskset, question, targets
        self._turns: list[method.Turn] = []

    def messages(self) -> Sequence[Message]:
        """Return the solver's prompt."""
        return solver_messages(self._question, self._taskset.form, self._taskset.max_turns)

    def tools(self) -> Sequence[dict[str, Any]]:
        """Return the search tool."""
        return [SEARCH_TOOL_SCHEMA]

    async def respond(self, turn: Turn) -> Sequence[Message] | None:  # type: ignore[override]
        """Return the passages of the turn's searches. A turn without a search ends the episode."""
        # Calls of another form than Hermes' are read by the episode's player alone.
        calls = tuple(parse_tool_calls(turn.text) or map(search_call, turn.calls))
        self._turns.append(method.Turn(turn.text, calls, turn.truncated))
        # The model would not read the passages of a call in its last turn.
        if not calls or len(self._turns) == self._taskset.max_turns:
            return None
        client, limit = self._taskset.client, self._taskset.response_limit
        asked = (answered(call, client, None, limit) for call in calls[:MAX_CALLS_PER_TURN])
        told = await asyncio.gather(*asked)
        if failed := [call for call in told if call.failed]:
            raise SearchUnavailable(failed[0].error)  # spoils the episode
        return [tool_message(call.response or "") for call in told]

    def score(self) -> Score:
        """Score by exact match with an answer."""
        scored = solver_reward(method.Trajectory(tuple(self._turns)), self._targets)
        return Score(scored.score, bool(scored.score), {"exact": scored.score, "f1": scored.f1})


def load(**options: Any) -> SearchTaskset:
    """Return the taskset. config/environment/search.yaml has its options."""
    return SearchTaskset(**options)
