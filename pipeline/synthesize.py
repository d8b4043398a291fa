"""The synthesize stage: the trained challenger's questions, judged by the gates, become the solver's data.

    drzero synthesize iteration=1                                        # partition 1 of 5 of the prompts
    drzero synthesize iteration=1 gates.evidence=false                   # the same samples, judged otherwise

Two halves. *Sampling* plays `samples` conversations per prompt and journals each in `samples.jsonl` as soon
as it is finished: a kill loses what was in flight, and a rerun plays what is missing. *Selection* is a pure
function of the journal and of `gates:`, so every run does it anew and gets the same bytes. A conversation
that services have spoiled twice is no sample: it is counted, and played by the next run. A prompt is judged
on the samples it has.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.benchmarks import load_benchmark
from data.gates import Gates
from data.journal import Journal
from data.selection import select
from data.solver_rows import REJECTS, TRAIN, VAL, check_partition, write_rejects, write_solver_split
from ops.atomic import atomic_write
from ops.leftovers import remove_temporaries
from ops.lock import HeldLock
from ops.services import ServiceGroup
from pipeline.checks import load_chat_tokenizer
from pipeline.compose import resolve, write_resolved
from pipeline.export import export_policy
from pipeline.fingerprint import fingerprint, fingerprint_collection, fingerprint_model
from pipeline.out_of_time import require_time
from pipeline.preflight import require
from pipeline.served_model import (
    LAST_BEGIN_S,
    Failed,
    check_failed_share,
    completions_url,
    play_all,
    served_agent,
)
from pipeline.stage_result import RESULT, write_result
from pipeline.stage_services import choose_ports, retrieval_spec, solver_spec
from pipeline.synthesis_inputs import gate_settings, partition_rows
from pipeline.synthesis_report import figures, print_report, synthesis_report
from search.embedders import Embedder, EmbedderSpec
from verl_ext.artefacts import announce
from verl_ext.method.prompts import Message
from verl_ext.method.search_agent import Conversation, SearchAgent

SAMPLES, REPORT = "samples.jsonl", "report.json"
SERVICE = "challenger"
"""The challenger's name as a service, and as its server calls it."""
_SHORT = 12  # hexadecimal digits of a fingerprint that a reader compares

Row = dict[str, Any]
"""A challenger prompt: a row of the prompts file."""


@dataclass(frozen=True)
class Sample:
    """One conversation to have."""

    prompt_index: int
    number: int
    """Among the conversations of its prompt, from 0."""
    seed: int
    messages: list[Message]


def run_synthesize(config: DictConfig) -> None:
    """Play what is missing, judge, and write the solver's split, the rejects, the report and the result.

    Raises PreflightFailed before anything starts, OutOfTime when the stop time comes before all is sampled,
    ServiceDied or ConversationsFailed when sampling cannot go on, DataError when no prompt gave a pair.
    """
    require(config, "synthesize")
    choose_ports(config)
    config = resolve(config)
    rows = partition_rows(config)
    folder = Path(config.run.dir)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        config.solver.model_path = model = merge_if_needed(config)
        tokenizer = load_chat_tokenizer(model, "challenger")
        benchmark_questions = [q.question for file in config.gates.benchmarks for q in load_benchmark(file)]
        identity = fingerprint_model(model)
        with Journal(folder / SAMPLES, journal_identity(config, identity)) as journal:
            _sample(config, rows, tokenizer, journal)
            records = journal.records
        _select(config, rows, records, generator_name(config, identity), benchmark_questions)


def merge_if_needed(config: DictConfig) -> str:
    """The challenger's model folder or hub id; a run's last checkpoint goes to `run.export_dir` first."""
    folder = Path(config.challenger)
    is_run = folder.is_dir() and not (folder / "config.json").is_file()
    return str(export_policy(config, folder.absolute())) if is_run else str(config.challenger)


def journal_identity(config: DictConfig, model: str) -> dict[str, Any]:
    """All that a sample depends on; how many there are per prompt does not matter to any one of them."""
    solver, retrieval = config.solver, config.retrieval
    return {
        "model": model,
        "prompts": fingerprint(Path(config.data.train_files)),
        "partition": f"{config.partition} of {config.partitions}",
        "collection": fingerprint_collection(config.chroma.path, config.chroma.collection),
        "data.seed": config.data.seed,
        "retrieval.topk": retrieval.topk,
        "retrieval.response_limit": retrieval.response_limit,
        "solver.engine": solver.engine,
        "solver.dtype": solver.dtype,
        "solver.temperature": solver.temperature,
        "solver.max_turns": solver.max_turns,
        "solver.max_tokens_per_turn": solver.max_tokens_per_turn,
        "solver.max_context_tokens": solver.max_context_tokens,
    }


def sample_seed(run_seed: int, prompt_index: int, number: int) -> int:
    """The seed of a sample: 63 bits, so that it fits a signed column and every server's seed."""
    digest = hashlib.sha256(f"{run_seed}/{prompt_index}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def missing_samples(config: DictConfig, rows: Sequence[Row], records: Sequence[Row]) -> list[Sample]:
    """The conversations that the journal lacks, prompt by prompt."""
    there = {(record["prompt_index"], record["sample"]) for record in records}
    wanted = ((row, row["extra_info"]["index"], number) for row in rows for number in range(config.samples))
    return [
        Sample(index, number, sample_seed(config.data.seed, index, number), row["prompt"])
        for row, index, number in wanted
        if (index, number) not in there
    ]


def sample_record(sample: Sample, conversation: Conversation) -> dict[str, Any]:
    """What the journal keeps of a finished conversation."""
    return {
        "prompt_index": sample.prompt_index,
        "sample": sample.number,
        "seed": sample.seed,
        "trajectory": conversation.trajectory.to_dict(),
        "tokens_in": conversation.tokens_in,
        "tokens_out": conversation.tokens_out,
        "latency_s": round(conversation.latency_s, 2),
    }


def generator_name(config: DictConfig, identity: str) -> str:
    """What made the pairs, for their metadata: its place below the checkpoints, and the model's content."""
    path = Path(config.challenger)
    if not path.is_dir():  # a hub id, whose identity names it
        return identity
    root = Path(config.paths.checkpoints)
    place = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{place}@{identity[:_SHORT]}"


def _sample(config: DictConfig, rows: Sequence[Row], tokenizer: Any, journal: Journal) -> None:
    """Serve the challenger and play what is missing."""
    missing, total = missing_samples(config, rows, journal.records), len(rows) * config.samples
    print(f"{len(rows)} prompts, {total} samples, {len(missing)} of them still to draw, {config.challenger}")
    if not missing:
        return
    require_time(config.run.name, LAST_BEGIN_S)
    # An old result must not vouch for work that is yet to finish.
    (Path(config.run.dir) / RESULT).unlink(missing_ok=True)
    write_resolved(config)
    try:
        with ServiceGroup([retrieval_spec(config), solver_spec(config, SERVICE)]) as services:
            failed = asyncio.run(play_samples(config, tokenizer, missing, journal, services))
    finally:
        announce(journal.path)
    for reason, times in Counter(failure.reason for failure in failed).most_common(3):
        print(f"failed {times} times, to be tried again by the next run: {reason}")


async def play_samples(
    config: DictConfig,
    tokenizer: Any,
    missing: Sequence[Sample],
    journal: Journal,
    services: ServiceGroup,
) -> list[Failed[Sample]]:
    """Play conversations with the services at the configured ports; each finished one goes to the journal.

    Returns what failed twice; raises ConversationsFailed when that is too large a share of all samples.
    """
    async with served_agent(SearchAgent, config, completions_url(config), SERVICE, tokenizer) as agent:
        failed = await play_all(
            missing,
            lambda sample: agent.converse(sample.messages, sample.seed),
            lambda sample, conversation: journal.append(sample_record(sample, conversation)),
            services,
            concurrency=config.solver.concurrency,
            description="synthesize",
        )
    check_failed_share(failed, len(journal.records) + len(failed), config.run.max_failed_share)
    return failed


def _select(
    config: DictConfig,
    rows: Sequence[Row],
    records: Sequence[Row],
    generator: str,
    benchmark_questions: Sequence[str],
) -> None:
    """Judge the samples and write all that follows from them; raises DataError when no prompt gave a pair."""
    folder = Path(config.run.dir)
    # Nothing of another selection may stand beside this one.
    for name in (RESULT, REPORT, TRAIN, VAL, REJECTS):
        (folder / name).unlink(missing_ok=True)
    samples = [record for record in records if record["sample"] < config.samples]
    gates = _gates(config, benchmark_questions)
    selection = select(_by_prompt(samples), rows, gates)
    write_rejects(selection.rejected, folder)
    split = write_solver_split(
        selection.accepted,
        rows,
        folder,
        prompt_form=config.prompts.form,
        max_turns=config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns,
        generator_checkpoint=generator,
        seed=config.data.seed,
        val_share=config.val_share,
        max_val_rows=config.max_val_rows,
        pairing=config.gates.pairing,
    )
    check_partition(folder, rows)
    report = synthesis_report(rows, samples, selection, config.samples)
    report |= {"generator": generator, "near_duplicate_cosine": gates.near_duplicate_cosine}
    report |= {"train_rows": split.train_rows, "val_rows": split.val_rows}
    atomic_write(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    print_report(report, config.run.name)
    outputs = {"train": split.train_path, "val": split.val_path, "rejects": folder / REJECTS}
    written = {name: path for name, path in outputs.items() if path is not None}
    for path in (*written.values(), folder / REPORT):
        announce(path)
    write_result(config, written, report["tokens_in"] + report["tokens_out"], figures(report))


def _gates(config: DictConfig, benchmark_questions: Sequence[str]) -> Gates:
    settings = gate_settings(config)
    embedder = Embedder(EmbedderSpec(config.retrieval.embedder, config.retrieval.device))
    return Gates(settings, embed=embedder.encode_queries, benchmark_questions=benchmark_questions)


def _by_prompt(records: Sequence[Row]) -> dict[int, list[Row]]:
    grouped: dict[int, list[Row]] = defaultdict(list)
    for record in records:
        grouped[record["prompt_index"]].append(record)
    return grouped
