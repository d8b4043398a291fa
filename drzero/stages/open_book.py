"""The open-book gate: the solver answers each passing pair with its passages in view."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.journal import Journal
from data.pairs import Pair
from drzero.ops.services.services import ServiceGroup
from drzero.recipe.tables import console
from drzero.stages.conversations import Failed, play_all, served_agent, with_services
from drzero.stages.models import StageModel, own_model, spent
from drzero.stages.services import solver_spec
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.method.challenger_reward import open_book_fault, open_book_messages
from verl_ext.method.solver_reward import solver_answer

ANSWERS = "open_book.jsonl"

Key = tuple[int, int]  # a pair's prompt and sample


def check_open_book(
    config: DictConfig, pairs: Sequence[Pair], samples: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Ask the solver for the answers its journal lacks. `samples` identifies the pairs' samples.

    Returns the journal's records. Raises OutOfTime, ServiceDied or ConversationsFailed.
    """
    # The reference engine reads all waiting prompts before it answers a probe, and these are long.
    at_once = 8 if config.solver.engine == "reference" else config.solver.concurrency
    solver = {
        "model_path": config.gates.open_book_model,
        "temperature": 0.0,
        # A conversation, and the document from the challenger's prompt.
        "max_context_tokens": config.solver.max_context_tokens + config.data.max_prompt_length,
        "max_turns": 1,
        "concurrency": at_once,
    }
    served = OmegaConf.merge(config, {"solver": solver})
    assert isinstance(served, DictConfig)
    model = own_model(served, "solver", "gates.open_book_model")
    identity = {**samples, "open_book_model": model.identity, "form": config.prompts.form}
    with Journal(Path(config.run.dir) / ANSWERS, identity) as journal:
        known = {(record["prompt_index"], record["sample"]) for record in journal.records}
        missing = [pair for pair in pairs if (pair.prompt_index, pair.sample) not in known]
        console().print(
            f"{len(pairs)} pairs to check with their passages, {len(missing)} still to ask, {model.shown}",
            soft_wrap=True,
        )
        if missing:
            ask = partial(ask_solver, served, model, missing, journal)
            with_services(config, [solver_spec(served)], journal.path, ask)
        return journal.records


async def ask_solver(
    config: DictConfig, model: StageModel, pairs: Sequence[Pair], journal: Journal, services: ServiceGroup
) -> list[Failed[Pair]]:
    """Returns the pairs that failed twice. Raises ConversationsFailed if too many did."""
    async with served_agent(SearchAgent, config, model) as agent:
        form, limit = config.prompts.form, config.retrieval.response_limit
        turns = config.rollout.max_turns

        def keep(pair: Pair, conversation: Conversation) -> None:
            answer = {"answer": solver_answer(conversation.trajectory)}
            key = {"prompt_index": pair.prompt_index, "sample": pair.sample}
            journal.append(key | answer | spent(conversation))

        return await play_all(
            config,
            pairs,
            lambda pair: agent.converse(
                open_book_messages(pair.question, pair.document, pair.trajectory, form, turns, limit),
                pair.seed,
            ),
            keep,
            services,
            total=len(journal.records) + len(pairs),
            description="open book",
        )


def verdicts(pairs: Sequence[Pair], records: Sequence[Mapping[str, Any]]) -> dict[Key, str | None]:
    """The reason against each of these pairs, None if its answer passes."""
    answers = {(record["prompt_index"], record["sample"]): record["answer"] for record in records}
    reasons: dict[Key, str | None] = {}
    for pair in pairs:
        key = pair.prompt_index, pair.sample
        if key not in answers:
            reasons[key] = "open_book: not asked because services failed; rerun to ask"
        else:
            fault = open_book_fault(answers[key], pair.answer)
            reasons[key] = f"open_book: {fault}" if fault else None
    return reasons
