"""Conversations as token ids that only grow (token in, token out), for any ChatML model.

Sampled ids are never tokenized again: other ids with the same text would be trained on.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

TURN_END = "<|im_end|>"
_OPENED = re.compile(r"<think>(?:\s*</think>)?\s*\Z")
_OPENED_IDS = 32  # of a prompt's end, enough for these tags where a character is a token

# Any conversation that a template accepts can precede the tool turn, because its ids are cut off.
_STAND_IN: list[Mapping[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "",
        # Qwen3's template adds an empty think block to the last turn unless it has reasoning.
        "reasoning_content": "r",
        "tool_calls": [{"id": "0", "type": "function", "function": {"name": "search", "arguments": {}}}],
    },
]


def demo_chat_template() -> str:
    """The project's ChatML template, for models whose own template cannot render tools."""
    return files(__package__).joinpath("chatml.jinja").read_text(encoding="utf-8")


def render_prompt_ids(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **options: Any,
) -> list[int]:
    """The ids of the first prompt with the generation prompt. `options` go to the template."""
    return _render(tokenizer, messages, tools=tools, add_generation_prompt=True, **options)


def tool_turn_ids(tokenizer: Any, assistant_ids: Sequence[int], responses: Sequence[str]) -> list[int]:
    """The ids of the tool responses and the generation prompt. After `<|im_end|>` a newline comes first.

    Raises ValueError for a tokenizer without `<|im_end|>`, or a template that changes earlier turns.
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


def next_turn_ids(
    tokenizer: Any, assistant_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Like `tool_turn_ids`, for messages of any role, whatever a template does to earlier turns."""
    end = turn_end_id(tokenizer)
    ends_before = _render(tokenizer, _STAND_IN).count(end)
    after = _render(tokenizer, [*_STAND_IN, *messages], add_generation_prompt=True)
    place = [index for index, token in enumerate(after) if token == end][ends_before - 1]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    following = after[place + 1 :]
    if following[: len(newline)] != newline:
        raise ValueError("the chat template writes no newline after a turn: it cannot be used here")
    ended = bool(assistant_ids) and assistant_ids[-1] == end
    return following if ended else following[len(newline) :]


def opened_thinking(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """The thinking tags that a template ends a prompt with, or "". They belong to the turn that follows."""
    found = _OPENED.search(tokenizer.decode(list(prompt_ids[-_OPENED_IDS:]), skip_special_tokens=False))
    return found[0] if found else ""


def read_turn(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text of a turn without special tokens, with the thinking that its prompt ended with."""
    return opened_thinking(tokenizer, prompt_ids) + str(tokenizer.decode(list(ids), skip_special_tokens=True))


def turn_end_id(tokenizer: Any) -> int:
    """The id of `<|im_end|>`. Raises ValueError if the tokenizer has none."""
    token_id = tokenizer.convert_tokens_to_ids(TURN_END)
    if token_id is None or token_id == tokenizer.unk_token_id:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no {TURN_END}: only ChatML models are supported"
        )
    return int(token_id)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An OpenAI message as chat templates take it. Raises ValueError for content other than text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has something other than text: only text is read here")
        content = "\n".join(part["text"] for part in content)
    plain = {**message, "content": content}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_call_object(call) for call in message["tool_calls"]]
    return plain


def _call_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    with suppress(TypeError, ValueError):  # already an object, or not JSON
        function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    ids = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options)
    return [int(token) for token in ids]
