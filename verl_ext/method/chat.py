"""Conversations as token ids that are only ever appended to (token in, token out).

    ids = render_prompt_ids(tokenizer, messages, [SEARCH_TOOL_SCHEMA])
    ids += sampled_ids + tool_turn_ids(tokenizer, sampled_ids, ["[1] Orrin: a town …"])

Sampled ids are never decoded and tokenised again: the same text can have other ids, and the model would then
be trained on tokens that it did not sample. veRL's builder for Qwen models does the same in the training
rollouts; this is the version without veRL, for every ChatML model.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

TURN_END = "<|im_end|>"

# Any conversation that a template accepts serves as the prefix of the tool turn: its ids are cut off.
_STAND_IN: list[Mapping[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "",
        # Qwen3's template gives the last turn, and only that, an empty think block unless it has reasoning.
        "reasoning_content": "r",
        "tool_calls": [{"id": "0", "type": "function", "function": {"name": "search", "arguments": {}}}],
    },
]


def demo_chat_template() -> str:
    """The project's ChatML template, for small models whose own template cannot render tools."""
    return files(__package__).joinpath("chatml.jinja").read_text(encoding="utf-8")


def render_prompt_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """The ids of the first prompt, up to and including the generation prompt."""
    return _render(tokenizer, messages, tools=tools, add_generation_prompt=True)


def tool_turn_ids(tokenizer: Any, assistant_ids: Sequence[int], responses: Sequence[str]) -> list[int]:
    """The ids that follow an assistant turn: its tool responses, up to and including the generation prompt.

    `assistant_ids` are the turn's ids as sampled. If they end in `<|im_end|>`, the result starts with the
    newline that ChatML writes after it; a truncated turn is left as it is. Raises ValueError for a tokenizer
    without `<|im_end|>` and for a chat template that renders a prefix differently when messages follow.
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


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options)
    return [int(token) for token in ids]
