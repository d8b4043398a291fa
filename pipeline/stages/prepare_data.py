"""The prepare-data stage: index a corpus if one is given, then write the challenger's prompts.

    drzero prepare-data source=papers.jsonl            # index, then prompts
    drzero prepare-data source=notes/                  # a folder of text and Markdown files
    drzero prepare-data chroma.path=my/chromadb        # prompts from an existing index
    drzero prepare-data source=papers.jsonl hold_out=[questions.jsonl]    # none from an evaluated document

A prompt is made of one entry of the index: a document, or one chunk of a long document, which `doc_id` then
names. A prompt shows a limited number of tokens, so with whole documents nothing would ever be asked about
their ends.
"""

import math
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from data.benchmarks import load_benchmark
from data.challenger_prompts import PrepareReport, prepare_challenger_prompts
from data.errors import DataError
from ops.errors import OutOfTime
from pipeline.compose import resolve
from pipeline.preflight.run import require
from pipeline.preflight.tokenizers import load_tokenizer
from search.embedders import EmbedderSpec
from search.indexing.adopt import adopt
from search.indexing.build import build_index
from search.indexing.chunking import Chunking, document_of
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

    Raises CorpusError, StoreError, DataError or ValueError with nothing half-written, OutOfTime before
    anything starts or at the stop time: the next run resumes the index.
    """
    require_time("prepare-data", _LEAST_S)
    config = resolve(config)
    held_out = held_out_documents(config.hold_out)
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
        (
            document
            for document in iter_documents(chroma_path, collection)
            if held_out.isdisjoint((document[0], document_of(document[0])))
        ),
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
    if held_out:
        print(f"no prompt shows any of the {len(held_out)} documents that the benchmarks are about")
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


def held_out_documents(benchmarks: Iterable[str]) -> set[str]:
    """The ids of the documents that these benchmark files are about.

    Raises DataError for a file that cannot be read, or has a question that names no document.
    """
    documents: set[str] = set()
    for source in benchmarks:
        for question in load_benchmark(source):
            if not question.doc_ids:
                raise DataError(
                    f"hold_out: question {question.id!r} of {source} names no document (doc_ids), so that "
                    "none can be held out for it: name them, or give this file to gates.benchmarks alone"
                )
            documents.update(question.doc_ids)
    return documents
