"""Checks of training data: the index, and the parquet files with their wording and prompt lengths.

A token has at least one byte, so only prompts of many bytes are tokenized, or a sample of them.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from data.parquet_io import read_parquet
from drzero.preflight.batch import fills_batch
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, PreflightFailed, error, note, warning
from drzero.recipe.indices import index_of
from search.chroma.location import connect
from search.chroma.sharded_store import ChromaIndex
from search.chroma.store import get_collection
from search.embedders import model_identity
from search.indexing.adopt import is_foreign
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.prompts import challenger_messages, solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA

SAMPLE, LONGEST = 2000, 64
MOST_ALONE = 0.05  # share of a step's rows that may have no row to compare with
TRAIN, VAL = "data.train_files", "data.val_files"
_LIMIT = "data.max_prompt_length"


def check_challenger_data(ctx: CheckContext) -> Iterator[Finding]:
    """The prompts must exist, fill a batch, have this run's wording, and fit the prompt length."""
    config, path = ctx.config, Path(str(ctx.config.data.train_files))
    if not path.exists():
        others = sorted(other.name for other in path.parent.glob("zero_ratio*.parquet"))
        there = f"; {', '.join(others)} there is for another model or hop_ratio" if others else ""
        why = f"no prompts at {path} (data.train_files){there}"
        yield error(
            TRAIN, why, "make them with `drzero prepare-data` and the same model=, or correct the path"
        )
        return
    table = read_parquet(path, ["prompt", "extra_info"])
    prompts = table.column("prompt").to_pylist()
    dropped = 0
    if prompts:
        info, form = table.column("extra_info")[0].as_py(), config.prompts.form
        worded = challenger_messages(info["document"], info["hop"], form, config.rollout.max_turns)
        yield from _wording(config, path, prompts[0] == worded, "`drzero prepare-data`")
        dropped = yield from _too_long(ctx, TRAIN, path, prompts, "use a smaller max_document_tokens")
    if ctx.trains:
        more = "write more with `drzero prepare-data rows=…`"
        yield from fills_batch(config, path, len(prompts), more, dropped)
        yield from _lone_rows(config, [info["hop"] for info in table.column("extra_info").to_pylist()])


def check_solver_data(ctx: CheckContext) -> Iterator[Finding]:
    """The questions must have answers and this run's wording, and fit. A validation file is optional."""
    config = ctx.config
    again = f"`drzero synthesize iteration={config.iteration}`"
    for key in (TRAIN, VAL):
        path = OmegaConf.select(config, key)
        if path and ctx.is_to_come(path):
            continue
        if path and Path(path).exists():
            yield from _questions(ctx, key, Path(path), again)
        elif key == TRAIN:
            yield error(key, f"no questions at {path} ({key})", f"make them with {again}")
        else:
            yield _falls_back(config, path)


def _falls_back(config: DictConfig, path: str | None) -> Finding:
    trainer = config.trainer
    validates = trainer.test_freq > 0 or trainer.val_before_train
    why = f"there is no file at {path}, so {config.data.train_files} replaces it"
    fix = "name a file of held-out questions, or set trainer.test_freq=-1 trainer.val_before_train=false"
    if validates:
        return warning(VAL, f"{why}: validation will score training questions", fix)
    return note(VAL, why, fix)


def check_val_file(ctx: CheckContext) -> Iterator[Finding]:
    """A stage that need not validate still needs a file, if only the training file."""
    path = ctx.config.data.val_files
    if path == ctx.config.data.train_files:
        return
    if not path or not Path(str(path)).exists():
        yield _falls_back(ctx.config, path)
    elif not pq.read_metadata(path).num_rows:
        yield error(VAL, f"{path} has no rows", f"set {VAL} to the training file")


def _questions(ctx: CheckContext, key: str, path: Path, again: str) -> Iterator[Finding]:
    config = ctx.config
    table = read_parquet(path, ["prompt", "reward_model", "extra_info"])
    prompts = table.column("prompt").to_pylist()
    if not prompts:
        yield error(key, f"{path} ({key}) has no rows", f"synthesize more with {again}")
        return
    targets = table.column("reward_model").to_pylist()
    if bare := [row for row, judged in enumerate(targets) if not judged["ground_truth"]["target"]]:
        yield error(
            key,
            f"{path} ({key}): {len(bare)} of {len(prompts)} rows have no answer to compare with, the first "
            f"is row {bare[0]}. Are these challenger prompts?",
            f"questions are made with {again}",
        )
        return
    question = table.column("extra_info")[0].as_py()["question"]
    worded = solver_messages(question, config.prompts.form, config.rollout.max_turns)
    yield from _wording(config, path, prompts[0] == worded, again)
    dropped = yield from _too_long(ctx, key, path, prompts, "shorten the questions")
    if key == TRAIN:
        more = f"synthesize more with {again}, or make the batch smaller"
        yield from fills_batch(config, path, len(prompts), more, dropped)


def _lone_rows(config: DictConfig, hops: Sequence[int]) -> Iterator[Finding]:
    others = config.data.train_batch_size - 1
    counts = Counter(hops)
    alone = {hop: (1 - count / len(hops)) ** others for hop, count in sorted(counts.items())}
    share = sum(alone[hop] * count for hop, count in counts.items()) / max(len(hops), 1)
    if config.method == "hrpo" and share > MOST_ALONE:
        each = ", ".join(f"{part:.0%} of {hop} hops" for hop, part in alone.items())
        yield warning(
            "data.train_batch_size",
            f"{share:.0%} of the rows are expected to be alone with their hop count in a step ({each}), and "
            "then have advantage 0",
            "make the batch larger, or ask for fewer hop counts (hop_ratio)",
        )


def _wording(config: DictConfig, path: Path, is_same: bool, remade_by: str) -> Iterator[Finding]:
    if not is_same:
        wanted = f"prompts.form={config.prompts.form}, {config.rollout.max_turns} turns"
        why = f"the prompts in {path} are not worded for this run ({wanted})"
        yield error("prompts.form", why, f"remake them with {remade_by} and the same model=")


def _too_long(
    ctx: CheckContext, key: str, path: Path, prompts: Sequence[list[dict[str, Any]]], advice: str
) -> Generator[Finding, None, int]:
    """Report prompts above the limit. Returns how many veRL would drop, 0 if only a sample was read."""
    limit, counts = ctx.config.data.max_prompt_length, ctx.readings.token_counts
    try:
        tokenizer = ctx.load_tokenizer(ctx.policy, key)
    except PreflightFailed:  # check_models reports it
        return 0
    name = (f"{path} {path.stat().st_mtime_ns}", ctx.policy, limit)
    if name not in counts:
        counts[name] = count_too_long(prompts, tokenizer, limit)
    over, sampled = counts[name]
    if not over:
        return 0
    worst = max(over, key=lambda row: over[row])
    of = f"a sample of {sampled} of {len(prompts)}" if sampled else str(len(prompts))
    why = (
        f"{len(over)} of {of} prompts in {path} are longer than data.max_prompt_length={limit} tokens "
        f"(row {worst}: {over[worst]})"
    )
    if ctx.config.data.get("filter_overlong_prompts"):
        yield warning(_LIMIT, f"{why}, and will be dropped", f"raise it, or {advice}")
        return 0 if sampled else len(over)
    # veRL silently keeps only the end of such a prompt, whatever data.truncation says.
    yield error(_LIMIT, f"{why}, and veRL would cut off their beginning", f"raise it, or {advice}")
    return 0


def count_too_long(
    prompts: Sequence[list[dict[str, Any]]], tokenizer: Any, limit: int
) -> tuple[dict[int, int], int | None]:
    """The lengths above `limit` by row, and how many prompts were sampled (None: all)."""
    blank = [{"role": role, "content": ""} for role in ("system", "user")]
    frame = len(render_prompt_ids(tokenizer, blank, [SEARCH_TOOL_SCHEMA]))
    sizes = [frame + sum(len(message["content"].encode()) for message in prompt) for prompt in prompts]
    rows = [row for row, size in enumerate(sizes) if size > limit]
    is_sample = len(rows) > SAMPLE
    if is_sample:
        longest = sorted(rows, key=lambda row: -sizes[row])[:LONGEST]
        step = len(rows) / (SAMPLE - LONGEST)
        rows = sorted({*longest, *(rows[int(place * step)] for place in range(SAMPLE - LONGEST))})
    lengths = {row: len(render_prompt_ids(tokenizer, prompts[row], [SEARCH_TOOL_SCHEMA])) for row in rows}
    over = {row: length for row, length in lengths.items() if length > limit}
    return over, len(rows) if is_sample else None


def check_source(ctx: CheckContext) -> Iterator[Finding]:
    """Without a source there must be an index to serve, or a collection to adopt."""
    index = index_of(ctx.config)
    if ctx.config.source is not None:
        return
    if not isinstance(index, ChromaIndex) or index.shards > 1:  # FAISS and shards cannot be adopted
        yield from check_index(ctx)
        return
    place, name = index.place(0)
    with connect(place) as client:
        foreign = is_foreign(get_collection(client, place, name).metadata)
    if foreign:
        embedder = ctx.config.retrieval.embedder
        why = f"another tool wrote {name!r}: the run adopts it if its vectors match {embedder}"
        yield note("chroma.path", why, "otherwise the run says how to embed it again")
    else:
        yield from check_index(ctx)


def check_index(ctx: CheckContext) -> Iterator[Finding]:
    """The index must exist, and be built with this run's embedder if it records one."""
    index, embedder = index_of(ctx.config), ctx.config.retrieval.embedder
    built = ctx.index_info().embedder
    if built and model_identity(built) != model_identity(embedder):
        yield error(
            "retrieval.embedder",
            f"{index} was built with {built}, but retrieval.embedder is {embedder}",
            f"set retrieval.embedder={built}, or reindex the corpus",
        )
