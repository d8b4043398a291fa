"""Parts for the tests of the FAISS store: small indices in the layout in which the field publishes them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np


def contents_of(number: int) -> str:
    """A passage as Search-R1's corpora have it: the title in quotes on the first line."""
    return f'"Title {number}"\nText {number} – of\ntwo lines.'


def write_corpus(path: Path, contents: Sequence[str]) -> Path:
    """Write a corpus in Search-R1's layout."""
    lines = (json.dumps({"id": str(row), "contents": text}) for row, text in enumerate(contents))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def made(kind: str, vectors: np.ndarray) -> Any:
    dimension = vectors.shape[1]
    index: Any
    if kind == "flat":
        index = faiss.IndexFlatIP(dimension)
    elif kind == "l2":
        index = faiss.IndexFlatL2(dimension)
    elif kind == "hnsw":
        index = faiss.IndexHNSWFlat(dimension, 64, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.index_factory(dimension, kind, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
    index.add(vectors)
    return index


def publish(folder: Path, vectors: np.ndarray, kind: str = "flat", contents: Sequence[str] = ()) -> Path:
    """Write `e5_Flat.index` and `wiki-18.jsonl` to a new folder, and return the index's path."""
    folder.mkdir(parents=True)
    write_corpus(folder / "wiki-18.jsonl", contents or [contents_of(row) for row in range(len(vectors))])
    faiss.write_index(made(kind, vectors), str(folder / "e5_Flat.index"))
    return folder / "e5_Flat.index"
