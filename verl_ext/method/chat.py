"""Conversations as token ids that only grow (token in, token out), by the model's own chat template.

Sampled ids are never tokenized again: other ids with the same text would be trained on. What follows a turn
is cut out of a rendering of a stand-in before the same messages. So a turn keeps its thinking, which a
template may leave out later.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from jinja2 import TemplateError

from environments.call import FORMS, PYTHON_TAG, TOOL_CALLS, parse_calls

_OPENED = re.compile(r"<think>(?:\s*</think>)?\s*\Z")
_OPENED_IDS = 32  # of a prompt's end, enough for these tags where a character is a token
_AWAITS_TOOL = "<|eom_id|>"  # Llama 3 may end a turn with it that waits for a tool
_CALL_ID = re.compile("[A-Za-z0-9]{9}")

# Stand-ins. With reasoning, because Qwen 3's template gives a last turn without any an empty think block.
_USER: dict[str, Any] = {"role": "user", "content": "Who?"}
_SAID: dict[str, Any] = {"role": "assistant", "content": "Vell.", "reasoning_content": "r"}
_CALL = {"id": "000000000", "type": "function", "function": {"name": "search", "arguments": {}}}


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
    """`next_turn_ids` for the responses of tools."""
    return next_turn_ids(tokenizer, assistant_ids, [{"role": "tool", "content": said} for said in responses])


def next_turn_ids(
    tokenizer: Any, assistant_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """The ids of the messages after a sampled turn, and the generation prompt.

    After the turn's end comes what the template writes there, such as ChatML's newline. A turn that was cut
    off gets neither: nothing is put into the model's mouth. Raises ValueError, or the template's own error.
    """
    end = turn_end_id(tokenizer)
    calls = {"tool_calls": [_CALL]} if messages and messages[0]["role"] == "tool" else {}
    before = [_USER, _SAID | calls]
    alone = _render(tokenizer, before)
    after = _render(tokenizer, [*before, *messages], add_generation_prompt=True)
    ends = [place for place, token in enumerate(after) if token == end]
    if not 0 < alone.count(end) <= len(ends):
        raise ValueError("its chat template ends a turn in another way once messages follow")
    following = after[ends[alone.count(end) - 1] + 1 :]
    if assistant_ids and assistant_ids[-1] == end:
        return following
    written = alone[len(alone) - alone[::-1].index(end) :]  # the template may also end a conversation
    return following[_alike(written, following) :]


def opened_thinking(tokenizer: Any, prompt_ids: Sequence[int]) -> str:
    """The thinking tags that a template ends a prompt with, or "". They belong to the turn that follows."""
    found = _OPENED.search(decode(tokenizer, prompt_ids[-_OPENED_IDS:]))
    return found[0] if found else ""


def read_turn(tokenizer: Any, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """The text of a turn, as `turn_text` has it, with the thinking that its prompt ended with."""
    return opened_thinking(tokenizer, prompt_ids) + turn_text(tokenizer, ids)


def turn_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of sampled ids without special tokens, except marks of a call."""
    known = tokenizer.get_added_vocab()
    marks = {known[mark]: mark for mark in (PYTHON_TAG, TOOL_CALLS) if mark in known}
    text, start = "", 0
    for place in (place for place, token in enumerate(ids) if token in marks):
        text += decode(tokenizer, ids[start:place], skip_special_tokens=True) + marks[ids[place]]
        start = place + 1
    return text + decode(tokenizer, ids[start:], skip_special_tokens=True)


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The exact text of ids. Some tokenizers would remove spaces."""
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **options))


def call_form(tokenizer: Any, chosen: str = "auto") -> str:
    """How the model writes calls: the chosen key of `FORMS`, or its template's (hermes if that writes none).

    Raises ValueError if the template writes calls in a form that is not known.
    """
    if chosen != "auto":
        return chosen
    function = {"name": "search", "arguments": {"query": "Ostrel"}}
    try:
        text = _written_call(tokenizer, function)
    except (TemplateError, TypeError):  # it takes none
        return "hermes"
    for form in FORMS:
        calls = parse_calls(text, [{"function": function}], form)
        if [(call.name, call.arguments) for call in calls] == [tuple(function.values())]:
            return form
    if "Ostrel" in text:
        raise ValueError(f"its chat template writes calls in a form that is not known: {text.strip()[:80]!r}")
    return "hermes"


def _written_call(tokenizer: Any, function: Mapping[str, Any]) -> str:
    """An assistant's turn with this call alone, as the template writes it."""
    calling = _SAID | {"content": "", "tool_calls": [_CALL | {"function": function}]}
    prompt = tokenizer.apply_chat_template([_USER], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([_USER, calling], tokenize=False)
    written = whole[_alike(_OPENED.sub("", prompt), whole) :]
    return turn_text(tokenizer, tokenizer.encode(written, add_special_tokens=False))


def turn_end_id(tokenizer: Any) -> int:
    """The id that the chat template writes after an assistant's text.

    Raises ValueError if that is no single token, or the template's own error.
    """
    text = tokenizer.apply_chat_template([_USER, _SAID], tokenize=False)
    _, said, after = text.rpartition(_SAID["content"])
    if not said:
        raise ValueError("its chat template leaves out what an assistant says")
    ids = tokenizer.encode(after, add_special_tokens=False)
    if not ids or ids[0] not in tokenizer.get_added_vocab().values():
        raise ValueError(
            f"its chat template writes {after[:20]!r} after an assistant's text, which is no special token: "
            "nothing tells where a sampled turn ends"
        )
    return int(ids[0])


def turn_ends(tokenizer: Any) -> frozenset[int]:
    """The ids that end a sampled turn: the template's, and those with which the model ends any text."""
    known = {turn_end_id(tokenizer), tokenizer.eos_token_id, tokenizer.get_added_vocab().get(_AWAITS_TOOL)}
    return frozenset(token_id for token_id in known if token_id is not None)


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


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long both begin alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    shown = [_with_call_ids(message) for message in messages]
    ids = tokenizer.apply_chat_template(shown, tokenize=True, return_dict=False, **options)
    return [int(token) for token in ids]


def _with_call_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Mistral's templates write the ids of calls, and take only ids of nine letters or digits."""
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _call_id(call.get("id"))} for call in calls]}
    if message["role"] == "tool":
        return {**message, "tool_call_id": _call_id(message.get("tool_call_id"))}
    return message


def _call_id(given: str | None) -> str:
    if given is None or _CALL_ID.fullmatch(given):
        return given or str(_CALL["id"])
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]
