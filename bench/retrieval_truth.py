"""Exact search over the stored vectors, and checks of the servers' answers against it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.retrieval_world import QUERIES_FILE, Queries
from drzero.ops.records import read_json_lines
from search.chroma.store import open_collection
from search.embedders import Embedder, EmbedderSpec

SAME_SCORE = 0.02
"""Half precision in the server moves a score by 1e-2, another query's answer is at least 0.1 off."""
TIE = 1e-5

Answer = tuple[int, list[str], list[float]]
"""Query number, titles, scores, as bench/closed_loop.py records them."""


class Checked(NamedTuple):
    """The result of checking some answers."""

    answers: int
    crossed: int
    recall: float


class Truth:
    """Vectors and titles of a collection, and an embedder for the queries."""

    def __init__(self, folder: Path, embedder: str) -> None:
        self.vectors = np.load(folder / "vectors.npy")
        records = read_json_lines(folder / "corpus.jsonl")
        self.rows = {record["title"]: row for row, record in enumerate(records)}
        self.queries = Queries.read(folder / QUERIES_FILE).texts
        self.embedder = Embedder(EmbedderSpec(embedder))

    def check(self, answers: Sequence[Answer], for_recall: int) -> Checked:
        """Compare each answer's scores with its query's cosines. Recall is over the first `for_recall`.

        An answer is crossed if a title is unknown, or a score is not the cosine of this query and that
        passage.
        """
        if not answers:
            return Checked(0, 0, float("nan"))
        asked = self.embedder.encode_queries([self.queries[n % len(self.queries)] for n, _, _ in answers])
        crossed = 0
        for vector, (_, titles, scores) in zip(asked, answers, strict=True):
            rows = [self.rows.get(title, -1) for title in titles]
            gaps = np.abs(self.vectors[rows] @ vector - np.asarray(scores, dtype=np.float32))
            crossed += bool(min(rows, default=0) < 0 or gaps.max(initial=0.0) > SAME_SCORE)
        sample = list(zip(asked[:for_recall], answers[:for_recall], strict=True))
        recall = np.mean([self._recall(vector, titles) for vector, (_, titles, _) in sample])
        return Checked(len(answers), crossed, float(recall))

    def _recall(self, vector: np.ndarray, titles: Sequence[str]) -> float:
        """Return the share of the answered passages that are among as many nearest ones, ties included."""
        cosines = self.vectors @ vector
        least = np.partition(cosines, -len(titles))[-len(titles)] - TIE
        return float(np.mean([title in self.rows and cosines[self.rows[title]] >= least for title in titles]))


def export_vectors(chroma_path: Path, collection: str, folder: Path) -> None:
    """Write the collection's vectors in the order of `corpus.jsonl`, for exact search."""
    ids = [record["id"] for record in read_json_lines(folder / "corpus.jsonl")]
    vectors: dict[str, np.ndarray] = {}
    with open_collection(chroma_path, collection) as store:
        for start in range(0, len(ids), 1000):
            page = store.collection.get(ids=ids[start : start + 1000], include=["embeddings"])
            vectors.update(zip(page["ids"], page["embeddings"], strict=True))
    np.save(folder / "vectors.npy", np.asarray([vectors[key] for key in ids], dtype=np.float32))
