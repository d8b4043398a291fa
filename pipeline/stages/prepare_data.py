"""The prepare-data stage: index a corpus if one is given, then write the challenger's prompts.

    drzero prepare-data source=papers.jsonl            # index, then prompts
    drzero prepare-data source=notes/                  # a folder of text and Markdown files
    drzero prepare-data chroma.path=my/chromadb        # prompts from an existing index

A prompt is made of one entry of the index: a document, or one chunk of a long document, which `doc_id` then
names. A prompt shows a limited number of tokens, so with whole documents nothing would ever be asked about
their ends.
"""

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from data.challenger_prompts import PrepareReport, prepare_challenger_prompts
from ops.errors import OutOfTime
from pipeline.compose import resolve
from pipeline.preflight.run import require
from pipeline.preflight.tokenizers import load_tokenizer
from search.embedders import EmbedderSpec
from search.indexing.adopt import adopt
from search.indexing.build import build_index
from search.indexing.chunking import Chunking
from search.place import ChromaPlace
from search.store import iter_documents
from verl_ext.artefacts import announce
from verl_ext.stop_time import describe_left, require_time, seconds_left

_LEAST_S = 120.0
"""Not started with less time left. The next run resumes an index that was cut off."""


def run_prepare_data(config: DictConfig) -> None:
    """Check, index and write the prompts; raises PreflightFailed, or what `prepare_data` raises."""
    require(config, "prepare_data")
    prepare_data(config)


def prepare_data(config: DictConfig) -> PrepareReport:
    """Write `zero_ratio….parquet` and its held-out split; prints and returns what was done.

    Raises CorpusError, StoreError or ValueError with nothing half-written, OutOfTime before anything starts
    or at the stop time: the next run resumes the index.
    """
    require_time("prepare-data", _LEAST_S)
    config = resolve(config)
    tokenizer = load_tokenizer(config.base_model, "base_model")
    chroma_path, collection = config.chroma.path, config.chroma.collection
    embedder = EmbedderSpec(config.retrieval.embedder, config.indexing.device)
    if config.source is None:
        adopted = adopt(chroma_path, collection, embedder)
        if adopted is not None:
            print(f"adopted {adopted.chunks} records of another tool, with vectors of {adopted.embedder}")
            _announce_index(chroma_path)
    else:
        try:
            with until_the_stop_time():
                report = build_index(
                    config.source,
                    chroma_path,
                    collection,
                    embedder,
                    source_collection=config.source_collection,
                    replace=config.replace,
                    chunking=Chunking(config.indexing.chunk_tokens, config.indexing.chunk_overlap),
                    workers=config.indexing.workers,
                )
        except OutOfTime:
            # What is embedded so far is in the journal next to it.
            _announce_index(chroma_path)
            raise
        print(report)
        _announce_index(chroma_path)
    prompts = prepare_challenger_prompts(
        iter_documents(chroma_path, collection),
        rows=config.rows,
        hop_ratio=list(config.hop_ratio),
        tokenizer=tokenizer,
        max_document_tokens=config.max_document_tokens,
        prompt_form=config.prompts.form,
        max_turns=config.rollout.max_turns,
        heldout_rows=config.heldout_rows,
        seed=config.data.seed,
        corpus_id=collection,
        out_dir=Path(config.out_dir),
    )
    for path in filter(None, (prompts.train_path, prompts.heldout_path)):
        announce(path)
    print(prompts.summary())
    return prompts


def _announce_index(chroma_path: str) -> None:
    if index := ChromaPlace.parse(chroma_path).folder:  # not a server's
        announce(index)


@contextmanager
def until_the_stop_time() -> Iterator[None]:
    """End the block by OutOfTime when the stop time comes; in the main thread, as any use of signals."""
    left = seconds_left()
    if math.isinf(left):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise OutOfTime(f"prepare-data was ended: {describe_left(seconds_left())}; rerun to resume its index")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
