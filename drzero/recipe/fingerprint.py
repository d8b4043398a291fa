"""Fingerprints of a stage's inputs: equal content gives equal ones. Only an index server is asked."""

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from drzero.recipe.indices import index_of

if TYPE_CHECKING:
    from search.stored_index import Index

_EDGE_BYTES = 2**20


def fingerprint(path: Path) -> str:
    """sha256 (hex) of a file, or of all names and contents below a folder. Raises FileNotFoundError."""
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.parts)
    entries = [[file.relative_to(path).as_posix(), fingerprint(file)] for file in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def fingerprint_checkpoint(folder: Path) -> str:
    """sha256 (hex) of all files' names, sizes and edges: `torch.save` ends with its tensors' checksums."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(json.dumps([path.relative_to(folder).as_posix(), size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(size - _EDGE_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()


def fingerprint_model(model: str) -> str:
    """A model folder's fingerprint, or a hub id with its cached revision. Raises FileNotFoundError."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(model).exists():
        return fingerprint(Path(model))
    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # a missing folder's path
        raise FileNotFoundError(f"there is no model at {model}") from None
    # …/snapshots/REVISION/config.json
    return f"{model}@{Path(config).parent.name}" if isinstance(config, str) else model


def fingerprint_index(config: DictConfig) -> str:
    """The index, alike at `retrieval.url` and in its own place. Raises StoreError or ServiceUnusable."""
    if config.retrieval.url is not None:
        from search.index_info import ask_index

        return ask_index(config.retrieval.url.rstrip("/")).fingerprint
    return fingerprint_collection(index_of(config))


def fingerprint_collection(index: "Index") -> str:
    """The documents' hash and the embedder's revision, alike in every store. Raises StoreError.

    A FAISS index of another tool goes by its files' sizes and edges (`FaissFiles.edges`).
    """
    with closing(index.open()) as store:
        return f"{store.info.version}@{store.info.revision}"
