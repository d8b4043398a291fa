"""The open-book gate: each pair that passed the other gates is put to the solver with its book open.

The journal keeps the answers, so that a rerun asks only what is missing. What the solver is shown is in
`verl_ext.method.open_book`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from data.journal import Journal
from data.pairs import Pair
from drzero.ops.services.services import ServiceGroup
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.fingerprint import fingerprint_model
from drzero.stages.conversations import (
    Failed,
    check_failed_share,
    completions_url,
    play_all,
    served_agent,
    with_services,
)
from drzero.stages.services import solver_spec
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.method.open_book import open_book_fault, open_book_messages
from verl_ext.method.solver_reward import solver_answer

ANSWERS = "open_book.jsonl"
_NAME = "solver"

Key = tuple[int, int]
"""A pair's prompt and sample."""


@dataclass(frozen=True)
class OpenBook:
    """What the check found."""

    verdicts: dict[Key, str | None]
    """The reason against each pair that was asked, None if it passed."""
    records: list[dict[str, Any]]
    """The journal's: one for each answer."""


def check_open_book(config: DictConfig, pairs: Sequence[Pair], samples: Mapping[str, Any]) -> OpenBook:
    """Ask the solver `gates.open_book_model` for the answers that the journal lacks.

    `samples` identifies the samples that the pairs are from. Raises as a sampling stage does: OutOfTime,
    ServiceDied, ConversationsFailed.
    """
    # The reference engine reads all waiting prompts before it answers a probe, and these are long ones.
    at_once = 8 if config.solver.engine == "reference" else config.solver.concurrency
    served = OmegaConf.merge(
        config,
        {
            "solver": {
                "model_path": config.gates.open_book_model,
                "temperature": 0.0,
                # What a conversation may hold, and the document, which the challenger has in its prompt.
                "max_context_tokens": config.solver.max_context_tokens + config.data.max_prompt_length,
                "max_turns": 1,
                "concurrency": at_once,
            }
        },
    )
    assert isinstance(served, DictConfig)
    folder = Path(config.run.dir)
    model = str(served.solver.model_path)
    identity = {**samples, "open_book_model": fingerprint_model(model), "form": config.prompts.form}
    with Journal(folder / ANSWERS, identity) as journal:
        known = {(record["prompt_index"], record["sample"]) for record in journal.records}
        missing = [pair for pair in pairs if (pair.prompt_index, pair.sample) not in known]
        print(f"{len(pairs)} pairs to check with their passages, {len(missing)} still to ask, {model}")
        ask = partial(
            ask_solver, served, load_chat_tokenizer(model, "gates.open_book_model"), missing, journal
        )
        if missing:
            with_services(config, [solver_spec(served, _NAME)], journal.path, ask)
    return OpenBook(verdicts(pairs, journal.records), journal.records)


async def ask_solver(
    config: DictConfig, tokenizer: Any, pairs: Sequence[Pair], journal: Journal, services: ServiceGroup
) -> list[Failed[Pair]]:
    """Ask about these pairs; each answer goes to the journal. Returns the pairs that failed twice.

    Raises ConversationsFailed if they are too large a share.
    """
    async with served_agent(SearchAgent, config, completions_url(config), _NAME, tokenizer) as agent:
        form, limit = config.prompts.form, config.retrieval.response_limit
        turns = config.rollout.max_turns
        failed = await play_all(
            pairs,
            lambda pair: agent.converse(
                open_book_messages(pair.question, pair.document, pair.trajectory, form, turns, limit),
                pair.seed,
            ),
            lambda pair, conversation: journal.append(_record(pair, conversation)),
            services,
            concurrency=config.solver.concurrency,
            description="open book",
        )
    check_failed_share(failed, len(pairs), config.run.max_failed_share)
    return failed


def _record(pair: Pair, conversation: Conversation) -> dict[str, Any]:
    return {
        "prompt_index": pair.prompt_index,
        "sample": pair.sample,
        "answer": solver_answer(conversation.trajectory),
        "tokens_in": conversation.tokens_in,
        "tokens_out": conversation.tokens_out,
        "latency_s": round(conversation.latency_s, 2),
    }


def verdicts(pairs: Sequence[Pair], records: Sequence[Mapping[str, Any]]) -> dict[Key, str | None]:
    """The reason against each of these pairs, None for the answer that it has."""
    answers = {(record["prompt_index"], record["sample"]): record["answer"] for record in records}
    reasons: dict[Key, str | None] = {}
    for pair in pairs:
        key = pair.prompt_index, pair.sample
        if key not in answers:
            reasons[key] = "open_book: the solver was not asked, because services failed: rerun to ask it"
        else:
            fault = open_book_fault(answers[key], pair.answer)
            reasons[key] = f"open_book: {fault}" if fault else None
    return reasons
