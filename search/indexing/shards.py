"""Build or update an index: one collection or FAISS folder, or shards that are built and resumed one by one.

Each shard records the version of the whole, so that shards of two versions never serve as one index.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setproctitle import setproctitle

from drzero.ops.process.keeper import die_with
from search.chroma.location import ChromaPlace
from search.chroma.sharded_store import ChromaIndex, chroma_index, shard_of, whole_of
from search.chroma.store import BEING_WRITTEN
from search.embedders import Embedder, EmbedderSpec
from search.errors import StoreError
from search.indexing.build import (
    JOURNAL,
    Build,
    BuildOptions,
    IndexReport,
    Unwritten,
    as_settings,
    naming_unwritable,
    needs_replace,
    target_folder,
    version_of,
)
from search.indexing.chunking import Chunking
from search.indexing.collection import Collection, settings_of
from search.indexing.journal import Changes, IndexJournal
from search.indexing.progress import hide
from search.indexing.size import IndexSize, Planned, ShardedSize
from search.sources.corpus import Corpus
from search.stored_index import CollectionInfo

if TYPE_CHECKING:
    from search.indexing.faiss_folder import FaissFolder


@dataclass(frozen=True)
class Shards:
    """The shards of an index, which need not exist yet. `writers` of them are inserted at once."""

    index: ChromaIndex
    writers: int = 2

    def __str__(self) -> str:
        return str(self.index)

    @property
    def folder(self) -> Path | None:
        """The folder with all shards, None for a server or several places."""
        return self.index.folder

    def collections(self, whole: str = "") -> list[Collection]:
        """Return the shards as collections of that version of the whole."""
        targets = []
        for number, (place, name) in enumerate(self.index.each()):
            if place.folder is not None:  # a folder built next to a link could not replace the link's target
                place = changed(place, folder=place.folder.resolve())
            shard = f"{number}/{self.index.shards}" if self.index.shards > 1 else ""
            targets.append(Collection(place, name, shard, whole))
        return targets

    def size(self, chunks: int, dimension: int, text_bytes: int) -> IndexSize:
        """Return the size of an index with this content."""
        return ShardedSize(chunks, dimension, text_bytes, self.index.shards, self.writers)


def chroma_target(
    paths: Sequence[str | Path | ChromaPlace], collection: str, shards: int = 1, writers: int = Shards.writers
) -> Collection | Shards:
    """Return one collection to write, or its shards. Raises StoreError."""
    target = Shards(chroma_index(paths, collection, shards), writers)
    return target.collections()[0] if shards == 1 else target


def build_index(
    source: Corpus | Path | str,
    chroma_path: ChromaPlace | Path | str,
    collection: str,
    embedder: EmbedderSpec,
    *,
    replace: bool = False,
    chunking: Chunking | None = None,
    workers: int = 1,
) -> IndexReport:
    """Index a corpus as `collection` in a Chroma, and keep its other collections. Raises as `build`."""
    options = BuildOptions(replace, chunking or Chunking(), workers)
    return build(source, chroma_target([chroma_path], collection), embedder, options)


def build(
    source: Corpus | Path | str,
    target: "Collection | FaissFolder | Shards",
    embedder: EmbedderSpec,
    options: BuildOptions | None = None,
) -> IndexReport:
    """Index a corpus in any kind of index. `options.judge` is called once, with the whole's needs.

    Raises CorpusError, EmbedderError, AlreadyWriting if another build is running, or StoreError.
    """
    started, options = time.monotonic(), options or BuildOptions()
    corpus = source if isinstance(source, Corpus) else Corpus(source)
    encoder = Embedder(embedder if options.workers == 1 else changed(embedder, device="cpu"))
    is_kept = options.embed_only and not isinstance(target, Shards)
    if isinstance(target, Shards):
        target.index.check_count()
    with naming_unwritable(target), target_folder(target.folder, str(target), is_kept) as folder:
        if isinstance(target, Shards):
            report = _build_shards(corpus, target, embedder, encoder, options, folder)
        else:
            report, unwritten = Build(corpus, target, embedder, encoder, options).embed(folder)
            if unwritten:
                unwritten.write()
    return changed(report, seconds=time.monotonic() - started)


def _build_shards(
    corpus: Corpus,
    target: Shards,
    embedder: EmbedderSpec,
    encoder: Embedder,
    options: BuildOptions,
    folder: Path,
) -> IndexReport:
    judge = options.judge

    def judge_whole(number: int, planned: Planned) -> None:
        nonlocal judge
        if judge is not None:
            once, judge = judge, None
            shards = [one.folder for one in targets if one.folder]
            builds = [path.with_name(f".{path.name}.building") for path in shards]
            files = [
                file for path in [folder, *shards, *builds] for file in path.rglob("*") if file.is_file()
            ]
            once(_planned(target, number, planned, sum(file.stat().st_size for file in files)))

    with closing(IndexJournal(folder / "survey.sqlite3")) as journal:
        surveyed = journal.survey(corpus)
        targets = target.collections(version_of(surveyed, options.chunking))
        is_same = settings_of(as_settings(encoder, options.chunking))
        if (info := _unchanged(targets, is_same, options.replace)) is not None:
            return IndexReport(info, False, surveyed)
        changes = None if options.replace else _check_update(target, targets, is_same, journal, corpus)
        parts = _cut(journal, corpus, target.index, folder)
    reports = []
    with ExitStack() as held, Writers(target.writers) as writers:
        for number, (one, part) in enumerate(zip(targets, parts, strict=True)):
            # The whole has been checked, so anything that differs may be replaced.
            its_options = changed(options, replace=True, judge=partial(judge_whole, number))
            shard = Build(Corpus(part), one, embedder, encoder, its_options)
            its_folder = held.enter_context(target_folder(one.folder, str(one), options.embed_only))
            report, unwritten = shard.embed(its_folder)
            reports.append(report)
            part.unlink()
            name = target.index.label(number)
            print(f"{name}: {report.embedded} chunks embedded, {report.resumed} resumed", flush=True)
            if unwritten:
                writers.start(name, unwritten)
    return IndexReport(
        changed(whole_of([report.info for report in reports]), version=targets[0].whole),
        True,
        surveyed,
        changes=changes,
        embedded=sum(report.embedded for report in reports),
        resumed=sum(report.resumed for report in reports),
        is_written=all(report.is_written for report in reports),
    )


def _unchanged(
    targets: Sequence[Collection], settings: Mapping[str, Any], replace: bool
) -> CollectionInfo | None:
    infos = []
    for one in targets:
        metadata = one.metadata() or {}
        info = CollectionInfo.from_metadata(metadata)
        if info is None or (info.shard, info.whole) != (one.shard, one.whole):
            return None
        if settings_of(metadata) != settings:
            return None
        infos.append(info)
    try:
        for one in targets:
            one.check_content()
    except StoreError:
        if not replace:
            raise
        return None
    return whole_of(infos)


def _check_update(
    target: Shards,
    targets: Sequence[Collection],
    settings: Mapping[str, Any],
    journal: IndexJournal,
    corpus: Corpus,
) -> Changes | None:
    """Return the changes to the whole index, None for a new one. Raises StoreError if it may not change."""
    there = {one: metadata for one in targets if (metadata := one.metadata()) is not None}
    if not there:
        return None
    if any(settings_of(metadata) != settings for metadata in there.values()):
        raise needs_replace(target, None, corpus)
    for one, metadata in there.items():
        if BEING_WRITTEN not in metadata:
            one.check_content()
    changes = journal.compare(chain.from_iterable(one.chunks() for one in there))
    is_resumed = any(
        BEING_WRITTEN in metadata and metadata.get("whole") == one.whole for one, metadata in there.items()
    )
    if not (changes.is_update or is_resumed):
        raise needs_replace(target, changes, corpus)
    return changes


def _cut(journal: IndexJournal, corpus: Corpus, index: ChromaIndex, folder: Path) -> list[Path]:
    """Write the surveyed documents to a file per shard. Raises StoreError if one would be empty."""
    journal.forget_existing()  # else unchanged documents would be left out
    journal.select_unsplit()
    parts = [folder / f"{index.label(number)}.jsonl" for number in range(index.shards)]
    counts = [0] * index.shards
    with ExitStack() as stack:
        files = [stack.enter_context(part.open("w", encoding="ascii")) for part in parts]
        for document, _ in stack.enter_context(closing(journal.read_unsplit(corpus))):
            number = shard_of(document.id, index.shards)
            record = {name: getattr(document, name) for name in ("id", "title", "text", "markdown")}
            files[number].write(json.dumps(record) + "\n")
            counts[number] += 1
    if 0 in counts:
        raise StoreError(
            f"{index.label(counts.index(0))} would be empty, as {corpus} has {sum(counts)} "
            "documents: set fewer chroma.shards (or --shards)"
        )
    return parts


def _planned(target: Shards, number: int, of_one: Planned, there: int) -> Planned:
    """The whole's needs, estimated from the first shard to embed, since hashing makes shards alike."""
    shards, left, size = target.index.shards, target.index.shards - number, of_one.size
    return Planned(
        target.size(shards * size.chunks, size.dimension, shards * size.text_bytes),
        left * of_one.chunks,
        left * of_one.text_bytes,
        of_one.operations,
        there,
    )


# --- processes that write shards: each inserts with one core, and dies with this process ---

_PROCESSES = multiprocessing.get_context("spawn")  # Not forked: this process has threads, of torch and Chroma


class Writers:
    """At most `most` processes, each writing a shard."""

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most)  # one waits for each process
        self._writing: list[Future[None]] = []

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is written, or end the processes after an error."""
        try:
            for future in self._writing if kind is None else ():
                future.result()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            self._threads.shutdown()

    def start(self, name: str, unwritten: Unwritten) -> None:
        """Write a shard in its own process, as soon as one may. Raises the error of any that failed."""
        for future in self._writing:
            if future.done():
                future.result()
        self._writing.append(self._threads.submit(_write_apart, name, unwritten))


def _write_apart(name: str, unwritten: Unwritten) -> None:
    started = time.monotonic()
    answer, its_answer = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_write_shard, args=(name, unwritten, its_answer, os.getpid()))
    process.start()
    its_answer.close()
    try:
        error: Any = answer.recv()
        process.join()
    except EOFError:  # it was ended before it could answer
        process.join()
        raise StoreError(
            f"the process that wrote {name} was ended (exit code {process.exitcode}; -9 is often a lack of "
            "memory): run it again, it resumes, with fewer indexing.writers where memory is short"
        ) from None
    if error is not None:
        raise error
    print(f"{name} is written, {time.monotonic() - started:.1f} s", flush=True)


def _write_shard(name: str, unwritten: Unwritten, answer: Connection, parent: int) -> None:
    if not die_with(parent, signal.SIGKILL):
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent ends this process
    setproctitle(f"drzero: writes {name}")
    hide()  # it would be drawn over the parent's
    try:
        unwritten.write()
        (unwritten.work / JOURNAL).unlink()  # of the index's size
    except Exception as error:  # of many types from Chroma, SQLite and the system: the parent raises it
        answer.send(error)
    else:
        answer.send(None)
