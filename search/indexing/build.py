"""One build of an index or shard, which brings an existing one up to date (`search.indexing.shards.build`).

A killed run resumes: all vectors go into a journal first. Then one pass writes a folder and renames it, so
readers never see a mixture. A Chroma server is written in place, unit by unit, with a mark until the end.
"""

import errno
import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drzero.ops.files import recover, sole_writer, work_folder
from drzero.ops.text import counted
from search.chroma.store import BEING_WRITTEN
from search.embedders import OTHER_EMBEDDER, SAMPLED, Embedder, EmbedderError, EmbedderSpec
from search.errors import StoreError
from search.indexing.chunking import Chunk, Chunker, Chunking
from search.indexing.collection import Collection, Embedded, settings_of, with_progress, write
from search.indexing.journal import Changes, IndexJournal, Survey
from search.indexing.progress import progress
from search.indexing.size import Planned
from search.sources.corpus import Corpus
from search.sources.document import Document
from search.stored_index import SCHEMA_VERSION, CollectionInfo

if TYPE_CHECKING:  # it loads FAISS
    from search.indexing.faiss_folder import FaissFolder

JOURNAL = "journal.sqlite3"
SPLIT_DOCUMENTS = 256  # Documents whose chunks enter the journal together
TOGETHER = 1024  # Most chunks embedded and committed together: one document can have a hundred thousand


@dataclass(frozen=True)
class BuildOptions:
    """`workers` above one embed through Ray. `judge` may raise before anything is embedded or written."""

    replace: bool = False
    chunking: Chunking = field(default_factory=Chunking)
    workers: int = 1
    judge: Callable[[Planned], object] | None = None
    embed_only: bool = False


@dataclass(frozen=True)
class IndexReport:
    """A result. `embedded` counts this run's chunks, `resumed` an earlier run's. `seconds` is wall clock."""

    info: CollectionInfo
    built: bool
    survey: Survey
    seconds: float = 0.0
    changes: Changes | None = None
    embedded: int = 0
    resumed: int = 0
    is_written: bool = True

    def __str__(self) -> str:
        info, changes = self.info, self.changes
        parts = [
            f"{counted(info.documents, 'document')} in {counted(info.chunks, 'chunk')}, {info.embedder} "
            f"({info.dimension} dimensions, {_prefixes(info)}), version {info.version[:12]}, "
            f"{self.seconds:.1f} s"
        ]
        if not self.built:
            parts.append("exists with the same content and embedder: left unchanged")
        elif changes and changes.existing:
            parts.append(
                f"{counted(changes.added, 'document')} added, {changes.changed} changed, "
                f"{changes.removed} removed, {changes.kept} unchanged; "
                f"{counted(self.embedded, 'chunk')} embedded"
            )
        if self.resumed:
            parts.append(f"{counted(self.resumed, 'chunk')} embedded by an earlier run")
        if self.survey.duplicates:
            parts.append(f"{counted(self.survey.duplicates, 'duplicate')} skipped")
        if not self.is_written:
            parts.append("embedded and not written: a run without embed_only writes the index")
        return "; ".join(parts)


def _prefixes(info: CollectionInfo) -> str:
    if not (info.query_prefix or info.passage_prefix):
        return "no prefixes"
    return f"prefixes {info.query_prefix!r} and {info.passage_prefix!r}"


@contextmanager
def naming_unwritable(target: object) -> Iterator[None]:
    """Raise StoreError where an index cannot be written. SQLite and the system report that differently."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        raise
    except (sqlite3.OperationalError, OSError) as error:
        fix = "choose another place, or make it one that you may write"
        number = getattr(error, "errno", None)  # SQLite's errors have none
        is_full = "full" in str(error) or "disk I/O" in str(error)
        if is_full or number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = (
                "the disk is full, or a limit (ulimit -f) is reached: make room and run it again, it resumes"
            )
        raise StoreError(f"{target} cannot be written ({error}): {fix}") from error


@contextmanager
def target_folder(folder: Path | None, name: str, is_kept: bool = False) -> Iterator[Path]:
    """Yield the folder to build the index `name` in, next to `folder`. It stays if vectors would be lost."""
    if folder is None:
        with sole_writer(name), tempfile.TemporaryDirectory(prefix="drzero-index-") as temporary:
            yield Path(temporary)
        return
    with work_folder(folder) as work:
        recover(folder)
        may_stay = True
        try:
            yield work
            may_stay = is_kept
        finally:
            if not (may_stay and _has_vectors(work)):
                shutil.rmtree(work, ignore_errors=True)


def _has_vectors(folder: Path) -> bool:
    with suppress(sqlite3.Error), closing(IndexJournal(folder / JOURNAL, read_only=True)) as journal:
        return journal.vector_count() > 0
    return False


@dataclass(frozen=True)
class Unwritten:
    """An index folder whose vectors are all in the build's journal."""

    target: "Collection | FaissFolder"
    work: Path
    info: CollectionInfo
    update: bool
    units: int

    def write(self) -> None:
        """Write the index and publish it. Raises StoreError."""
        with closing(IndexJournal(self.work / JOURNAL, read_only=True)) as journal:
            self.target.write_folder(journal, self.info, self.update, self.units, self.work / "index")


@dataclass(frozen=True)
class Build:
    """One run: survey, compare, split, embed."""

    corpus: Corpus
    target: "Collection | FaissFolder"
    spec: EmbedderSpec
    encoder: Embedder
    options: BuildOptions

    def embed(self, folder: Path) -> tuple[IndexReport, Unwritten | None]:
        """Embed into the journal in `folder`, or write a server's collection. Returns the rest to write."""
        is_on_a_server = isinstance(self.target, Collection) and self.target.folder is None
        if is_on_a_server and self.options.embed_only:
            raise StoreError(
                f"{self.target} is written as it is embedded: leave out indexing.embed_only, or name a folder"
            )
        with closing(IndexJournal(folder / JOURNAL)) as journal:
            surveyed = journal.survey(self.corpus)
            existing = self._whole()
            encoder, chunking = self.encoder, self.options.chunking
            settings, version = as_settings(encoder, chunking), version_of(surveyed, chunking)
            is_alike = settings_of(existing or {}) == settings_of(settings)
            info = CollectionInfo.from_metadata(existing)
            if info and is_alike and info.version == version and self.target.is_as_asked():
                return IndexReport(info, False, surveyed), None
            # Checks that may refuse come first: never drop an earlier run's vectors without replacing them.
            changes = self._compare(journal, existing, is_alike, version)
            chunker = Chunker(encoder, chunking)
            if dropped := journal.use_settings(settings_of(settings)):
                print(f"dropped {dropped} chunks that a run with another model or chunk size had embedded")
            known = self._reuse(journal, changes)
            self._split(journal, chunker)
            resumed, chunks = journal.vector_count() - known, journal.chunk_count()
            info = CollectionInfo(
                **settings,
                dimension=encoder.dimension,
                documents=surveyed.documents,
                chunks=chunks + journal.kept_chunk_count(),
                version=version,
                # Chunks of an earlier version have no draws.
                draws=self.target.draws if changes is None else (existing or {}).get("draws", 0),
            )
            missing = chunks - resumed - known
            if missing:
                self._require_legible(journal)
            # An earlier run may have embedded on another machine, with more room.
            if self.options.judge and (missing or resumed):
                self.options.judge(self._planned(journal, info, folder / JOURNAL))
            units, update, unwritten = journal.make_units(), changes is not None, None
            embedded = with_progress(self._embed(journal, units), "embedding", missing)
            if isinstance(self.target, Collection) and is_on_a_server:
                write(self.target, self.target.place, journal, info, update, embedded)
            else:
                for rows, vectors in embedded:
                    journal.add_vectors(rows, vectors)
                if not self.options.embed_only:
                    unwritten = Unwritten(self.target, folder, info, update, units)
        is_written = not self.options.embed_only
        return IndexReport(info, True, surveyed, 0.0, changes, missing, resumed, is_written), unwritten

    def _whole(self) -> Mapping[str, Any] | None:
        """Return the existing collection's metadata, None if missing, or damaged and replaceable."""
        existing = self.target.metadata()
        if CollectionInfo.from_metadata(existing) is None:
            return existing
        try:
            self.target.check_content()
        except StoreError:
            if not self.options.replace:
                raise
            return None
        return existing

    def _compare(
        self, journal: IndexJournal, existing: Mapping[str, Any] | None, is_alike: bool, version: str
    ) -> Changes | None:
        """Return the changes to the existing collection, None to write it from scratch. Raises StoreError."""
        if existing is None:
            return None
        changes = None
        if is_alike:
            changes = journal.compare(self.target.chunks())
            # An interrupted run may have written part of a server's collection.
            if existing.get(BEING_WRITTEN) == version or changes.is_update:
                return changes
        if not self.options.replace:
            raise needs_replace(self.target, changes, self.corpus)
        journal.forget_existing()
        return None

    def _reuse(self, journal: IndexJournal, changes: Changes | None) -> int:
        if changes is None or isinstance(self.target, Collection):
            return 0
        count = journal.reuse(self.target.embedded())
        journal.forget_existing()
        return count

    def _split(self, journal: IndexJournal, chunker: Chunker) -> None:
        count, dropped = journal.select_unsplit()
        if dropped:
            print(f"dropped {dropped} chunks that an interrupted run had embedded of other documents")
        with (
            closing(journal.read_unsplit(self.corpus)) as documents,  # closed before the journal it reads
            progress("splitting", "documents", count) as bar,
        ):

            def split(some: Iterator[tuple[Document, str]]) -> Iterator[tuple[Document, str, list[Chunk]]]:
                for document, digest in some:
                    yield document, digest, chunker.split(document)
                    bar.update()

            for _ in range(0, count, SPLIT_DOCUMENTS):
                journal.add_chunks(split(islice(documents, SPLIT_DOCUMENTS)))

    def _require_legible(self, journal: IndexJournal) -> None:
        """Raise EmbedderError for texts in a language that the embedder does not know."""
        reading = self.encoder.reads(journal.some_texts(SAMPLED))
        if reading.is_hopeless:
            raise EmbedderError(
                f"the embedder {self.encoder.name} {reading.fault} of a sample of {self.corpus.source} and "
                f"cannot tell its documents apart: {OTHER_EMBEDDER}"
            )

    def _planned(self, journal: IndexJournal, info: CollectionInfo, path: Path) -> Planned:
        """Return the work ahead and the index's size, assuming that kept chunks are as long."""
        chunks = journal.chunk_count()
        every, missing = journal.text_bytes()
        size = self.target.size(info.chunks, info.dimension, every * info.chunks // chunks)
        left = chunks - journal.vector_count()
        return Planned(size, left, missing, self.encoder.operations, path.stat().st_size)

    def _embed(self, journal: IndexJournal, units: int) -> Embedded:
        if self.options.workers > 1:
            from search.indexing.distributed import embed_with_ray

            yield from embed_with_ray(journal, units, self.spec, self.options.workers)
            return
        for unit in range(units):
            rows = journal.unembedded(unit)
            for start in range(0, len(rows), TOGETHER):
                some = rows[start : start + TOGETHER]
                yield some, self.encoder.encode_passages([row.passage for row in some])


def as_settings(encoder: Embedder, chunking: Chunking) -> dict[str, Any]:
    """Return what chunks and vectors depend on besides the documents, as a collection records it."""
    return {
        "embedder": encoder.name,
        "revision": encoder.revision,
        "query_prefix": encoder.prefixes.query,
        "passage_prefix": encoder.prefixes.passage,
        "chunk_tokens": chunking.tokens,
        "chunk_overlap": chunking.overlap,
        "schema_version": SCHEMA_VERSION,
    }


def version_of(surveyed: Survey, chunking: Chunking) -> str:
    """Return `CollectionInfo.version` of an index of these documents."""
    content = json.dumps([surveyed.version, chunking.tokens, chunking.overlap, SCHEMA_VERSION])
    return hashlib.sha256(content.encode()).hexdigest()


def needs_replace(target: object, changes: Changes | None, corpus: Corpus) -> StoreError:
    """The error for an existing index of other content, or (without changes) of other settings."""
    why = "of another embedder or chunk size, or one that search.index did not build"
    if changes is not None:
        why = (
            f"of other content, only {changes.kept} of its {changes.existing} documents are the same in "
            f"{corpus}"
        )
    return StoreError(
        f"{target} exists already and is {why}: set replace=true (or --replace) to rebuild it, or choose "
        "another name or folder"
    )
