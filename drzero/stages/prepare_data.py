"""The prepare-data stage: index a corpus if one is given, then write the challenger's prompts.

    drzero prepare-data source=papers.jsonl fields.text=abstract fields.title=name    # index, then prompts
    drzero prepare-data source=notes/                  # a folder: texts, Markdown, html, rst, tables
    drzero prepare-data 'source=docs/**/*.md' on_bad=skip
    drzero prepare-data chroma.path=my/chromadb        # prompts from an existing index
    drzero prepare-data source=papers.jsonl hold_out=[questions.jsonl]    # none from an evaluated document
    drzero prepare-data source=papers.jsonl model=qwen2.5-3b    # for that model: its prompts, its embedder
    drzero prepare-data source=wiki.jsonl chroma.shards=4     # an index in four collections
    drzero prepare-data source=wiki.jsonl indexing.embed_only=true    # on a GPU; then without it, elsewhere

A prompt shows one entry of the index: a document, or one chunk of a long document. Lengths are counted with
the embedder's tokenizer, which also cut the chunks, so a prompt shows a whole chunk. `quality.json` next to
the prompts lists everything read, left out and adapted.

A packaged model, the default on a laptop, is unpacked at the end, so that a challenger can follow.
"""

import math
import signal
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from omegaconf import DictConfig
from tokenizers import Tokenizer

from data.challenger_prompts import PrepareReport, prepare_challenger_prompts
from data.links import MEASURED, Entry, can_be_counted, chain_lengths
from data.quality import FILE, quality, quality_lines, write_quality
from drzero.ops.artefacts import announce
from drzero.ops.console import say
from drzero.ops.errors import OutOfTime
from drzero.ops.stop_time import describe_left, require_time, seconds_left
from drzero.preflight.demo_world import demo_notice
from drzero.preflight.index_size import require_room
from drzero.preflight.inputs import held_out_documents, question_fields
from drzero.preflight.machine import declared_machine
from drzero.preflight.run import require
from drzero.recipe.compose import resolve
from drzero.recipe.indices import corpus_of, index_of, target_of
from drzero.stages.demo_models import BASE_NAME, POLICY_NAME, unpack_demo_models
from search.chroma.sharded_store import ChromaIndex
from search.embedders import Embedder, EmbedderSpec
from search.indexing.adopt import adopt
from search.indexing.build import BuildOptions, IndexReport
from search.indexing.chunking import Chunking, document_of
from search.indexing.shards import build
from search.sources.corpus import Corpus

_LEAST_S = 120.0  # With less time left, nothing starts. The next run resumes an unfinished index.


def run_prepare_data(config: DictConfig) -> None:
    """Check, index and write the prompts. Raises PreflightFailed, else as `prepare_data`."""
    require(config, "prepare_data")
    if config.indexing.embed_only:  # for an index that another run writes
        require_time("prepare-data", _LEAST_S)
        config = resolve(config)
        _build_index(config, corpus_of(config), _embedder_of(config), embed_only=True)
        return
    prepare_data(config)
    config = resolve(config)
    models, model = Path(config.paths.corpus) / "models", Path(config.base_model)
    if model in (models / BASE_NAME, models / POLICY_NAME):
        unpack_demo_models(models)


def prepare_data(
    config: DictConfig, corpus: Corpus | None = None, about: Container[str] | None = None
) -> PrepareReport:
    """Index the corpus and write prompts, held-out split and `quality.json`.

    If no chains are counted, prompts show only the ids in `about`. Raises OutOfTime, or CorpusError,
    StoreError, DataError or ValueError with nothing half-written.
    """
    require_time("prepare-data", _LEAST_S)
    config = resolve(config)
    held_out = held_out_documents(config.hold_out, question_fields(config))
    embedder = _embedder_of(config)
    index = None
    if corpus is None and config.source is not None:
        corpus = corpus_of(config)
    if corpus is None:
        _adopt_index(config, embedder)
    else:
        index = _build_index(config, corpus, embedder)
    tokenizer = Embedder(embedder).plain_tokenizer()
    prompts, chains, unknown = write_prompts(config, held_out, tokenizer, about)
    out_dir = Path(config.out_dir)
    lines = list(quality_lines(prompts, chains, index))
    write_quality(out_dir / FILE, quality(prompts, chains, index) | {"lines": lines})
    for path in filter(None, (prompts.train_path, prompts.heldout_path, out_dir / FILE)):
        announce(path)
    for line in lines:
        say("corpus", line)
    kept = len(held_out) - len(unknown)
    shown = f"; none shows any of the {kept} documents held out for benchmarks" if kept else ""
    say("prompts", prompts.summary() + shown)
    if unknown and about is None:
        lacks = f"{len(unknown)} of the {len(held_out)} documents to hold out, e.g. {min(unknown)!r}"
        say("prompts", f"the index lacks {lacks}: benchmarks must name documents by their ids in the index")
    if notice := demo_notice(str(config.base_model), prompts.train_path):
        say("prompts", notice)
    return prompts


def write_prompts(
    config: DictConfig, held_out: set[str], tokenizer: Tokenizer, about: Container[str] | None = None
) -> tuple[PrepareReport, dict[str, int] | None, set[str]]:
    """Returns a report, the index's chains if counted, and held-out documents missing from a whole index."""
    index = index_of(config)
    with closing(index.open()) as store:
        chunks = store.info.chunks
    is_large = chunks > MEASURED
    drawn = index.drawn(config.data.seed) if is_large else None
    chains = None
    if config.fit_hops and not is_large:
        # Held-out documents count: a question may lead to them.
        some = list(index.documents())
        chains = chain_lengths(some) if can_be_counted(some) else None
        del some
    if is_large and drawn is None:
        say("prompts", f"reading all {chunks:,} entries: this index is too old to draw from")
    entries = index.documents() if drawn is None else drawn
    found: set[str] = set()

    def not_held_out() -> Iterator[Entry]:
        for entry in entries:
            document = document_of(entry[0])
            if named := held_out & {entry[0], document}:
                found.update(named)
            # Counted chains say what the rest of the sample carries.
            elif about is None or chains is not None or document in about:
                yield entry

    prompts = prepare_challenger_prompts(
        not_held_out(),
        rows=config.rows,
        hop_ratio=list(config.hop_ratio),
        tokenizer=tokenizer,
        min_document_tokens=config.min_document_tokens,
        min_prose=config.min_prose,
        max_document_tokens=config.max_document_tokens,
        chains=chains,
        prompt_form=config.prompts.form,
        max_turns=config.rollout.max_turns,
        heldout_rows=config.heldout_rows,
        seed=config.data.seed,
        corpus_id=index.name,
        out_dir=Path(config.out_dir),
        drawn_from=None if drawn is None else chunks,
    )
    return prompts, chains, held_out - found if drawn is None else set()


def _adopt_index(config: DictConfig, embedder: EmbedderSpec) -> None:
    """Take over the index at chroma.path if another tool wrote it. Shards and FAISS stay as they are."""
    index = index_of(config)
    if not isinstance(index, ChromaIndex) or index.shards > 1:
        return
    adopted = adopt(*index.place(0), embedder)
    if adopted is not None:
        vectors = f"with vectors of {adopted.embedder}"
        say("index", f"adopted {adopted.chunks} records of another tool, {vectors}")
        _announce_index(config)


def _build_index(
    config: DictConfig, corpus: Corpus, embedder: EmbedderSpec, embed_only: bool = False
) -> IndexReport:
    """Index the corpus. Raises PreflightFailed before embedding if the index cannot fit."""
    machine = declared_machine(config, starting=True)
    try:
        with until_the_stop_time():
            report = build(
                corpus,
                target_of(config),
                embedder,
                BuildOptions(
                    replace=config.replace,
                    chunking=Chunking(config.indexing.chunk_tokens, config.indexing.chunk_overlap),
                    workers=config.indexing.workers,
                    judge=lambda planned: say("index", require_room(planned, config, machine, embed_only)),
                    embed_only=embed_only,
                ),
            )
    except OutOfTime:
        # Its journal has the finished embeddings.
        _announce_index(config)
        raise
    say("index", str(report))
    if report.is_written:
        _announce_index(config)
    return report


def _embedder_of(config: DictConfig) -> EmbedderSpec:
    indexing = config.indexing
    own = (indexing.query_prefix, indexing.passage_prefix)
    return EmbedderSpec(config.retrieval.embedder, indexing.device, None, *own)


def _announce_index(config: DictConfig) -> None:
    if folder := index_of(config).folder:  # not a server's
        announce(folder)


@contextmanager
def until_the_stop_time() -> Iterator[None]:
    """Raise OutOfTime in the block at the stop time. Uses signals, so only in the main thread."""
    left = seconds_left()
    if math.isinf(left):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        raise OutOfTime(f"prepare-data stopped: {describe_left(seconds_left())}; rerun to resume its index")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
