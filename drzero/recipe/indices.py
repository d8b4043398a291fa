"""The index that a config names: a Chroma collection, its shards, or a FAISS index with its corpus.

with closing(index_of(config).open()) as store: ...
"""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, ListConfig

from search.chroma.location import ChromaPlace, Quota

if TYPE_CHECKING:
    from search.indexing.collection import Collection
    from search.indexing.faiss_folder import FaissFolder
    from search.indexing.shards import Shards
    from search.sources.corpus import Corpus
    from search.stored_index import Index


def places_of(config: DictConfig) -> list[ChromaPlace]:
    """The folders or addresses of chroma.path. Raises StoreError for other values."""
    path, quota = config.chroma.path, config.chroma.quota
    paths = path if isinstance(path, (list, ListConfig)) else [path]
    allowed = Quota(quota.page, quota.reads)
    return [ChromaPlace.parse(str(each)).within(allowed) for each in paths]


def index_of(config: DictConfig) -> "Index":
    """The index of a resolved config, not yet opened. Raises StoreError for a bad chroma.path."""
    chroma = config.chroma
    if config.index == "chroma":
        from search.chroma.sharded_store import chroma_index

        return chroma_index(places_of(config), chroma.collection, chroma.shards)
    from search.faiss.store import FaissIndex

    faiss = config.faiss
    lines = Path(config.paths.corpus)
    return FaissIndex(faiss.path, faiss.corpus, lines, faiss.ef_search, faiss.nprobe, faiss.device)


def target_of(config: DictConfig) -> "Collection | FaissFolder | Shards":
    """The index that a resolved config builds. Raises StoreError for a bad chroma.path."""
    chroma, indexing = config.chroma, config.indexing
    if config.index == "chroma":
        from search.indexing.shards import chroma_target

        return chroma_target(places_of(config), chroma.collection, chroma.shards, indexing.writers)
    from search.indexing.faiss_folder import FaissFolder

    return FaissFolder(Path(config.faiss.path).resolve(), indexing.kind)


def corpus_of(config: DictConfig) -> "Corpus":
    """The configured source, to be indexed."""
    from search.sources.corpus import Corpus
    from search.sources.document import Fields

    fields = Fields(config.fields.text, config.fields.title, config.fields.id)
    return Corpus(config.source, config.source_collection, fields, config.on_bad, config.encoding)
