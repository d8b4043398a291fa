"""Conversations as token ids that only ever grow.

The ids a model has generated are never decoded and tokenised again: re-tokenising gives other ids for the
same text, and then the model is trained on tokens it did not sample. So a conversation starts with
`render_prompt_ids`, goes on with the sampled ids as they are, and each round of tool responses adds
`tool_turn_ids`. This is what veRL's builder for Qwen models does in the training rollouts; here it is
without veRL, for every model that speaks ChatML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

TURN_END = "<|im_end|>"

_ASSISTANT_WITH_CALL = {
    "role": "assistant",
    "content": "",
    # Without reasoning of its own, Qwen3's template gives the last turn, and only it, an empty think block.
    "reasoning_content": "r",
    "tool_calls": [{"id": "0", "type": "function", "function": {"name": "search", "arguments": {}}}],
}
# Any conversation a template accepts will do ahead of the tool turn: its ids are cut off again.
_STAND_IN: list[Mapping[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    _ASSISTANT_WITH_CALL,
]


def demo_chat_template() -> str:
    """The project's own ChatML template for small models whose template cannot render tools."""
    return files(__package__).joinpath("chatml.jinja").read_text(encoding="utf-8")


def render_prompt_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """The ids of the first prompt, up to and including the generation prompt."""
    return _render(tokenizer, messages, tools=tools, add_generation_prompt=True)


def tool_turn_ids(tokenizer: Any, assistant_ids: Sequence[int], responses: Sequence[str]) -> list[int]:
    """The ids to append after an assistant turn and its tool responses, up to and including the generation
    prompt.

    `assistant_ids` are the turn's ids as sampled. Where they end in `<|im_end|>`, the newline that ChatML
    writes after it comes first; a turn cut off before its end is left as it is. Raises ValueError for a
    tokenizer without `<|im_end|>` and for a chat template whose rendering of a prefix changes when messages
    follow.
    """
    tool_messages = [{"role": "tool", "content": response} for response in responses]
    before = _render(tokenizer, _STAND_IN)
    after = _render(tokenizer, [*_STAND_IN, *tool_messages], add_generation_prompt=True)
    if after[: len(before)] != before:
        raise ValueError(
            "the chat template rewrites earlier turns when tool responses follow: it cannot be used here"
        )
    ended = bool(assistant_ids) and assistant_ids[-1] == turn_end_id(tokenizer)
    newline = tokenizer.encode("\n", add_special_tokens=False) if ended else []
    return newline + after[len(before) :]


def turn_end_id(tokenizer: Any) -> int:
    """The id of `<|im_end|>`; raises ValueError when the tokenizer has none."""
    token_id = tokenizer.convert_tokens_to_ids(TURN_END)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no {TURN_END}: only ChatML models are supported"
        )
    return int(token_id)


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
) -> list[int]:
    ids = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
    )
    return [int(token) for token in ids]
