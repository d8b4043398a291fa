"""What travels between the retrieval server and its clients: the wire format of Search-R1.

`POST /retrieve {"queries": [str], "topk": int, "return_scores": bool}` is answered by `{"result": [[item]]}`,
one list a query; an item is a `Passage`, or a `ScoredPassage` when scores were asked for.
"""

import os

from typing_extensions import TypedDict  # pydantic takes typing.TypedDict from Python 3.12 on only

MAX_TOPK = 100
"""The most passages that a query may ask for."""
TOKEN_VARIABLE = "RETRIEVAL_TOKEN"
"""Where servers and clients find the bearer token: in the environment, which every process of a run inherits.
A config key or a flag would put it into the run's files and into the list of processes."""


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
    """Return the bearer token of the environment, None without one; raises ValueError if it is unfit."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    # Checked here, because an HTTP library that finds it unfit would say so with the token in its message.
    if not (token.isascii() and token.isprintable()):
        raise ValueError(f"{TOKEN_VARIABLE} holds characters that an HTTP header cannot carry")
    return token or None


def make_passage(title: str, text: str) -> Passage:
    """Return the passage of a document."""
    return {"title": title, "text": text, "contents": f"{title}\n{text}"}
