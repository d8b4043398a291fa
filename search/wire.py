"""The wire format between the retrieval server and its clients, which is Search-R1's.

`POST /retrieve {"queries": [str], "topk": int, "return_scores": bool}` is answered by `{"result": [[item]]}`,
one list per query; an item is a `Passage`, or a `ScoredPassage` if `return_scores` is true.
"""

import os

from typing_extensions import TypedDict  # pydantic takes typing.TypedDict from Python 3.12 on only

MAX_TOPK = 100
"""The maximum number of passages per query."""
TOKEN_VARIABLE = "RETRIEVAL_TOKEN"
"""The environment variable with the bearer token; every process of a run inherits it. A config key or a flag
would show it in the run's files and in the process list."""


class Passage(TypedDict):
    """One passage of the corpus; `contents` is the title, a newline and the text."""

    title: str
    text: str
    contents: str


class ScoredPassage(TypedDict):
    """A passage with the cosine similarity of query and passage, in [-1, 1]."""

    document: Passage
    score: float


def read_token() -> str | None:
    """Return the bearer token of the environment, if any; raises ValueError if it cannot be sent."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    # Checked here, because an HTTP library that rejects it would print it.
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{TOKEN_VARIABLE} holds characters that an HTTP header cannot carry")
    return token or None


def make_passage(title: str, text: str) -> Passage:
    """Return the passage of a document."""
    return {"title": title, "text": text, "contents": f"{title}\n{text}"}
