"""The reference engine's server in a thread of the tests' process, around a tiny model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import served

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
