"""The prepare-data stage: index a corpus where one is given, then write the challenger's prompts.

drzero prepare-data source=papers.jsonl            # index, then prompts
drzero prepare-data source=notes/                  # a folder of text and Markdown files
drzero prepare-data chroma.path=my/chromadb        # prompts from an index that is there

The unit of a prompt is what the index holds: a document, or one chunk of a long one, which `doc_id` then
names. A prompt shows only so many tokens; were the document the unit, nothing would ever be asked about its
end.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from data.challenger_prompts import PrepareReport, prepare_challenger_prompts
from pipeline.checks import load_tokenizer
from pipeline.compose import resolve
from pipeline.out_of_time import require_time
from search.chunking import Chunking
from search.embedders import EmbedderSpec
from search.index import build_index
from search.store import ChromaPlace, iter_documents
from verl_ext.artefacts import announce

_LEAST_S = 120.0
"""With less left it is not begun. An index that was cut off is gone on with by the next run."""


def run_prepare_data(config: DictConfig) -> PrepareReport:
    """Write `zero_ratio….parquet` and its held-out split; prints and returns what was done.

    Raises CorpusError, StoreError or ValueError with nothing half-written, OutOfTime with nothing begun.
    """
    require_time("prepare-data", _LEAST_S)
    config = resolve(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path")
    chroma_path, collection = config.chroma.path, config.chroma.collection
    if config.source is not None:
        embedder = EmbedderSpec(config.retrieval.embedder, config.indexing.device)
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
        print(report)
        if index := ChromaPlace.parse(chroma_path).folder:  # not a server's
            announce(index)
    prompts = prepare_challenger_prompts(
        iter_documents(chroma_path, collection),
        rows=config.rows,
        hop_ratio=list(config.hop_ratio),
        tokenizer=tokenizer,
        max_document_tokens=config.max_document_tokens,
        prompt_form=config.prompts.form,
        max_turns=config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns,
        heldout_rows=config.heldout_rows,
        seed=config.data.seed,
        corpus_id=collection,
        out_dir=Path(config.out_dir),
    )
    for path in filter(None, (prompts.train_path, prompts.heldout_path)):
        announce(path)
    print(prompts.summary())
    return prompts
