"""Turns in veRL's own agent loop, by the model's chat template (veRL 0.9.1)."""

import logging
from typing import Any

from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, MergeResult

from verl_ext.method.chat import next_turn_ids

NO_FAMILY = {"hf_model_type": None}
"""Keeps veRL's agent loop from a family's builder, which may refuse the tokenizer. Ours takes its place."""
# veRL would warn of it at every rollout.
logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").setLevel(logging.ERROR)


class TurnBuilder(ContinuousTokenBuilder):
    """veRL's builders know a few families by `model_type`. This one has the ids of solver attempts."""

    def merge_context_tokens(
        self,
        previous_messages: list[dict[str, Any]],
        updated_messages: list[dict[str, Any]],
        runtime_token_ids: list[int],
        *,
        tools: list[dict[str, Any]] | None = None,
    ) -> MergeResult:
        """The ids so far, as sampled, and the messages that follow."""
        new = next_turn_ids(self.tokenizer, runtime_token_ids, updated_messages[len(previous_messages) :])
        return MergeResult(token_ids=[*runtime_token_ids, *new], appended_token_count=len(new))
