"""Search-R1's wire format: {"queries": [str], "topk": int, "return_scores": bool} to {"result": [[item]]}."""

from typing_extensions import TypedDict  # pydantic takes typing.TypedDict from Python 3.12 on only

from drzero.ops.bearer import bearer_of

MAX_TOPK = 100  # Most passages per query
TOKEN_VARIABLE = "RETRIEVAL_TOKEN"  # The environment variable with the bearer token


class Passage(TypedDict):
    """A passage of the corpus. `contents` is title, newline, text. `id` is its id in the index."""

    title: str
    text: str
    contents: str
    id: str


class ScoredPassage(TypedDict):
    """A passage and its cosine similarity to the query, in [-1, 1]."""

    document: Passage
    score: float


def token_advice() -> str:
    """Return what to do about a 401, without revealing the token."""
    other = ", which is another than the one there" if bearer_of(TOKEN_VARIABLE) else ""
    return f"set {TOKEN_VARIABLE} to its token{other}"


def make_passage(key: str, title: str, text: str) -> Passage:
    """Return the passage of a document."""
    return {"title": title, "text": text, "contents": f"{title}\n{text}", "id": key}
