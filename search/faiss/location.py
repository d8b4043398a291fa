"""The files of a FAISS index: the index, its passages, and our own build's record. Does not import FAISS."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from drzero.ops.files import atomic_write
from search.errors import StoreError, StoreNotReady
from search.stored_index import INDEX_FILE, CollectionInfo, back_end_of, faiss_indices

CORPUS_FILE = "corpus.jsonl"
RECORD = "drzero-faiss.json"
_EDGE_BYTES = 2**20


class Record(msgspec.Struct, frozen=True):
    """How an index was built, and its files' sha256 by name. A build writes it last."""

    info: CollectionInfo
    kind: str
    sha256: dict[str, str]


@dataclass(frozen=True)
class FaissFiles:
    """The files of one index. `record` need not exist."""

    index: Path
    corpus: Path

    @property
    def record(self) -> Path:
        """Where our own build describes the index."""
        return self.index.with_name(RECORD)

    def __str__(self) -> str:
        return str(self.index)

    def read_record(self) -> Record | None:
        """Return our build's record, None for another tool's index. Raises StoreError."""
        if self.index.name != INDEX_FILE or not self.record.is_file():
            return None
        try:
            return msgspec.json.decode(self.record.read_bytes(), type=Record)
        except (msgspec.MsgspecError, OSError) as error:
            raise StoreError(
                f"{self.record} is damaged ({error}): restore it, or build the index again"
            ) from error

    def write_record(self, info: CollectionInfo, kind: str) -> None:
        """Describe a complete build, with its files' hashes."""
        record = Record(info, kind, self._hashes())
        atomic_write(self.record, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")

    def check_content(self) -> bool:
        """Return whether hashes were recorded. Raises StoreError unless the files match them."""
        record = self.read_record()
        if record is None:
            return False
        found = self._hashes()
        if changed := sorted(name for name in found if record.sha256.get(name) != found[name]):
            raise StoreError(
                f"the index in {self.index.parent} is damaged, not as published: {', '.join(changed)}. Put "
                "a copy in its place, or index its corpus again with replace=true (or --replace)"
            )
        return True

    def edges(self) -> str:
        """sha256 (hex) of both files' sizes, first and last MiB: an identity without reading 80 GB."""
        digest = hashlib.sha256()
        for path in (self.index, self.corpus):
            size = path.stat().st_size
            digest.update(str(size).encode())
            with path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(size - _EDGE_BYTES, 0))
                digest.update(file.read())
        return digest.hexdigest()

    def _hashes(self) -> dict[str, str]:
        hashes = {}
        for path in (self.index, self.corpus):
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        return hashes


def find_files(path: Path | str, corpus: Path | str | None = None) -> FaissFiles:
    """Return the files of the index at `path`. Raises StoreNotReady if one is missing, or StoreError."""
    path = Path(path)
    if back_end_of(path) == "chroma":
        raise StoreError(f"{path} is a Chroma folder, not a FAISS index: set index=chroma chroma.path={path}")
    index = path
    if path.is_dir():
        index = _only(faiss_indices(path), f"FAISS index in {path}", "faiss.path")
    elif not path.is_file():
        raise StoreNotReady(
            f"no FAISS index at {path}: build one with `drzero prepare-data index=faiss faiss.path={path} "
            "source=…`, or correct the path (of an index published in parts: join them, `cat part_* > "
            "e5_Flat.index`)"
        )
    beside = index.parent / CORPUS_FILE
    if corpus is None and index.name == INDEX_FILE and beside.is_file():
        corpus = beside
    if corpus is None:
        found = sorted(found for found in index.parent.glob("*.jsonl") if found.is_file())
        corpus = _only(found, f"corpus (.jsonl) next to {index}", "faiss.corpus")
    if Path(corpus).suffix == ".gz":
        raise StoreError(
            f"{corpus} is compressed, and its lines cannot be found by their place: unpack it (gunzip)"
        )
    if not Path(corpus).is_file():
        raise StoreNotReady(
            f"no corpus at {corpus}, of which the rows of {index} are the lines: correct faiss.corpus"
        )
    return FaissFiles(index, Path(corpus))


def _only(found: list[Path], what: str, setting: str) -> Path:
    if not found:
        raise StoreNotReady(f"no {what}: name its file with {setting}=…")
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise StoreError(f"more than one {what} ({names}): name the one with {setting}=…")
    return found[0]
