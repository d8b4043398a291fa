"""The embedding model of the servers we compare with: plain sentence-transformers."""

import importlib.util
from pathlib import Path

from sentence_transformers import SentenceTransformer

from search.embedders import PACKAGED_EMBEDDER, PACKAGED_MODULE, Embedder, EmbedderSpec


def model_folder(embedder: str) -> str:
    """The folder or hub id from which sentence-transformers loads the embedder."""
    if embedder != PACKAGED_EMBEDDER:
        return embedder
    package = importlib.util.find_spec(PACKAGED_MODULE)
    if package is None or not package.submodule_search_locations:
        raise SystemExit(f"{PACKAGED_EMBEDDER} needs the package {PACKAGED_MODULE.replace('_', '-')}")
    return str(Path(package.submodule_search_locations[0]) / "model")


def load_model(embedder: str) -> tuple[SentenceTransformer, str]:
    """The model and the prefix of its queries."""
    prefix = Embedder(EmbedderSpec(embedder)).prefixes.query
    return SentenceTransformer(model_folder(embedder)), prefix
