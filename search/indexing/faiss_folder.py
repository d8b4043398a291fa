"""Write a FAISS index folder (index, passages, record) from the journal of an index build.

Flat and HNSW give back unchanged vectors. PQ holds codes, so an update embeds its corpus again.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import faiss
import msgspec
import numpy as np

from drzero.ops.files import publish
from search.errors import StoreError
from search.faiss.jsonl_passages import JsonlPassages
from search.faiss.location import CORPUS_FILE, RECORD, FaissFiles
from search.faiss.store import map_index
from search.indexing.collection import with_progress
from search.indexing.journal import IndexJournal
from search.indexing.size import CODES, CONSTRUCTION, FAISS_LINKS, FaissSize, code_bytes, lists_of, sample_of
from search.stored_index import INDEX_FILE, CollectionInfo


@dataclass(frozen=True)
class FaissFolder:
    """A folder with one FAISS index of a kind, which need not exist yet."""

    draws: ClassVar[int] = 0  # rows are drawn by number
    folder: Path
    kind: str = "flat"

    def __str__(self) -> str:
        return f"the FAISS index in {self.folder}"

    @property
    def files(self) -> FaissFiles:
        """Its files, existing or not."""
        return FaissFiles(self.folder / INDEX_FILE, self.folder / CORPUS_FILE)

    def metadata(self) -> Mapping[str, Any] | None:
        """Return how the index was built, None without one. Raises StoreError for any other folder."""
        record = self.files.read_record()
        if record is not None:
            return record.info.to_metadata()
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return None
        raise StoreError(
            f"{self.folder} exists and is no FAISS index that was built here (no {RECORD}): choose another "
            "faiss.path, or another index= for what it is"
        )

    def size(self, chunks: int, dimension: int, text_bytes: int) -> FaissSize:
        """Return the size of an index with this content."""
        return FaissSize(chunks, dimension, text_bytes, self.kind)

    def is_as_asked(self) -> bool:
        """Whether the existing index is of this kind."""
        record = self.files.read_record()
        return record is not None and record.kind == self.kind

    def check_content(self) -> None:
        """Raise StoreError if the existing files do not match their record."""
        self.files.check_content()

    def chunks(self) -> Iterator[tuple[str, str, str | None, int]]:
        """Yield each existing chunk's id, document, document digest and number of chunks."""
        for found in self._records():
            parts = int(found["chunk"].rpartition("/")[2])
            yield found["id"], found["doc_id"], found["doc_digest"], parts

    def embedded(self) -> Iterator[tuple[list[str], np.ndarray]]:
        """Yield each chunk (document, digest, part, parts, id, title, text) with its vector, if kept."""
        record = self.files.read_record()
        if record is None or record.kind not in ("flat", "hnsw"):
            return
        index = map_index(self.files.index)
        for place, row in enumerate(self._records()):
            part, _, parts = row["chunk"].partition("/")
            chunk = [row["doc_id"], row["doc_digest"], part, parts, row["id"], row["title"], row["text"]]
            yield chunk, np.asarray(index.reconstruct(place))

    def _records(self) -> Iterator[dict[str, str]]:
        with self.files.corpus.open("rb") as lines:
            yield from map(msgspec.json.decode, lines)

    def write_folder(
        self, journal: IndexJournal, info: CollectionInfo, update: bool, units: int, work: Path
    ) -> None:
        """Write the files to `work` from the journal's vectors, and rename it to the target's folder."""
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed here
        work.mkdir()
        files = FaissFiles(work / INDEX_FILE, work / CORPUS_FILE)
        index = _empty(self.kind, journal, info, units)
        stored = (journal.embedded(unit) for unit in range(units))
        with files.corpus.open("wb") as lines:
            for rows, vectors in with_progress(stored, "writing", journal.chunk_count()):
                for row in rows:
                    record = {"id": row.id, "title": row.title, "text": row.text, **row.metadata()}
                    lines.write(msgspec.json.encode(record) + b"\n")
                index.add(vectors)
        if index.ntotal != info.chunks:
            raise StoreError(
                f"{self} would hold {index.ntotal} chunks and should hold {info.chunks}: run it again"
            )
        faiss.write_index(index, str(files.index))
        JsonlPassages(files.corpus).close()  # which finds where its lines begin
        files.write_record(info, self.kind)
        publish(work, self.folder)


def _empty(kind: str, journal: IndexJournal, info: CollectionInfo, units: int) -> Any:
    index: Any
    if kind == "flat":
        return faiss.IndexFlatIP(info.dimension)
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(info.dimension, FAISS_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = CONSTRUCTION
        return index
    if info.chunks < CODES:
        raise StoreError(
            f"indexing.kind=ivfpq needs {CODES} chunks to be trained on, and the corpus has {info.chunks}: "
            "it is for corpora that do not fit into memory; use flat"
        )
    coarse, count = faiss.IndexFlatIP(info.dimension), lists_of(info.chunks)
    index = faiss.IndexIVFPQ(
        coarse, info.dimension, count, code_bytes(info.dimension), 8, faiss.METRIC_INNER_PRODUCT
    )
    for clustering in (index.cp, index.pq.cp):
        clustering.min_points_per_centroid = 1  # a small sample is no reason for lines on stderr
    index.train(_sample(journal, units, sample_of(info.chunks)))
    return index


def _sample(journal: IndexJournal, units: int, size: int) -> np.ndarray:
    """Return at least `size` vectors, or all, of units spread evenly over the corpus."""
    each = max(len(journal.embedded(0)[0]), 1)
    chosen = np.unique(np.linspace(0, units - 1, min(units, math.ceil(size / each))).astype(int))
    return np.concatenate([journal.embedded(int(unit))[1] for unit in chosen])
