"""The synthesize stage: gates select from the trained challenger's questions the solver's training data.

    drzero synthesize iteration=1                                        # partition 1 of 5 of the prompts
    drzero synthesize iteration=1 gates.evidence=false                   # the same samples, other gates
    drzero synthesize endpoint=https://api.example.com/v1 endpoint_model=a-model    # another model asks

*Sampling* runs `samples` conversations a prompt and appends each to `samples.jsonl`, so a rerun after a kill
runs the missing ones. *Selection* depends only on the journal and `gates:`; every run repeats it, with the
same bytes. A conversation that services failed twice is counted and left to the next run. With
`gates.open_book=true` the solver is asked in between (`drzero.stages.open_book`).
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.benchmarks import BenchmarkQuestion
from data.examples import Examples, of_selection
from data.gates import Gates
from data.journal import SAMPLES, Journal
from data.pairs import Pair, pair_of
from data.selection import Selection, prompts_by_index, select
from data.solver_rows import REJECTS, TRAIN, VAL, check_partition, write_rejects, write_solver_split
from drzero.checkpoints.export import export_policy
from drzero.ops.artefacts import announce
from drzero.ops.files import remove_temporaries
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.preflight.inputs import gate_questions, gate_settings, partition_rows
from drzero.preflight.tokenizers import load_chat_tokenizer
from drzero.recipe.fingerprint import fingerprint
from drzero.recipe.tables import console, new_table
from drzero.stages.conversations import Failed, journal_conditions, play_all, served_agent, with_services
from drzero.stages.examples import gates_table, per_hop, print_examples
from drzero.stages.models import (
    StageModel,
    chat_model,
    cost_line,
    costs,
    greet,
    own_model,
    request_lines,
    requests_report,
    spent,
    usd,
)
from drzero.stages.open_book import check_open_book, verdicts
from drzero.stages.result import REPORT, RESULT, write_report, write_result
from drzero.stages.services import check_and_resolve, search_spec, solver_spec
from search.embedders import Embedder, EmbedderSpec
from verl_ext.clients.chat_endpoint import ChatEndpoint
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.method.prompts import Message

SERVICE = "challenger"  # the challenger's name as a service, and its model's name in requests

PromptRow = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One conversation to run."""

    prompt_index: int
    number: int
    seed: int
    messages: list[Message]


def run_synthesize(config: DictConfig) -> None:
    """Draw the missing samples, select pairs, and write the solver's split, rejects, report and result.

    Raises PreflightFailed, OutOfTime, ServiceDied, ConversationsFailed, or DataError without any pair.
    """
    config = check_and_resolve(config, "synthesize")
    rows = partition_rows(config)
    folder = Path(config.run.dir)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        model, generator = _challenger(config)
        greet(config, model)
        if config.gates.open_book:  # find a mistake in it before sampling
            load_chat_tokenizer(config.gates.open_book_model, "gates.open_book_model")
        benchmark_questions = gate_questions(config)
        # Without the number of samples a prompt, so that more can be drawn later.
        prompts = fingerprint(Path(config.data.train_files))
        conditions = journal_conditions(config, "synthesize", model, prompts=prompts)
        with Journal(folder / SAMPLES, conditions) as journal:
            _sample_missing(config, model, rows, journal)
            samples = [record for record in journal.records if record["sample"] < config.samples]
        gates = gates_of(config, benchmark_questions)
        answers = None
        if config.gates.open_book:
            pairs = passing_pairs(samples, rows, gates)
            answers = check_open_book(config, pairs, conditions)
            gates.verdicts.update(verdicts(pairs, answers))
        report, outputs = _select(config, rows, samples, generator, gates)
        _finish(config, report, outputs, answers, model.endpoint)


def _challenger(config: DictConfig) -> tuple[StageModel, str]:
    """The model that asks, and its name in the pairs' metadata. Merges a run's last checkpoint."""
    if config.endpoint:
        model = chat_model(config)
        return model, model.identity
    config.solver.model_path = merge_if_needed(config)
    model = replace(own_model(config, SERVICE, "challenger"), shown=str(config.challenger))
    return model, generator_name(config, model.identity)


def _sample_missing(
    config: DictConfig, model: StageModel, rows: Sequence[PromptRow], journal: Journal
) -> None:
    missing, total = missing_samples(config, rows, journal.records), len(rows) * config.samples
    console().print(
        f"{len(rows)} prompts, {total} samples, {len(missing)} of them still to draw, {model.shown}",
        soft_wrap=True,
    )
    if not missing:
        return
    specs = [search_spec(config), *([] if model.endpoint else [solver_spec(config, SERVICE)])]
    failed = with_services(
        config, specs, journal.path, partial(play_samples, config, model, missing, journal)
    )
    for reason, times in Counter(failure.reason for failure in failed).most_common(3):
        console().print(f"failed {times} times, to be retried by the next run: {reason}", soft_wrap=True)


def merge_if_needed(config: DictConfig) -> str:
    """The challenger's model folder or hub id. For a run, the export of its last checkpoint."""
    folder = Path(config.challenger)
    is_run = folder.is_dir() and not (folder / "config.json").is_file()
    return str(export_policy(config, folder.absolute())) if is_run else str(config.challenger)


def sample_seed(run_seed: int, prompt_index: int, number: int) -> int:
    """A sample's seed: 63 bits, to fit a signed column and every server."""
    digest = hashlib.sha256(f"{run_seed}/{prompt_index}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def missing_samples(
    config: DictConfig, rows: Sequence[PromptRow], records: Sequence[PromptRow]
) -> list[Sample]:
    """The conversations the journal lacks, prompt by prompt."""
    done = {(record["prompt_index"], record["sample"]) for record in records}
    wanted = ((row, row["extra_info"]["index"], number) for row in rows for number in range(config.samples))
    return [
        Sample(index, number, sample_seed(config.data.seed, index, number), row["prompt"])
        for row, index, number in wanted
        if (index, number) not in done
    ]


def sample_record(sample: Sample, conversation: Conversation) -> dict[str, Any]:
    """The journal's record of a finished conversation."""
    asked = {"prompt_index": sample.prompt_index, "sample": sample.number, "seed": sample.seed}
    return asked | {"trajectory": conversation.trajectory.to_dict()} | spent(conversation)


def generator_name(config: DictConfig, identity: str) -> str:
    """The challenger's name in the pairs' metadata: its path below the checkpoints, and a fingerprint."""
    path = Path(config.challenger)
    if not path.is_dir():  # a hub id; the identity contains it
        return identity
    root = Path(config.paths.checkpoints)
    shown = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return f"{shown}@{identity[:12]}"  # enough for a reader to compare


async def play_samples(
    config: DictConfig, model: StageModel, missing: Sequence[Sample], journal: Journal, services: ServiceGroup
) -> list[Failed[Sample]]:
    """Returns the samples that failed twice. Raises ConversationsFailed if too many of all did."""
    async with served_agent(SearchAgent, config, model) as agent:
        return await play_all(
            config,
            missing,
            lambda sample: agent.converse(sample.messages, sample.seed),
            lambda sample, conversation: journal.append(sample_record(sample, conversation)),
            services,
            total=len(journal.records) + len(missing),
            description="synthesize",
        )


def gates_of(config: DictConfig, benchmark_questions: Sequence[BenchmarkQuestion]) -> Gates:
    """The configured gates, with an embedder to find near duplicates."""
    embedder = Embedder(EmbedderSpec(config.retrieval.embedder, config.retrieval.device))
    return Gates(
        gate_settings(config), embed=embedder.encode_queries, benchmark_questions=benchmark_questions
    )


def passing_pairs(samples: Sequence[PromptRow], rows: Sequence[PromptRow], gates: Gates) -> list[Pair]:
    """The pairs of these samples that pass every per-pair gate."""
    by_index = prompts_by_index(rows)
    pairs = (pair_of(sample, by_index[sample["prompt_index"]]) for sample in samples)
    return [pair for pair in pairs if isinstance(pair, Pair) and not gates.judge(pair)]


def _select(
    config: DictConfig, rows: Sequence[PromptRow], samples: Sequence[PromptRow], generator: str, gates: Gates
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Returns the report and the split's and rejects' files. Raises DataError if no prompt gave a pair."""
    folder = Path(config.run.dir)
    # Files of an earlier selection must not stay next to the new ones.
    for name in (RESULT, REPORT, TRAIN, VAL, REJECTS):
        (folder / name).unlink(missing_ok=True)
    by_prompt: dict[int, list[PromptRow]] = defaultdict(list)
    for sample in samples:
        by_prompt[sample["prompt_index"]].append(sample)
    selection = select(by_prompt, rows, gates)
    write_rejects(selection.rejected, folder)
    examples = of_selection(selection, prompts_by_index(rows), samples)
    if not selection.accepted:
        # They show why, before the split refuses to be empty.
        print_examples(examples, config.run.name)
    split = write_solver_split(
        selection.accepted,
        rows,
        folder,
        prompt_form=config.prompts.form,
        max_turns=config.rollout.max_turns,
        generator_checkpoint=generator,
        seed=config.data.seed,
        val_share=config.val_share,
        max_val_rows=config.max_val_rows,
        pairing=config.gates.pairing,
    )
    check_partition(folder, rows)
    report = synthesis_report(rows, samples, selection, config.samples)
    report |= {"generator": generator, "near_duplicate_cosine": gates.near_duplicate_cosine}
    report |= {"train_rows": split.train_rows, "val_rows": split.val_rows, "examples": examples.to_dict()}
    outputs = {"train": split.train_path, "val": split.val_path, "rejects": folder / REJECTS}
    return report, {name: path for name, path in outputs.items() if path is not None}


def _finish(
    config: DictConfig,
    report: dict[str, Any],
    outputs: Mapping[str, Path],
    answers: Sequence[PromptRow] | None,
    endpoint: ChatEndpoint | None,
) -> None:
    folder, tokens = Path(config.run.dir), report["tokens_in"] + report["tokens_out"]
    if answers is not None:
        cost = costs(answers)
        report["open_book"] = {"answers": len(answers), **cost}
        tokens += cost["tokens_in"] + cost["tokens_out"]
    if endpoint:
        report["endpoint"] = requests_report(endpoint)
        report["endpoint"]["usd"] = usd(config, report)
    for path in outputs.values():
        announce(path)
    write_report(folder, report)
    print_report(report, config.run.name)
    print_examples(Examples.from_dict(report["examples"]), config.run.name)
    shown = ("prompts", "accepted", "rejected", "samples", "missing_samples", "train_rows", "val_rows")
    write_result(config, outputs, tokens, {name: report[name] for name in shown})


def synthesis_report(
    rows: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    selection: Selection,
    samples_per_prompt: int,
) -> dict[str, Any]:
    """Counts per hop and per gate. `conversation_s` sums the seconds of concurrent conversations."""
    sampled = Counter(record["prompt_index"] for record in records)
    indices = [row["extra_info"]["index"] for row in rows]
    return {
        **selection.counts,
        "per_hop": per_hop(rows, selection),
        "missing_samples": len(rows) * samples_per_prompt - len(records),
        "prompts_without_sample": sum(sampled[index] == 0 for index in indices),
        **costs(records),
    }


def print_report(report: Mapping[str, Any], name: str) -> None:
    """Print accepted and rejected prompts per hop, and how many pairs each gate refused."""
    hops = new_table(f"{name}: prompts", "hops", ">prompts", ">accepted", ">rejected")
    for hop, counts in report["per_hop"].items():
        hops.add_row(hop, *map(str, counts.values()))
    console().print(hops, gates_table(report["gates"]))
    print(f"{report['samples']} samples, {report['pairs']} of them pairs of a question and an answer")
    if report["missing_samples"]:
        print(
            f"{report['missing_samples']} samples are missing because services failed "
            f"({report['prompts_without_sample']} prompts have none): rerun to draw them"
        )
    if asked := report.get("endpoint"):
        print(cost_line(report, asked["usd"]))
        for line in request_lines(asked):
            console().print(line, soft_wrap=True)
    print(f"{report['accepted']} of {report['prompts']} prompts gave a pair")
