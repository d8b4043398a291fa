"""Take over a collection that another tool wrote, if its vectors are our embedder's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chromadb
import numpy as np

from search.chroma.content import record_content
from search.chroma.location import ChromaPlace, connect
from search.chroma.store import BEING_WRITTEN, get_collection, iter_documents
from search.embedders import Embedder, EmbedderSpec
from search.errors import StoreError
from search.sources.document import Document
from search.stored_index import SAME_VECTOR_COSINE, CollectionInfo, passage_text

SAMPLE = 100
_UNIT = 1e-3  # How far a unit vector's length may be from 1, in float32 or half precision


def is_foreign(metadata: Mapping[str, Any] | None) -> bool:
    """Whether a collection with this metadata is another tool's, not an unfinished or older one of ours."""
    return not {"schema_version", BEING_WRITTEN} & set(metadata or {})


def adopt(
    chroma_path: ChromaPlace | Path | str, collection: str, spec: EmbedderSpec
) -> CollectionInfo | None:
    """Make another tool's collection ours, None if it is ours already. Raises StoreError, writing nothing."""
    place = ChromaPlace.parse(chroma_path)
    with connect(place) as client:
        if not is_foreign(get_collection(client, place, collection).metadata):
            return None
    total = count = 0
    for key, title, text in iter_documents(place, collection):
        if not text.strip():
            raise _refusal(place, collection, f"record {key!r} has no text")
        total, count = total + int.from_bytes(Document(key, title, text).digest()), count + 1
    if not count:
        raise StoreError(f"collection {collection!r} in {place} is empty: index a corpus with source=…")
    embedder = Embedder(spec)
    with connect(place) as client:
        handle = get_collection(client, place, collection)
        distance = measured_distance(handle)
        if why := _difference(handle, count, embedder, distance):
            raise _refusal(place, collection, why)
        info = CollectionInfo(
            embedder=embedder.name,
            revision=embedder.revision,
            dimension=embedder.dimension,
            query_prefix=embedder.prefixes.query,
            passage_prefix=embedder.prefixes.passage,
            documents=count,
            chunks=count,
            chunk_tokens=0,
            chunk_overlap=0,
            version=f"{total % 2**256:064x}",
            distance=distance,
        )
        # Older Chromas keep the distance here, and newer ones refuse to write it again.
        own = {key: value for key, value in (handle.metadata or {}).items() if not key.startswith("hnsw:")}
        handle.modify(metadata={**own, **info.to_metadata()})
    if place.folder:
        record_content(place.folder, collection)
    return info


def measured_distance(handle: chromadb.Collection) -> str:
    """Return how Chroma measures here, by a query: collections of 0.4 to 0.6 say it in two places."""
    first: Any = handle.get(limit=1, include=["embeddings"])["embeddings"]
    query: Any = 2.0 * np.asarray(first[0], dtype=np.float32)
    found: Any = handle.query(query_embeddings=[query], n_results=1, include=["embeddings", "distances"])
    vector, said = np.asarray(found["embeddings"][0][0]), found["distances"][0][0]
    lengths = max(float(np.linalg.norm(query) * np.linalg.norm(vector)), 1e-12)
    measured = {
        "l2": float(((query - vector) ** 2).sum()),
        "cosine": 1 - float(query @ vector) / lengths,
        "ip": 1 - float(query @ vector),
    }
    return min(measured, key=lambda name: abs(measured[name] - said))


def _difference(handle: chromadb.Collection, count: int, embedder: Embedder, distance: str) -> str | None:
    texts, stored = [], []
    for place in np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).astype(int)):
        page: Any = handle.get(limit=1, offset=int(place), include=["documents", "metadatas", "embeddings"])
        (text,), (metadata,), (vector,) = page["documents"], page["metadatas"], page["embeddings"]
        texts.append(passage_text(str((metadata or {}).get("title") or ""), text))
        stored.append(np.asarray(vector, dtype=np.float32))
    if (dimension := len(stored[0])) != embedder.dimension:
        return f"its vectors have {dimension} numbers, those of {embedder.name} {embedder.dimension}"
    lengths = np.linalg.norm(stored, axis=1)
    cosines = (embedder.encode_passages(texts) * stored).sum(axis=1) / np.maximum(lengths, 1e-12)
    if (agreeing := int((cosines >= SAME_VECTOR_COSINE).sum())) < len(texts):
        return (
            f"its vectors are not those of {embedder.name} (of {len(texts)} records that were embedded again "
            f"{agreeing} agree, the least with cosine {cosines.min():.2f})"
        )
    if distance != "cosine" and abs(lengths - 1).max() > _UNIT:
        return f"its distance is {distance!r} over vectors that are not of length 1"
    return None


def _refusal(place: ChromaPlace, collection: str, why: str) -> StoreError:
    return StoreError(
        f"collection {collection!r} in {place} is of another tool and cannot be used as it is: {why}. Set "
        "retrieval.embedder to the model that made its vectors, or embed it again: `drzero prepare-data "
        f"source={place} source_collection={collection} replace=true`"
    )
