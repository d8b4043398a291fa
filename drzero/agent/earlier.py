"""A follow-up question with what was said before it, as the agent reads it.

with_earlier("And who founded it?", [("Where was Mara born?", "Orrin")])

The agent was trained on single questions, so a first question stays as it is. A later one comes after the
last exchanges in short: a small model may be confused by them, a capable one finds who "it" is.
"""

from collections.abc import Sequence

EXCHANGES = 3  # A follow-up seldom refers to anything older
_CHARACTERS = 300  # Enough for a question, and for the short answers that the agent gives

Exchange = tuple[str, str]  # a question and its answer


def with_earlier(question: str, earlier: Sequence[Exchange]) -> str:
    """The question after the last exchanges, or alone if there are none."""
    if not earlier:
        return question
    said = [f"{_short(asked)} {_short(answered)}" for asked, answered in earlier[-EXCHANGES:]]
    return "\n".join(["Asked before, with its answer:", *said, "Now answer:", question])


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 1]}…"
