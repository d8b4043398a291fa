"""The index that a config names: a collection in a Chroma, or a FAISS index with its corpus.

with closing(index_of(config).open()) as store: ...
"""

from pathlib import Path

from omegaconf import DictConfig

from search.store import ChromaIndex
from search.stored_index import Index


def index_of(config: DictConfig) -> Index:
    """The index of a resolved config, not yet opened."""
    if config.index == "chroma":
        return ChromaIndex(config.chroma.path, config.chroma.collection)
    from search.faiss_store import FaissIndex  # loads FAISS, of which a run with Chroma has no use

    faiss = config.faiss
    lines = Path(config.paths.corpus)
    return FaissIndex(faiss.path, faiss.corpus, lines, faiss.ef_search, faiss.nprobe, faiss.device)
