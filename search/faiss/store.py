"""The FAISS store: any index over unit vectors whose row i is line i of a JSONL corpus.

The files are mapped into memory. Each query first checks them, and refuses a replaced index until a restart.
"""

import logging
import os
import random
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import faiss
import numpy as np

from search.embedders import Embedder
from search.errors import StoreError, StoreNotReady, StoreUnavailable
from search.faiss.jsonl_passages import JsonlPassages, StoredPassage
from search.faiss.location import FaissFiles, find_files
from search.stored_index import (
    SAME_VECTOR_COSINE,
    CollectionInfo,
    another_version,
    check_records,
    cosine_again,
    other_embedder,
    passage_text,
)
from search.wire import ScoredPassage

log = logging.getLogger("search.server")

SAME_CODE_COSINE = 0.7  # Least cosine of a vector with its code. Another model's is about orthogonal
_UNIT = 1e-2  # How far a stored unit vector's length may be from 1; some indices are made in half precision
_UNRECORDED = "unrecorded"
_COSINE = {
    faiss.METRIC_INNER_PRODUCT: lambda score: score,
    faiss.METRIC_L2: lambda square: 1.0 - square / 2.0,
}
"""From FAISS's number to the cosine of unit vectors, by metric."""


@dataclass(frozen=True)
class FaissIndex:
    """The location of a FAISS index, and its search parameters. `device` is cpu, cuda or cuda:N."""

    setting: ClassVar[str] = "faiss.path"
    path: Path | str
    corpus: Path | str | None = None
    lines_folder: Path | None = None
    ef_search: int = 256
    nprobe: int = 64
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The file's or folder's name."""
        return Path(self.path).stem

    @property
    def folder(self) -> Path | None:
        """The folder that holds it."""
        path = Path(self.path)
        return path.parent if path.is_file() else path

    def __str__(self) -> str:
        return str(self.path)

    def open(self) -> "FaissStore":
        """Open it. Raises StoreError if it is unusable, StoreNotReady if files are missing."""
        return FaissStore(self)

    def documents(self) -> Iterator[tuple[str, str, str]]:
        """Yield (id, title, text) of every passage, by row. Raises StoreError."""
        with closing(JsonlPassages(find_files(self.path, self.corpus).corpus, self.lines_folder)) as passages:
            for passage in passages:
                yield passage.id, passage.title, passage.text

    def drawn(self, seed: int) -> Iterator[tuple[str, str, str]]:
        """Yield the same in an order random by `seed`. Raises StoreError."""
        with closing(JsonlPassages(find_files(self.path, self.corpus).corpus, self.lines_folder)) as passages:
            for row in _shuffled(len(passages), random.Random(f"{seed}/rows")):
                passage = passages[row]
                yield passage.id, passage.title, passage.text


class FaissStore:
    """An open index. Several threads may query it."""

    def __init__(self, index: FaissIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._opened = _OpenFiles(index)
        self.files = self._opened.files
        self.info = self._opened.info
        self.name = self.files.index.name

    def close(self) -> None:
        """Release the files."""
        self._opened.close()

    def check_embedder(self, embedder: Embedder) -> None:
        """Raise StoreError unless `embedder` fits the record, if any, and reproduces the first vector."""
        what, opened = f"the index {self.files}", self._opened
        if self.info.embedder:
            check_records(what, self.info, embedder)
        elif embedder.dimension != self.info.dimension:
            raise self._not_of(
                embedder, f"they have {self.info.dimension} numbers, its own {embedder.dimension}"
            )
        stored = opened.first_vector()
        if (off := abs(float(np.linalg.norm(stored)) - 1.0)) > _UNIT and opened.is_exact:
            raise StoreError(
                f"{what} is not of unit vectors (the first is {off:.2f} off), so that its scores are "
                "no cosines: normalise them and build it again"
            )
        cosine = cosine_again(embedder, opened.embedded_text(opened.passages[0]), stored)
        if cosine >= (SAME_VECTOR_COSINE if opened.is_exact else SAME_CODE_COSINE):
            return
        if self.info.embedder:
            again = f"the same text gets another vector (cosine {cosine:.3f}): its revision is"
            raise other_embedder(what, self.info, embedder, again, self.info.revision, embedder.revision)
        raise self._not_of(embedder, f"its first passage gets another one (cosine {cosine:.3f})")

    def _not_of(self, embedder: Embedder, why: str) -> StoreError:
        return StoreError(
            f"the vectors of {self.files} are not those of {embedder.name!r}: {why}. Set retrieval.embedder "
            "(or --embedder) to the model that made them, and faiss.corpus to the passages they are of"
        )

    def check_content(self) -> bool:
        """Return whether the build recorded hashes. Raises StoreError unless the files match them."""
        return self.files.check_content()

    def query(self, embeddings: np.ndarray, topk: int) -> list[list[ScoredPassage]]:
        """Return each row's nearest passages, as `StoredIndex.query`. IVF may find fewer than `topk`."""
        vectors = np.ascontiguousarray(embeddings, dtype=np.float32)
        wanted = min(topk, self.info.chunks)
        try:
            # FAISS uses several threads itself; a GPU takes one search at a time.
            with self._lock:
                opened = self._ready()
                scores, rows = opened.searched.search(vectors, wanted)
            cosine = _COSINE[opened.index.metric_type]
            return [
                [
                    {"document": opened.passages[row].to_wire(), "score": float(cosine(score))}
                    for row, score in zip(found.tolist(), of_them.tolist(), strict=True)
                    if row >= 0
                ]
                for found, of_them in zip(rows, scores, strict=True)
            ]
        # FAISS raises RuntimeErrors; a file that another thread has just reopened gives a ValueError.
        except (StoreError, OSError, RuntimeError, ValueError) as error:
            raise StoreUnavailable(f"the index at {self.files} failed: {error}") from error

    def passages_of(self, ids: Collection[str]) -> dict[str, str]:
        """Return the passages with these ids. Reads the corpus unless ids are line numbers."""
        opened = self._opened
        found = {}
        for key in ids:
            if key.isascii() and key.isdigit() and int(key) < len(opened.passages):
                passage = opened.passages[int(key)]
                if passage.id == key:
                    found[key] = passage_text(passage.title, passage.text)
        if wanted := set(ids) - found.keys():
            for passage in opened.passages:
                if passage.id in wanted:
                    found[passage.id] = passage_text(passage.title, passage.text)
        return found

    def documents_among(self, names: Sequence[str]) -> set[str]:
        """Return the document ids that the index holds, whole or in chunks."""
        there = set(self.passages_of(names))
        if others := set(names) - there:
            there |= others & {passage.document for passage in self._opened.passages}
        return there

    def _ready(self) -> "_OpenFiles":
        """Return the open files, reopened if they changed. Hold the lock."""
        if self._opened.is_unchanged():
            return self._opened
        try:
            opened = _OpenFiles(self._index)
        except StoreError as error:
            raise StoreUnavailable(str(error)) from error
        if opened.info != self.info:
            opened.close()
            raise another_version(f"the index {self.files}", opened.info, self.info)
        self._opened.close()
        self._opened = opened
        return opened


class _OpenFiles:
    def __init__(self, index: FaissIndex) -> None:
        self.files = find_files(index.path, index.corpus)
        self._stamp = self._stat()  # before opening: a change in between is seen at the first query
        self._record = self.files.read_record()
        self.index = _read(self.files)
        self.passages = JsonlPassages(self.files.corpus, index.lines_folder)
        try:
            self.info = self._describe()
            self.is_exact = _keeps_vectors(self.index)
            _set_breadth(self.index, index)
            self.searched = on_device(self.index, index.device, self.files.index.stat().st_size)
        except BaseException:
            self.passages.close()
            raise

    def close(self) -> None:
        self.passages.close()

    def is_unchanged(self) -> bool:
        """Whether the files are still the opened ones. Raises StoreUnavailable while one is missing."""
        try:
            return self._stat() == self._stamp
        except OSError as error:
            raise StoreUnavailable(f"the index at {self.files} is gone ({error})") from error

    def first_vector(self) -> np.ndarray:
        """Return the stored vector of row 0 (dimension,). Raises StoreError if the index cannot give it."""
        ivf = faiss.try_extract_index_ivf(self.index)
        try:
            if ivf is not None:  # it knows vectors by list; the map from rows takes 8 bytes each
                ivf.make_direct_map()
            return np.asarray(self.index.reconstruct(0))
        except RuntimeError as error:
            raise StoreError(f"the first vector of {self.files} cannot be read ({error})") from error
        finally:
            if ivf is not None:
                ivf.set_direct_map_type(ivf.direct_map.NoMap)

    def embedded_text(self, passage: StoredPassage) -> str:
        if passage.contents is not None:
            return passage.contents
        if self._record is not None:
            return passage_text(passage.title, passage.text)
        return f'"{passage.title}"\n{passage.text}'  # of a corpus without contents, as Search-R1 makes them

    def _describe(self) -> CollectionInfo:
        index, files = self.index, self.files
        if index.metric_type not in _COSINE or isinstance(index, faiss.IndexIDMap):
            raise StoreError(
                f"{files} is of a kind ({type(index).__name__}, metric {index.metric_type}) that cannot be "
                "served: its rows have to be those of the corpus, by inner product or L2 of unit vectors"
            )
        rows, lines = index.ntotal, len(self.passages)
        if rows != lines or not rows:
            raise StoreError(
                f"{files} has {rows} rows and {files.corpus} {lines} lines, and row i has to be line i: set "
                "faiss.corpus to the corpus that it was built from"
            )
        if self._record is None:
            return CollectionInfo("", _UNRECORDED, index.d, "", "", rows, rows, 0, 0, files.edges())
        info = self._record.info
        if (info.chunks, info.dimension) != (rows, index.d):
            raise StoreError(
                f"{files} has {rows} rows of {index.d} numbers, and {files.record} says {info.chunks} of "
                f"{info.dimension}: they are not of one build; restore the folder from a copy"
            )
        return info

    def _stat(self) -> list[tuple[int, int, int, int]]:
        found = map(os.stat, (self.files.index, self.files.corpus))
        return [(state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size) for state in found]


def _shuffled(count: int, rng: random.Random) -> Iterator[int]:
    """Yield the numbers below `count` in a random order: Fisher and Yates, storing only what moved."""
    moved: dict[int, int] = {}
    for last in range(count - 1, -1, -1):
        place = rng.randint(0, last)
        yield moved.get(place, place)
        moved[place] = moved.pop(last, last)


def _read(files: FaissFiles) -> Any:
    try:
        return map_index(files.index)
    except (RuntimeError, OSError) as error:
        reason = str(error).rpartition("Error: ")[2] or str(error)
        raise StoreNotReady(
            f"{files} is no FAISS index, or is cut off ({reason}): copy, download or build it again"
        ) from error


def _keeps_vectors(index: Any) -> bool:
    if isinstance(index, faiss.IndexHNSW):
        return isinstance(faiss.downcast_index(index.storage), faiss.IndexFlat)
    return isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat)


def _set_breadth(index: Any, wanted: FaissIndex) -> None:
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if isinstance(inner, faiss.IndexHNSW):
        inner.hnsw.efSearch = wanted.ef_search
    elif isinstance(inner, faiss.IndexIVF):
        inner.nprobe = min(wanted.nprobe, inner.nlist)


def map_index(path: Path) -> Any:
    """Return the index in a file. Raises RuntimeError for a bad or cut-off file, and OSError."""
    if not path.stat().st_size:
        raise RuntimeError("the file is empty")  # which cannot be mapped
    file_bytes = np.memmap(path, dtype=np.uint8, mode="r")
    library: Any = faiss  # whose stubs lack this class
    reader = library.ZeroCopyIOReader(faiss.swig_ptr(file_bytes), file_bytes.size)
    index: Any = faiss.read_index(reader, faiss.IO_FLAG_MMAP_IFC)
    # FAISS does not notice if the last list of an IVF index ends beyond the bytes.
    if reader.rp_ > file_bytes.size:
        raise RuntimeError(f"{reader.rp_ - file_bytes.size} bytes are missing at its end")
    index.referenced_objects = [file_bytes]  # FAISS's own way to keep them alive
    return index


def on_device(index: Any, device: str, size: int) -> Any:
    """Return the index on the torch device if its `size` bytes fit there, else as given. Logs which."""
    if device == "cpu":
        return index
    number = int(device.partition(":")[2] or 0)
    if why := _obstacle(index, number, size):
        log.warning("the FAISS index is searched on the CPU, not on %s: %s", device, why)
        return index
    moved = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), number, index)
    log.info("the FAISS index is searched on cuda:%d", number)
    return moved


def _obstacle(index: Any, number: int, size: int) -> str | None:
    import torch

    if faiss.get_num_gpus() <= number:
        built = "this FAISS is built for CPUs (faiss-cpu), or sees fewer GPUs"
        return f"{built}: it takes a wheel of faiss-gpu"
    if not isinstance(index, faiss.IndexFlat | faiss.IndexIVFFlat | faiss.IndexIVFPQ):
        return f"an {type(index).__name__} is not one that FAISS searches there"
    free, _ = torch.cuda.mem_get_info(number)
    return f"it takes {size / 2**30:.1f} GiB of its {free / 2**30:.1f} GiB free" if size > free else None
