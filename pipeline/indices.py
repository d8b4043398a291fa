"""The index that a config names: a collection in a Chroma, or a FAISS index with its corpus.

    with closing(index_of(config).open()) as store: ...

FAISS is loaded where it is used: a run with Chroma has no use for it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from search.indexing.collection import Collection, collection_at
from search.store import ChromaIndex
from search.stored_index import Index

if TYPE_CHECKING:
    from search.indexing.faiss_folder import FaissFolder


def index_of(config: DictConfig) -> Index:
    """The index of a resolved config, not yet opened."""
    if config.index == "chroma":
        return ChromaIndex(config.chroma.path, config.chroma.collection)
    from search.faiss_store import FaissIndex

    faiss = config.faiss
    lines = Path(config.paths.corpus)
    return FaissIndex(faiss.path, faiss.corpus, lines, faiss.ef_search, faiss.nprobe, faiss.device)


def target_of(config: DictConfig) -> "Collection | FaissFolder":
    """The index that a resolved config has built; raises StoreError for what is no Chroma's address."""
    if config.index == "chroma":
        return collection_at(config.chroma.path, config.chroma.collection)
    from search.indexing.faiss_folder import FaissFolder

    return FaissFolder(Path(config.faiss.path).resolve(), config.indexing.kind)
