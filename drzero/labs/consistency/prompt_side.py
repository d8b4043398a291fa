"""Check of the prompt that a server makes of messages by itself, against the ids that we make of them.

An agent that talks to a chat endpoint depends on the server's template: a system prompt that it drops, a tool
that it does not render or a generation prompt of another model are invisible in what comes back.
"""

from collections.abc import Sequence
from typing import Any

from drzero.labs.consistency.check import Case, Check
from drzero.labs.consistency.engine import ServerPrompt
from drzero.labs.consistency.prompts import Prompt

_SHOWN = 12
"""Ids around the first difference that a case shows."""
_ADVICE = (
    "the server renders messages otherwise: compare its chat template (chat_template.jinja, "
    "tokenizer_config.json, --chat-template) with that of base_model, and look for a system prompt that is "
    "missing or added"
)


def check_prompts(prompts: Sequence[Prompt], made: Sequence[ServerPrompt | None], tokenizer: Any) -> Check:
    """The server's ids of each prompt, or, where it shows none, their number."""
    name, limit = "prompt of messages", "all as ours"
    asked = [(p, m) for p, m in zip(prompts, made, strict=True) if m is not None]
    if not asked:
        return Check(name, "the server has no chat endpoint", limit, None)
    if all(theirs.ids is None and theirs.count is None for _, theirs in asked):
        return Check(name, "the server says neither the ids nor the number of its prompt", limit, None)
    cases = [case for prompt, theirs in asked if (case := _case(prompt, theirs, tokenizer))]
    by = "ids" if all(theirs.ids is not None for _, theirs in asked) else "numbers of tokens"
    found = f"{len(asked) - len(cases)} of {len(asked)} as ours, by their {by}"
    if cases:
        found += f"; {cases[0]['in_words']}"
    return Check(name, found, limit, not cases, _ADVICE, cases)


def _case(prompt: Prompt, theirs: ServerPrompt, tokenizer: Any) -> Case | None:
    if theirs.ids is None:
        if theirs.count in (None, len(prompt.ids)):
            return None
        words = f"{theirs.count} tokens for our {len(prompt.ids)}"
        return {"check": "prompt", "prompt": prompt.name, "in_words": words}
    if theirs.ids == prompt.ids:
        return None
    pairs = zip(prompt.ids, theirs.ids, strict=False)
    shorter = min(len(prompt.ids), len(theirs.ids))
    position = next((index for index, (own, other) in enumerate(pairs) if own != other), shorter)
    shown = [
        tokenizer.decode(ids[max(0, position - 2) : position + _SHOWN]) for ids in (prompt.ids, theirs.ids)
    ]
    words = (
        f"{len(theirs.ids)} tokens for our {len(prompt.ids)}, the first that differs is token {position}: "
        f"{shown[1]!r} for our {shown[0]!r}"
    )
    return {"check": "prompt", "prompt": prompt.name, "position": position, "in_words": words}
