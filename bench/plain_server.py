"""A straightforward retrieval server: each request on its own, one query at a time.

    python -m bench.plain_server --chroma-path chromadb --collection wiki --embedder NAME --port 9000

A synchronous FastAPI endpoint (so it runs in a thread pool), a sentence-transformers `encode` and a Chroma
query for every query. Same wire format, model, prefixes and index as `search.server`: only the service around
them differs. Only for comparison in bench/retrieval.py.
"""

import argparse
from pathlib import Path
from typing import Any

import chromadb
import torch
import uvicorn
from chromadb.config import Settings
from fastapi import FastAPI
from pydantic import BaseModel

from bench.model import load_model


class RetrieveRequest(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = False


def create_app(chroma_path: Path, collection: str, embedder: str) -> FastAPI:
    """Load model and collection, and return the app."""
    model, prefix = load_model(embedder)
    client = chromadb.PersistentClient(str(chroma_path), settings=Settings(anonymized_telemetry=False))
    documents = client.get_collection(collection, embedding_function=None)
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict:
        """Answer the queries, one after the other."""
        result = []
        for query in request.queries:
            vector = model.encode(query, prompt=prefix, normalize_embeddings=True, show_progress_bar=False)
            found = documents.query(
                query_embeddings=[vector.tolist()],
                n_results=request.topk,
                include=["documents", "metadatas", "distances"],
            )
            columns: Any = (found["documents"], found["metadatas"], found["distances"])
            hits = []
            for text, metadata, distance in zip(*(column[0] for column in columns), strict=True):
                title = metadata["title"]
                passage = {"title": title, "text": text, "contents": f"{title}\n{text}"}
                hits.append(
                    {"document": passage, "score": 1 - distance} if request.return_scores else passage
                )
            result.append(hits)
        return {"result": result}

    @app.get("/health")
    def health() -> dict:
        """Answer as soon as the server runs."""
        return {"status": "ok"}

    return app


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chroma-path", type=Path, required=True)
    parser.add_argument("--collection", required=True)
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    app = create_app(args.chroma_path, args.collection, args.embedder)
    uvicorn.run(app, host="127.0.0.1", port=args.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
