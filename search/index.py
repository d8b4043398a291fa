"""Build the Chroma collection that the retrieval server serves.

    python -m search.index --source corpus.jsonl --chroma-path chromadb --collection wiki --embedder
    packaged-minilm

The source is a JSONL or parquet file (`{"id"?, "title"?, "text" or "contents"}`) or an existing Chroma
folder, whose documents are embedded anew. The folder is written beside its place and renamed into it when it
is complete, so that a build that fails leaves what was there. Building again what is already there does
nothing; other content under the same name needs --replace.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from chromadb.api.collection_configuration import CreateCollectionConfiguration
from chromadb.errors import ChromaError
from tqdm import tqdm

from search.corpus import Corpus, CorpusError, Document, Survey, read_kept, survey
from search.embedders import (
    DEFAULT_EMBEDDER,
    PACKAGED_EMBEDDER,
    Embedder,
    EmbedderError,
    EmbedderSpec,
    model_identity,
)
from search.staging import publish, recover, staging_folder
from search.store import (
    DATABASE_FILE,
    DISTANCE,
    SCHEMA_VERSION,
    CollectionInfo,
    StoreError,
    collection_names,
    connect,
    passage_text,
)

BATCH = 512


@dataclass(frozen=True)
class IndexReport:
    """What a build did: `built` is False if the collection was there already.

    `too_long` counts documents whose end the embedder does not see; `seconds` is the whole build's wall
    clock.
    """

    info: CollectionInfo
    built: bool
    duplicates: int
    too_long: int
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{self.info.documents} documents, {self.info.embedder} ({self.info.dimension} dimensions), "
            f"version {self.info.version[:12]}, {self.seconds:.1f} s"
        ]
        if not self.built:
            lines.append("already there with the same content and embedder: left as it is")
        if self.duplicates:
            lines.append(f"{self.duplicates} identical duplicates skipped")
        if self.too_long:
            lines.append(
                f"{self.too_long} documents are longer than the embedder reads: their ends are not searchable"
            )
        return "\n".join(lines)


def build_index(
    source: Path,
    chroma_path: Path,
    collection: str,
    embedder: EmbedderSpec,
    *,
    source_collection: str | None = None,
    replace: bool = False,
) -> IndexReport:
    """Index a corpus as `collection` in the Chroma folder `chroma_path`, whose other collections are kept.

    Raises CorpusError for a bad corpus, EmbedderError for a model that cannot be loaded, and StoreError if
    `chroma_path` is no Chroma folder, or holds other content under this name and `replace` is not set.
    """
    started = time.monotonic()
    corpus, encoder = Corpus(source, source_collection), Embedder(embedder)
    surveyed = survey(corpus)
    recover(chroma_path)
    existing = _existing(chroma_path, collection)
    if isinstance(existing, CollectionInfo) and _same(existing, surveyed, encoder):
        return IndexReport(existing, False, surveyed.duplicates, 0, time.monotonic() - started)
    if existing is not None and not replace:
        raise StoreError(
            f"{chroma_path} already holds a collection {collection!r} of other content or embedder: "
            "say replace (replace=true, or --replace) to build it anew, or choose another collection name"
        )
    encoder.load()
    with staging_folder(chroma_path) as folder:
        _copy_others(chroma_path, folder, collection)
        info, too_long = _write(folder, collection, read_kept(corpus, surveyed), surveyed, encoder)
        publish(folder, chroma_path)
    return IndexReport(info, True, surveyed.duplicates, too_long, time.monotonic() - started)


def _existing(chroma_path: Path, name: str) -> CollectionInfo | str | None:
    """Return the info of the collection that is there, its name if it is not ours, None without one."""
    if not chroma_path.exists() or (chroma_path.is_dir() and not any(chroma_path.iterdir())):
        return None
    if not (chroma_path / DATABASE_FILE).is_file():
        raise StoreError(f"{chroma_path} exists and is not a Chroma folder: choose another --chroma-path")
    with connect(chroma_path) as client:
        if name not in collection_names(client):
            return None
        return (
            CollectionInfo.from_metadata(client.get_collection(name, embedding_function=None).metadata)
            or name
        )


def _same(info: CollectionInfo, surveyed: Survey, encoder: Embedder) -> bool:
    # The model's name and revision are known without loading it; prefixes and dimension follow from them.
    return (
        info.schema_version == SCHEMA_VERSION
        and info.version == surveyed.version
        and model_identity(info.embedder) == model_identity(encoder.name)
        and info.revision == encoder.revision
    )


def _copy_others(chroma_path: Path, folder: Path, name: str) -> None:
    """Start from a copy of the present folder if it holds collections besides the one that is to be built."""
    if not (chroma_path / DATABASE_FILE).is_file():
        return
    with connect(chroma_path) as client:
        others = set(collection_names(client)) - {name}
    if others:
        shutil.copytree(chroma_path, folder, dirs_exist_ok=True)
        with connect(folder) as client:
            if name in collection_names(client):
                client.delete_collection(name)


def _write(
    folder: Path, name: str, documents: Iterable[Document], surveyed: Survey, encoder: Embedder
) -> tuple[CollectionInfo, int]:
    """Write the collection, its info last; return the info and the number of documents the embedder cuts."""
    too_long = 0
    with connect(folder, create=True) as client:
        try:
            handle = client.create_collection(
                name,
                configuration=CreateCollectionConfiguration(hnsw={"space": DISTANCE}),
                embedding_function=None,
            )
        except ChromaError as error:  # a name that Chroma does not allow
            raise StoreError(f"collection {name!r} cannot be made: {error}") from error
        with tqdm(total=len(surveyed.first), desc="indexing", unit=" docs", mininterval=1.0) as progress:
            for batch in _batches(documents):
                texts = [passage_text(document.title, document.text) for document in batch]
                handle.add(
                    ids=[document.id for document in batch],
                    embeddings=encoder.encode_passages(texts),
                    documents=[document.text for document in batch],
                    metadatas=[{"title": document.title} for document in batch],
                )
                too_long += encoder.count_too_long(texts)
                progress.update(len(batch))
        info = CollectionInfo(
            embedder=encoder.name,
            revision=encoder.revision,
            dimension=encoder.dimension,
            query_prefix=encoder.prefixes.query,
            passage_prefix=encoder.prefixes.passage,
            documents=handle.count(),
            version=surveyed.version,
        )
        handle.modify(metadata=info.to_metadata())
    return info, too_long


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    stream = iter(documents)
    while batch := list(islice(stream, BATCH)):
        yield batch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m search.index", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--source", type=Path, required=True, help="corpus: .jsonl, .parquet or a Chroma folder"
    )
    parser.add_argument(
        "--source-collection", help="collection to read, if the source is a Chroma folder with several"
    )
    parser.add_argument("--chroma-path", type=Path, required=True, help="Chroma folder to build or extend")
    parser.add_argument("--collection", required=True, help="name of the collection")
    parser.add_argument(
        "--embedder",
        default=DEFAULT_EMBEDDER,
        help=f"hub id, folder or {PACKAGED_EMBEDDER} (default: %(default)s)",
    )
    parser.add_argument("--device", help="torch device (default: CUDA where there is one)")
    parser.add_argument("--replace", action="store_true", help="replace a collection of other content")
    args = parser.parse_args(argv)
    try:
        report = build_index(
            args.source,
            args.chroma_path,
            args.collection,
            EmbedderSpec(args.embedder, args.device),
            source_collection=args.source_collection,
            replace=args.replace,
        )
    except (CorpusError, EmbedderError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.collection} in {args.chroma_path}: {report}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
