"""Build or update the index that the retrieval server serves: a Chroma collection, or a FAISS folder.

    python -m search.index --source corpus.jsonl --chroma-path chromadb --collection wiki --shards 4
    python -m search.index --source corpus.jsonl --faiss-path faiss --kind hnsw

See `search.sources.corpus` for sources, and `search.indexing.build` for repeated runs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from drzero.ops.console import replace_unshowable
from drzero.ops.errors import UserError
from drzero.ops.proxies import check_proxies
from search.embedders import DEFAULT_EMBEDDER, PACKAGED_EMBEDDER, EmbedderSpec
from search.indexing.build import BuildOptions
from search.indexing.chunking import Chunking
from search.indexing.collection import Collection
from search.indexing.faiss_folder import FaissFolder
from search.indexing.shards import Shards, build, chroma_target
from search.indexing.size import KINDS
from search.sources.corpus import Corpus


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m search.index", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--source", required=True, help="corpus: a file, folder or glob, a data set of the hub, or a Chroma")
    add("--source-collection", help="collection to read, if the source is a Chroma with several")
    where = parser.add_mutually_exclusive_group(required=True)
    chroma_help = "Chroma folder or server address to build in or update; with --shards also several"
    where.add_argument("--chroma-path", nargs="+", help=chroma_help)
    where.add_argument("--faiss-path", type=Path, help="folder of a FAISS index to build or update")
    add("--collection", help="name of the collection, in a Chroma")
    add("--shards", type=int, default=1, help="collections that it is divided into (default: %(default)s)")
    add("--writers", type=int, default=Shards.writers, help="shards inserted at once (default: %(default)s)")
    add("--kind", choices=KINDS, default=KINDS[0], help="of a FAISS index (default: %(default)s)")
    embedder_help = f"hub id, folder or {PACKAGED_EMBEDDER} (default: %(default)s)"
    add("--embedder", default=DEFAULT_EMBEDDER, help=embedder_help)
    add("--device", help="torch device (default: CUDA if available)")
    add("--chunk-tokens", type=int, default=Chunking.tokens, help="size of a chunk (default: %(default)s)")
    add("--chunk-overlap", type=int, default=Chunking.overlap, help="tokens repeated (default: %(default)s)")
    workers_help = (
        "processes that embed, through Ray if more than one: one per GPU, or per core; RAY_ADDRESS names a "
        "cluster of several machines (default: %(default)s)"
    )
    add("--workers", type=int, default=1, help=workers_help)
    add("--replace", action="store_true", help="replace a collection of other content or settings")
    args = parser.parse_args(argv)
    if args.chroma_path is not None and args.collection is None:
        parser.error("a Chroma has collections: name one with --collection")
    replace_unshowable()
    try:
        check_proxies()
        if args.faiss_path is not None:
            target: Collection | FaissFolder | Shards = FaissFolder(args.faiss_path.resolve(), args.kind)
        else:
            target = chroma_target(args.chroma_path, args.collection, args.shards, args.writers)
        report = build(
            Corpus(args.source, args.source_collection),
            target,
            EmbedderSpec(args.embedder, args.device),
            BuildOptions(
                replace=args.replace,
                chunking=Chunking(args.chunk_tokens, args.chunk_overlap),
                workers=args.workers,
            ),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{target}: {report}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
