"""The embedding model of the servers we compare with: plain sentence-transformers."""

import importlib.util
from pathlib import Path

from sentence_transformers import SentenceTransformer

from search.embedders import PACKAGED_EMBEDDER, PACKAGED_MODULE, Embedder, EmbedderSpec


def load_model(embedder: str) -> tuple[SentenceTransformer, str]:
    """Return the model and the prefix of its queries."""
    folder = embedder
    if embedder == PACKAGED_EMBEDDER:
        package = importlib.util.find_spec(PACKAGED_MODULE)
        if package is None or not package.submodule_search_locations:
            raise SystemExit(f"{PACKAGED_EMBEDDER} needs the package {PACKAGED_MODULE.replace('_', '-')}")
        folder = str(Path(package.submodule_search_locations[0]) / "model")
    return SentenceTransformer(folder), Embedder(EmbedderSpec(embedder)).prefixes.query
