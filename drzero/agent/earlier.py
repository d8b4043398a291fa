"""A follow-up question with the last exchanges, as the agent reads it.

The agent was trained on single questions. A capable model finds in the last exchanges who "it" is. A small
one with the short prompt gave its last answer once more, so it reads each question alone.
"""

from collections.abc import Sequence

from verl_ext.method.prompts import PromptForm

EXCHANGES = 3  # A follow-up seldom refers to anything older
_CHARACTERS = 300  # Enough for a question, and for the short answers that the agent gives

Exchange = tuple[str, str]  # a question and its answer


def with_earlier(question: str, earlier: Sequence[Exchange], form: PromptForm = "full") -> str:
    """The question after the last exchanges, or alone."""
    if form == "short" or not earlier:
        return question
    said = [f"{_short(asked)} {_short(answered)}" for asked, answered in earlier[-EXCHANGES:]]
    return "\n".join(["Asked before, with its answer:", *said, "Now answer:", question])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 1]}…"
