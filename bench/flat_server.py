"""A retrieval server like Search-R1's: a request's queries in one batch, exact search by FAISS.

    python -m bench.flat_server --vectors world --embedder packaged-minilm --port 9001

A synchronous FastAPI endpoint over an `IndexFlatIP`, for comparison in bench/retrieval.py, which writes the
folder `world`: `vectors.npy` (unit rows) and `corpus.jsonl` (title and text, in the same order).
"""

import argparse
from pathlib import Path

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from bench.model import load_model
from drzero.ops.records import read_json_lines


class RetrieveRequest(BaseModel):
    """Search-R1's request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = False


def create_app(folder: Path, embedder: str) -> FastAPI:
    """Load model and vectors, and return the app."""
    model, prefix = load_model(embedder)
    vectors = np.load(folder / "vectors.npy")
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    passages = []
    for record in read_json_lines(folder / "corpus.jsonl"):
        title, text = record["title"], record["text"]
        passages.append({"title": title, "text": text, "contents": f"{title}\n{text}"})
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> dict:
        """Answer the queries of one request as one batch."""
        queries = model.encode(
            request.queries, prompt=prefix, normalize_embeddings=True, show_progress_bar=False
        )
        scores, rows = index.search(queries, request.topk)
        if not request.return_scores:
            return {"result": [[passages[row] for row in found] for found in rows]}
        return {
            "result": [
                [
                    {"document": passages[row], "score": float(score)}
                    for row, score in zip(found, values, strict=True)
                ]
                for found, values in zip(rows, scores, strict=True)
            ]
        }

    @app.get("/health")
    def health() -> dict:
        """Answer as soon as the server runs."""
        return {"status": "ok"}

    return app


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--embedder", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    faiss.omp_set_num_threads(args.threads)
    app = create_app(args.vectors, args.embedder)
    uvicorn.run(app, host="127.0.0.1", port=args.port, access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
