"""The reference engine's server in a thread of the tests' process, around a tiny model."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from verl_ext.engine.api_server import create_app
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import eos_token_ids, load_model


@contextmanager
def served_model(folder: Path, name: str, max_seq_len: int = 600) -> Iterator[tuple[str, ReferenceEngine]]:
    """Serve the model of a folder; yields the base address and the engine."""
    model, tokenizer = load_model(str(folder))
    ends = eos_token_ids(model, tokenizer)
    engine = ReferenceEngine(model, eos_token_ids=ends, max_batch_size=32, max_seq_len=max_seq_len)
    with served(create_app(engine, tokenizer, name)) as address:
        yield address, engine


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an application in a thread; yields the base address of its model."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
