"""Build or update the Chroma collection that the retrieval server serves.

    python -m search.index --source corpus.jsonl --chroma-path chromadb --collection wiki --embedder
    packaged-minilm

The source is a JSONL or parquet file (`{"id"?, "title"?, "text" or "contents"}`), a folder of text or
Markdown files, or an existing Chroma, whose documents are embedded anew. Documents longer than the embedder
reads are split into overlapping chunks (`search.chunking`).

Run it again at any time:

- The corpus is what it was: nothing is done, and no model is loaded.
- Documents were added, changed or removed: only new and changed ones are embedded; what was removed goes.
- Fewer than half of the documents that are there are still the same, or the embedder or the chunk sizes are
  others: that looks like another corpus under the same name, and is done only when `replace` is said.
- The last run was killed: what it had embedded is taken over from its ledger (`search.ledger`).

A folder is built beside its place and renamed into it when it is complete, so that its readers see the old
collection or the new one. Embedding comes first, into the ledger; Chroma is written in one go afterwards,
and from the start if that is cut off, because its vector files do not survive a kill while it writes them.
While it builds, an index therefore takes about twice its space. A Chroma server is written in place, unit
by unit: its collection says 'being written' until the end, so that no server of ours starts on it, and one
that is running should be given a new collection instead.

Memory is bounded for any corpus by the ledger's cache, one unit of chunks and the largest document; Chroma
itself holds a folder's vectors in memory while it builds their graph.
"""

import argparse
import errno
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from search.chunking import Chunk, Chunker, Chunking
from search.corpus import Corpus, CorpusError, Document
from search.embedders import DEFAULT_EMBEDDER, PACKAGED_EMBEDDER, Embedder, EmbedderError, EmbedderSpec
from search.ledger import Changes, Ledger, Survey, read_wanted, survey
from search.staging import recover, sole_writer, work_folder
from search.store import BEING_WRITTEN, ChromaPlace, CollectionInfo, StoreError
from search.target import Collection, Contents, Embedded, IndexSettings, shown, write_folder, write_server

LEDGER = "ledger.sqlite3"
SPLIT_DOCUMENTS = 256
"""Documents whose chunks are kept in the ledger together."""


NO_CHANGES = Changes()


@dataclass(frozen=True)
class IndexReport:
    """What a build did: `built` is False if the collection was there already.

    `embedded` counts the chunks that this run embedded, `resumed` those it took over from one that was cut
    off; `seconds` is the whole build's wall clock.
    """

    info: CollectionInfo
    built: bool
    duplicates: int
    seconds: float
    changes: Changes = NO_CHANGES
    embedded: int = 0
    resumed: int = 0

    def __str__(self) -> str:
        info, changes = self.info, self.changes
        lines = [
            f"{info.documents} documents in {info.chunks} chunks, {info.embedder} "
            f"({info.dimension} dimensions), version {info.version[:12]}, {self.seconds:.1f} s"
        ]
        if not self.built:
            lines.append("already there with the same content and embedder: left as it is")
        elif changes.present:
            lines.append(
                f"{changes.added} documents added, {changes.changed} changed, {changes.removed} removed, "
                f"{changes.kept} as they were; {self.embedded} chunks embedded"
            )
        if self.resumed:
            lines.append(f"{self.resumed} chunks had been embedded by a run that was cut off")
        if self.duplicates:
            lines.append(f"{self.duplicates} identical duplicates skipped")
        return "\n".join(lines)


def build_index(
    source: Path | str,
    chroma_path: ChromaPlace | Path | str,
    collection: str,
    embedder: EmbedderSpec,
    *,
    source_collection: str | None = None,
    replace: bool = False,
    chunking: Chunking | None = None,
    workers: int = 1,
) -> IndexReport:
    """Index a corpus as `collection` in a Chroma, whose other collections are kept.

    `replace` permits what the module calls another corpus; with `workers` above 1 that many of them embed,
    through Ray. Raises CorpusError for a bad corpus, EmbedderError for a model that cannot be loaded, and
    StoreError if `chroma_path` is no Chroma, another build is writing it, `replace` is needed, or the disk is
    full.
    """
    started = time.monotonic()
    target = Collection(_resolved(ChromaPlace.parse(chroma_path)), collection)
    with _workshop(target) as folder:
        # Where others embed, the model is here for its tokenizer only.
        encoder = Embedder(embedder if workers == 1 else changed(embedder, device="cpu"))
        build = _Build(
            Corpus(source, source_collection), target, embedder, encoder, chunking or Chunking(), workers
        )
        try:
            return build.run(folder, replace, started)
        except (sqlite3.OperationalError, OSError) as error:
            is_full = error.errno == errno.ENOSPC if isinstance(error, OSError) else "full" in str(error)
            if not is_full:
                raise
            raise StoreError(
                f"the disk is full ({error}): make room and run it again, it goes on from where it was"
            ) from error


def _resolved(place: ChromaPlace) -> ChromaPlace:
    """Where a folder really lies: what is built beside a link to it could not take its place."""
    return changed(place, folder=place.folder.resolve()) if place.folder else place


@contextmanager
def _workshop(target: Collection) -> Iterator[Path]:
    """Yield the folder to work in: beside a folder and lasting, since a killed run's work is in it.

    It is removed when the work is done, or has not come to embedding. A server holds itself what was done.
    """
    place = target.place
    if place.folder is None:
        with sole_writer(str(target)), tempfile.TemporaryDirectory(prefix="drzero-index-") as temporary:
            yield Path(temporary)
        return
    with work_folder(place.folder) as folder:
        recover(place.folder)
        try:
            yield folder
        except BaseException:
            if not _holds_vectors(folder / LEDGER):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _holds_vectors(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with closing(Ledger(path, read_only=True)) as ledger:
            return ledger.vector_count() > 0
    except sqlite3.Error:  # killed before its tables were made, or damaged: of no use
        return False


@dataclass(frozen=True)
class _Build:
    """One run: survey, compare, split, embed, write."""

    corpus: Corpus
    target: Collection
    spec: EmbedderSpec
    encoder: Embedder
    chunking: Chunking
    workers: int

    def run(self, folder: Path, replace: bool, started: float) -> IndexReport:
        with closing(Ledger(folder / LEDGER)) as ledger:
            surveyed = survey(self.corpus, ledger)
            there = self.target.metadata()
            settings = self._settings()
            info = CollectionInfo.from_metadata(there)
            if info and settings.built(there or {}) and info.version == settings.version(surveyed):
                return IndexReport(info, False, surveyed.duplicates, time.monotonic() - started)
            # What may refuse comes first: what an earlier run embedded is dropped only to be replaced.
            changes, update = self._compare(ledger, there, settings, surveyed, replace)
            chunker = Chunker(self.encoder, self.chunking)
            if dropped := ledger.settle(settings.identity()):
                print(f"dropped {dropped} chunks that a run with another model or chunk size had embedded")
            self._split(ledger, chunker)
            resumed = ledger.vector_count()
            chunks = ledger.chunk_count()
            contents = Contents(ledger, settings, surveyed, chunks + ledger.kept_chunk_count(), update)
            info = contents.info(self.encoder)
            self._write(folder, contents, info, chunks - resumed)
        seconds = time.monotonic() - started
        return IndexReport(info, True, surveyed.duplicates, seconds, changes, chunks - resumed, resumed)

    def _settings(self) -> IndexSettings:
        return IndexSettings(
            self.encoder.name, self.encoder.revision, self.chunking.tokens, self.chunking.overlap
        )

    def _compare(
        self,
        ledger: Ledger,
        there: Mapping[str, Any] | None,
        settings: IndexSettings,
        surveyed: Survey,
        replace: bool,
    ) -> tuple[Changes, bool]:
        """Return what changes, and whether what is there is updated; raises StoreError if it may not be."""
        if there is None:
            return NO_CHANGES, False
        if not settings.built(there):
            why = "of another embedder or chunk size, or one that search.index did not build"
        else:
            ledger.add_present(self.target.chunks())
            changes = ledger.compare()
            # A server's collection of which a run that was cut off has written a part.
            begun = there.get(BEING_WRITTEN) == settings.version(surveyed)
            if begun or 2 * changes.kept >= changes.present:
                return changes, True
            why = (
                f"of other content, only {changes.kept} of its {changes.present} documents are the same in "
                f"{self.corpus.source}"
            )
        if not replace:
            raise StoreError(
                f"{self.target.place} already holds a collection {self.target.name!r} {why}: "
                "say replace (replace=true, or --replace) to build it anew, or choose another collection name"
            )
        ledger.keep_none()
        return NO_CHANGES, False

    def _split(self, ledger: Ledger, chunker: Chunker) -> None:
        """Split the documents that are not in the ledger yet; one at a time is in memory."""
        wanted, dropped = ledger.want()
        if dropped:
            print(f"dropped {dropped} chunks that a run that was cut off had embedded of other documents")
        with (
            closing(read_wanted(self.corpus, ledger)) as documents,  # before the ledger it reads is
            tqdm(total=wanted, desc="splitting", unit=" docs", mininterval=1.0, delay=1.0) as progress,
        ):

            def split(some: Iterator[tuple[Document, str]]) -> Iterator[tuple[Document, str, list[Chunk]]]:
                for document, digest in some:
                    yield document, digest, chunker.split(document)
                    progress.update()

            for _ in range(0, wanted, SPLIT_DOCUMENTS):
                ledger.add_chunks(split(islice(documents, SPLIT_DOCUMENTS)))

    def _write(self, folder: Path, contents: Contents, info: CollectionInfo, lacking: int) -> None:
        ledger = contents.ledger
        units = ledger.make_units()
        embedded = shown(self._embed(ledger, folder / LEDGER, units), "embedding", lacking)
        if self.target.place.folder is None:
            write_server(self.target, contents, info, embedded)
            return
        for rows, vectors in embedded:
            ledger.keep_vectors(rows, vectors)
        write_folder(self.target, contents, info, units, folder / "chroma")

    def _embed(self, ledger: Ledger, path: Path, units: int) -> Embedded:
        """Yield the chunks that lack vectors, with their vectors, a unit at a time."""
        if self.workers > 1:
            from search.distributed_index import embed_with_ray

            yield from embed_with_ray(ledger, path, units, self.spec, self.workers)
            return
        for unit in range(units):
            if rows := ledger.lacking(unit):
                yield rows, self.encoder.encode_passages([row.passage for row in rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(argv)
    try:
        report = build_index(
            args.source,
            args.chroma_path,
            args.collection,
            EmbedderSpec(args.embedder, args.device),
            source_collection=args.source_collection,
            replace=args.replace,
            chunking=Chunking(args.chunk_tokens, args.chunk_overlap),
            workers=args.workers,
        )
    except (CorpusError, EmbedderError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.collection} in {args.chroma_path}: {report}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m search.index", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--source", required=True, help="corpus: .jsonl, .parquet, a folder of texts, or a Chroma")
    add("--source-collection", help="collection to read, if the source is a Chroma with several")
    add("--chroma-path", required=True, help="Chroma folder or server's address to build in or update")
    add("--collection", required=True, help="name of the collection")
    add(
        "--embedder",
        default=DEFAULT_EMBEDDER,
        help=f"hub id, folder or {PACKAGED_EMBEDDER} (default: %(default)s)",
    )
    add("--device", help="torch device (default: CUDA where there is one)")
    add("--chunk-tokens", type=int, default=Chunking.tokens, help="a chunk's size (default: %(default)s)")
    add("--chunk-overlap", type=int, default=Chunking.overlap, help="tokens repeated (default: %(default)s)")
    add(
        "--workers",
        type=int,
        default=1,
        help="processes that embed, through Ray if more than one: one a GPU, or a core each; RAY_ADDRESS "
        "names a cluster of several machines (default: %(default)s)",
    )
    add("--replace", action="store_true", help="replace a collection of other content or settings")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
