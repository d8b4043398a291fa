"""Fingerprints of a stage's inputs: equal content gives equal fingerprints, any change a different one.

A file or folder is identified by its content, whatever its path and time; a hub model by its id and the
revision in the local cache; an index by the documents and the embedder it was built from; a checkpoint by the
first and last MiB of its files, instead of hundreds of gigabytes. Nothing here uses the network, but to ask
the server of an index.
"""

import hashlib
import json
from contextlib import closing
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from omegaconf import DictConfig

from drzero.recipe.indices import index_of
from search.index_info import ask_index
from search.stored_index import Index

_EDGE_BYTES = 2**20


def fingerprint(path: Path) -> str:
    """sha256 (hex) of a file's content, or of the names and contents of all files below a folder.

    Raises FileNotFoundError if `path` does not exist.
    """
    if not path.is_dir():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.parts)
    entries = [[file.relative_to(path).as_posix(), fingerprint(file)] for file in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def fingerprint_checkpoint(folder: Path) -> str:
    """sha256 (hex) of the names, sizes, first and last MiB of all files below a checkpoint's folder.

    Reading whole shards may take minutes, and is not necessary: `torch.save` writes a zip archive, which ends
    with the checksums of all tensors in it.
    """
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
    """Fingerprint of a model folder, or of a hub id: `id@revision`, or the id alone if it is not cached.

    Raises FileNotFoundError for a path that does not exist.
    """
    if Path(model).exists():
        return fingerprint(Path(model))
    try:
        config = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # the path of a missing folder is not a hub id
        raise FileNotFoundError(f"there is no model at {model}") from None
    # …/snapshots/REVISION/config.json
    return f"{model}@{Path(config).parent.name}" if isinstance(config, str) else model


def fingerprint_index(config: DictConfig) -> str:
    """Fingerprint of the index that a stage searches, at `retrieval.url` or where the config has it.

    The same index has the same one in both places. Raises StoreError or ServiceUnusable.
    """
    if config.retrieval.url is not None:
        return ask_index(config.retrieval.url.rstrip("/")).fingerprint
    return fingerprint_collection(index_of(config))


def fingerprint_collection(index: Index) -> str:
    """Fingerprint of a collection: the documents' hash and the embedding weights' revision.

    The same documents have the same fingerprint in a Chroma folder, on a Chroma server and in FAISS. A FAISS
    index of another tool goes by its files' sizes and edges (`FaissFiles.edges`). Raises StoreError if there
    is no index that can be served.
    """
    with closing(index.open()) as store:
        return f"{store.info.version}@{store.info.revision}"
