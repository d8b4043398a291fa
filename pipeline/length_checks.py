"""Lengths: prompt, response and turns against one another and against what the models were made for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.finding import Finding, error, warning
from verl_ext.sglang_compat import OWN_POSITIONS

if TYPE_CHECKING:
    from pipeline.subject import Subject


def check_lengths(subject: Subject) -> Iterator[Finding]:
    """A whole conversation must fit the model and the engine; a turn, the response."""
    config = subject.config
    longest = config.data.max_prompt_length + config.data.max_response_length
    rollout = config.actor_rollout_ref.rollout
    shape = subject.shape(config.actor_rollout_ref.model.path)
    if shape and shape.context and longest > shape.context:
        yield error(
            "data.max_response_length",
            config.data.max_response_length,
            f"prompt and response of {longest} tokens (data.max_prompt_length + data.max_response_length) "
            "are more "
            f"than the {shape.context} positions of {config.actor_rollout_ref.model.path}",
            "shorten one of them, or take a model with a longer context",
        )
    limit = rollout.max_model_len
    if limit is not None and limit < longest + (rollout.name == "sglang"):
        yield error(
            "actor_rollout_ref.rollout.max_model_len",
            limit,
            f"the rollout engine takes {limit} tokens, and a conversation may have {longest} (SGLang keeps "
            "one more "
            "for itself)",
            f"leave it unset, or set it to {longest + 1} at least",
        )
    if config.rollout.max_tokens_per_turn > config.data.max_response_length:
        yield error(
            "rollout.max_tokens_per_turn",
            config.rollout.max_tokens_per_turn,
            f"one turn may be longer than the whole response (data.max_response_length="
            f"{config.data.max_response_length}), which then ends before a tool answers",
            "make it a third of the response or less",
        )
    if rollout.multi_turn.max_tool_response_length <= config.retrieval.response_limit:
        yield error(
            "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
            rollout.multi_turn.max_tool_response_length,
            f"veRL would cut the middle out of tool responses of up to retrieval.response_limit="
            f"{config.retrieval.response_limit} characters",
            "leave it as it is in the recipe, one above that limit",
        )


def check_served_lengths(subject: Subject) -> Iterator[Finding]:
    """The same for the model that is served."""
    config, solver = subject.config, subject.config.solver
    if not subject.serves_model:
        return
    shape = subject.shape(solver.model_path)
    context = max(shape.context, shape.stretched_context) if shape else 0
    own = OWN_POSITIONS if solver.engine == "sglang" else 0
    if shape and context and solver.max_context_tokens + own > context:
        kept = f", of which SGLang keeps {own}" if own else ""
        yield error(
            "solver.max_context_tokens",
            solver.max_context_tokens,
            f"conversations of {solver.max_context_tokens} tokens are more than the {context} positions of "
            f"{solver.model_path}{kept}",
            f"set it to {context - own} at most",
        )
    if solver.max_tokens_per_turn >= solver.max_context_tokens:
        yield error(
            "solver.max_tokens_per_turn",
            solver.max_tokens_per_turn,
            f"one turn may fill all of solver.max_context_tokens={solver.max_context_tokens}, prompt "
            "included",
            "make it a third of that or less",
        )
    passages = config.retrieval.response_limit / 4
    if passages > solver.max_context_tokens / 2:
        yield warning(
            "retrieval.response_limit",
            config.retrieval.response_limit,
            f"one tool response may take about {passages:.0f} of the {solver.max_context_tokens} tokens of a "
            "conversation",
            "lower it, or raise solver.max_context_tokens",
        )
