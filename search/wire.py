"""What travels between the retrieval server and its clients: the wire format of Search-R1.

`POST /retrieve {"queries": [str], "topk": int, "return_scores": bool}` is answered by `{"result": [[item]]}`,
one list a query; an item is a `Passage`, or a `ScoredPassage` when scores were asked for.
"""

from typing_extensions import TypedDict  # pydantic takes typing.TypedDict from Python 3.12 on only


class Passage(TypedDict):
    """One passage of the corpus; `contents` is the title, a newline and the text."""

    title: str
    text: str
    contents: str


class ScoredPassage(TypedDict):
    """A passage with the cosine similarity of query and passage, in [-1, 1]."""

    document: Passage
    score: float


def make_passage(title: str, text: str) -> Passage:
    """Return the passage of a document."""
    return {"title": title, "text": text, "contents": f"{title}\n{text}"}
