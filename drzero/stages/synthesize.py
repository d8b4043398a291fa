"""The synthesize stage: the trained challenger's questions, judged by the gates, become the solver's data.

    drzero synthesize iteration=1                                        # partition 1 of 5 of the prompts
    drzero synthesize iteration=1 gates.evidence=false                   # the same samples, other gates
    drzero synthesize endpoint=https://api.example.com/v1 endpoint_model=a-model    # another model asks

It has two halves. *Sampling* runs `samples` conversations per prompt and appends each to `samples.jsonl` at
its end: a kill loses those in flight, and a rerun runs the missing ones. *Selection* is a pure function of
the journal and of `gates:`, so every run repeats it and gets the same bytes. A conversation that failed twice
because of a service is not a sample: it is counted, and left to the next run. A prompt is judged on the
samples it has. With `gates.open_book=true` the solver is asked in between (drzero/stages/open_book.py).
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.benchmarks import BenchmarkQuestion
from data.examples import of_selection
from data.gates import Gates
from data.journal import Journal
from data.pairs import Pair, pair_of
from data.selection import Selection, prompts_by_index, select
from data.solver_rows import REJECTS, TRAIN, VAL, check_partition, write_rejects, write_solver_split
from drzero.checkpoints.export import export_policy
from drzero.ops.files import atomic_write, remove_temporaries
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.preflight.inputs import gate_questions, gate_settings, partition_rows
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.fingerprint import fingerprint, fingerprint_index, fingerprint_model
from drzero.recipe.tables import console, new_table
from drzero.stages.conversations import (
    Failed,
    check_failed_share,
    completions_url,
    journal_settings,
    play_all,
    served_agent,
    with_services,
)
from drzero.stages.endpoint import chat_endpoint, identity_of, request_lines, requests_report, usd
from drzero.stages.examples import print_examples
from drzero.stages.open_book import OpenBook, check_open_book
from drzero.stages.result import RESULT, SAMPLES, write_result
from drzero.stages.services import check_and_resolve, search_spec, solver_spec
from search.embedders import Embedder, EmbedderSpec
from verl_ext.artefacts import announce
from verl_ext.clients.chat_endpoint import ChatEndpoint
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.method.prompts import Message

REPORT = "report.json"
SERVICE = "challenger"
"""The challenger's name as a service, and its model's name in requests."""

Row = dict[str, Any]
"""A challenger prompt: a row of the prompts file."""


@dataclass(frozen=True)
class Sample:
    """One conversation to run."""

    prompt_index: int
    number: int
    """Its index among the conversations of its prompt."""
    seed: int
    messages: list[Message]


def run_synthesize(config: DictConfig) -> None:
    """Draw the missing samples, select pairs, and write the solver's split, rejects, report and result.

    Raises PreflightFailed before anything starts, OutOfTime if the stop time comes before all is sampled,
    ServiceDied or ConversationsFailed if sampling cannot continue, DataError if no prompt gave a pair.
    """
    config = check_and_resolve(config, "synthesize")
    rows = partition_rows(config)
    folder = Path(config.run.dir)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        challenger = _challenger(config)
        if config.gates.open_book:  # a mistake in it must not wait until all is sampled
            load_chat_tokenizer(config.gates.open_book_model, "gates.open_book_model")
        benchmark_questions = gate_questions(config)
        conditions = journal_identity(config, challenger.identity)
        with Journal(folder / SAMPLES, conditions) as journal:
            missing, total = missing_samples(config, rows, journal.records), len(rows) * config.samples
            drawn = f"{total} samples, {len(missing)} of them still to draw"
            print(f"{len(rows)} prompts, {drawn}, {challenger.shown}")
            specs = [search_spec(config), *([] if challenger.endpoint else [solver_spec(config, SERVICE)])]
            play = partial(
                play_samples,
                config,
                challenger.tokenizer,
                missing,
                journal,
                endpoint=challenger.endpoint,
            )
            failed = with_services(config, specs, journal.path, play) if missing else []
            for reason, times in Counter(failure.reason for failure in failed).most_common(3):
                print(f"failed {times} times, to be retried by the next run: {reason}")
            samples = [record for record in journal.records if record["sample"] < config.samples]
        gates = gates_of(config, benchmark_questions)
        answers = None
        if config.gates.open_book:
            pairs = passing_pairs(samples, rows, gates)
            answers = check_open_book(config, pairs, conditions)
            gates.verdicts.update(answers.verdicts)
        _select(config, rows, samples, challenger, gates, answers)


@dataclass(frozen=True)
class _Challenger:
    """The model that asks: a folder that is served here, or an endpoint."""

    tokenizer: Any
    identity: str
    """Distinguishes it from any other model."""
    name: str
    """As the pairs' metadata have it."""
    shown: str
    endpoint: ChatEndpoint | None = None


def _challenger(config: DictConfig) -> _Challenger:
    """The challenger, merged if it is a run's last checkpoint; raises PreflightFailed."""
    if config.endpoint:
        endpoint = chat_endpoint(config)
        identity = identity_of(endpoint)
        return _Challenger(None, identity, identity, f"{endpoint.model} at {endpoint.base_url}", endpoint)
    config.solver.model_path = model = merge_if_needed(config)
    identity = fingerprint_model(model)
    tokenizer = load_chat_tokenizer(model, "challenger")
    return _Challenger(tokenizer, identity, generator_name(config, identity), str(config.challenger))


def merge_if_needed(config: DictConfig) -> str:
    """The challenger's model folder or hub id; of a run, the export of its last checkpoint."""
    folder = Path(config.challenger)
    is_run = folder.is_dir() and not (folder / "config.json").is_file()
    return str(export_policy(config, folder.absolute())) if is_run else str(config.challenger)


def journal_identity(config: DictConfig, model: str) -> dict[str, Any]:
    """All settings and inputs that a sample depends on; the number of samples per prompt is not one."""
    settings = journal_settings(config, "synthesize")
    return {
        "model": model,
        "prompts": fingerprint(Path(config.data.train_files)),
        "collection": fingerprint_index(config),
    } | settings


def sample_seed(run_seed: int, prompt_index: int, number: int) -> int:
    """The seed of a sample: 63 bits, so that it fits a signed column and every server's seed."""
    digest = hashlib.sha256(f"{run_seed}/{prompt_index}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def missing_samples(config: DictConfig, rows: Sequence[Row], records: Sequence[Row]) -> list[Sample]:
    """The conversations that the journal lacks, prompt by prompt."""
    done = {(record["prompt_index"], record["sample"]) for record in records}
    wanted = ((row, row["extra_info"]["index"], number) for row in rows for number in range(config.samples))
    return [
        Sample(index, number, sample_seed(config.data.seed, index, number), row["prompt"])
        for row, index, number in wanted
        if (index, number) not in done
    ]


def sample_record(sample: Sample, conversation: Conversation) -> dict[str, Any]:
    """The journal's record of a finished conversation."""
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
    """The challenger as the pairs' metadata name it: its path below the checkpoints, and a fingerprint."""
    path = Path(config.challenger)
    if not path.is_dir():  # a hub id, which its identity contains
        return identity
    root = Path(config.paths.checkpoints)
    shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{shown}@{identity[:12]}"  # enough for a reader to compare


async def play_samples(
    config: DictConfig,
    tokenizer: Any,
    missing: Sequence[Sample],
    journal: Journal,
    services: ServiceGroup,
    endpoint: ChatEndpoint | None = None,
) -> list[Failed[Sample]]:
    """Run conversations; each finished one goes to the journal. Returns those that failed twice.

    Raises ConversationsFailed if they are too large a share of all samples.
    """
    url = completions_url(config)
    async with served_agent(SearchAgent, config, url, SERVICE, tokenizer, endpoint) as agent:
        failed = await play_all(
            missing,
            lambda sample: agent.converse(sample.messages, sample.seed),
            lambda sample, conversation: journal.append(sample_record(sample, conversation)),
            services,
            concurrency=config.solver.concurrency,
            description="synthesize",
        )
        if endpoint:
            await endpoint.aclose()
    check_failed_share(failed, len(journal.records) + len(failed), config.run.max_failed_share)
    return failed


def gates_of(config: DictConfig, benchmark_questions: Sequence[BenchmarkQuestion]) -> Gates:
    """The gates of a config, with the embedder that near duplicates are found with."""
    embedder = Embedder(EmbedderSpec(config.retrieval.embedder, config.retrieval.device))
    return Gates(
        gate_settings(config), embed=embedder.encode_queries, benchmark_questions=benchmark_questions
    )


def passing_pairs(samples: Sequence[Row], rows: Sequence[Row], gates: Gates) -> list[Pair]:
    """The pairs of these samples that no gate refuses that judges a pair alone."""
    by_index = prompts_by_index(rows)
    pairs = (pair_of(sample, by_index[sample["prompt_index"]]) for sample in samples)
    return [pair for pair in pairs if isinstance(pair, Pair) and not gates.judge(pair)]


def _select(
    config: DictConfig,
    rows: Sequence[Row],
    samples: Sequence[Row],
    challenger: _Challenger,
    gates: Gates,
    answers: OpenBook | None,
) -> None:
    """Select pairs and write split, rejects, report and result; raises DataError if no prompt gave a pair."""
    folder = Path(config.run.dir)
    # No file of an earlier selection may stay next to this one's.
    for name in (RESULT, REPORT, TRAIN, VAL, REJECTS):
        (folder / name).unlink(missing_ok=True)
    by_prompt: dict[int, list[Row]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample["prompt_index"]].append(sample)
    selection = select(by_prompt, rows, gates)
    write_rejects(selection.rejected, folder)
    # Before the split, which is refused when there is no pair: then they say why.
    examples = of_selection(selection, prompts_by_index(rows), samples)
    if not selection.accepted:
        print_examples(examples, config.run.name)
    split = write_solver_split(
        selection.accepted,
        rows,
        folder,
        prompt_form=config.prompts.form,
        max_turns=config.rollout.max_turns,
        generator_checkpoint=challenger.name,
        seed=config.data.seed,
        val_share=config.val_share,
        max_val_rows=config.max_val_rows,
        pairing=config.gates.pairing,
    )
    check_partition(folder, rows)
    report = synthesis_report(rows, samples, selection, config.samples)
    report |= {"generator": challenger.name, "near_duplicate_cosine": gates.near_duplicate_cosine}
    report |= {"train_rows": split.train_rows, "val_rows": split.val_rows, "examples": examples.to_dict()}
    if answers:
        report["open_book"] = {"answers": len(answers.records), **costs(answers.records)}
    if challenger.endpoint:
        report["endpoint"] = requests_report(challenger.endpoint)
        report["endpoint"]["usd"] = usd(config, report["tokens_in"], report["tokens_out"])
    atomic_write(folder / REPORT, json.dumps(report, indent=1, ensure_ascii=False))
    print_report(report, config.run.name)
    print_examples(examples, config.run.name)
    outputs = {"train": split.train_path, "val": split.val_path, "rejects": folder / REJECTS}
    written = {name: path for name, path in outputs.items() if path is not None}
    for path in (*written.values(), folder / REPORT):
        announce(path)
    shown = ("prompts", "accepted", "rejected", "samples", "missing_samples", "train_rows", "val_rows")
    costly = [report, *filter(None, [report.get("open_book")])]
    tokens = sum(part["tokens_in"] + part["tokens_out"] for part in costly)
    write_result(config, written, tokens, {name: report[name] for name in shown})


def synthesis_report(
    rows: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    selection: Selection,
    samples_per_prompt: int,
) -> dict[str, Any]:
    """Counts over all prompts, per hop and per gate, and the tokens and seconds of the samples.

    `conversation_s` sums the seconds of concurrent conversations; a rerun draws the `missing_samples`.
    """
    sampled = Counter(record["prompt_index"] for record in records)
    indices = [row["extra_info"]["index"] for row in rows]
    prompts = Counter(row["extra_info"]["hop"] for row in rows)
    accepted = Counter(pair.hop for pair in selection.accepted)
    rejected = Counter(rejection.hop for rejection in selection.rejected)
    return {
        **selection.counts,
        "per_hop": {
            str(hop): {"prompts": prompts[hop], "accepted": accepted[hop], "rejected": rejected[hop]}
            for hop in sorted(prompts)
        },
        "missing_samples": len(rows) * samples_per_prompt - len(records),
        "prompts_without_sample": sum(sampled[index] == 0 for index in indices),
        **costs(records),
    }


def costs(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens and seconds of these conversations, summed."""
    return {
        "tokens_in": sum(record["tokens_in"] for record in records),
        "tokens_out": sum(record["tokens_out"] for record in records),
        # fsum: the same in any order in which they were finished.
        "conversation_s": round(math.fsum(record["latency_s"] for record in records), 1),
    }


def print_report(report: Mapping[str, Any], name: str) -> None:
    """Print accepted and rejected prompts per hop, and how many pairs each gate refused."""
    hops = new_table(f"{name}: prompts", "hops", ">prompts", ">accepted", ">rejected")
    for hop, counts in report["per_hop"].items():
        hops.add_row(hop, *(str(counts[key]) for key in ("prompts", "accepted", "rejected")))
    gates = new_table("gates, over the samples that are pairs", "gate", ">judged", ">refused", ">share")
    for gate, counts in report["gates"].items():
        share = f"{counts['refused'] / counts['judged']:.1%}" if counts["judged"] else "–"
        gates.add_row(gate, str(counts["judged"]), str(counts["refused"]), counts.get("note", share))
    console().print(hops, gates)
    print(f"{report['samples']} samples, {report['pairs']} of them pairs of a question and an answer")
    if report["missing_samples"]:
        print(
            f"{report['missing_samples']} samples are missing because services failed "
            f"({report['prompts_without_sample']} prompts have none): rerun to draw them"
        )
    if asked := report.get("endpoint"):
        print_cost(report, asked)
    print(f"{report['accepted']} of {report['prompts']} prompts gave a pair")


def print_cost(counted: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Print what an endpoint has read and written in all starts, the price, and how its requests went."""
    price = "" if asked["usd"] is None else f", ${asked['usd']:.2f}"
    print(
        f"the endpoint has read {counted['tokens_in']:,} tokens and written {counted['tokens_out']:,}{price}"
    )
    for line in request_lines(asked):
        print(line)
