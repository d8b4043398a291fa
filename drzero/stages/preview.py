"""The preview: is this corpus worth a run? Ten minutes without training, and questions you can read.

    drzero preview source=papers.jsonl endpoint=https://api.example.com/v1 model=a-model    # a capable model
    drzero preview source=notes/ model=qwen2.5-3b                  # a local one, served here
    drzero preview                                                 # the index of prepare-data, no sample

One model plays both roles through the real loop, on a sample of the corpus. As challenger it asks, as solver
it tries each question `solver.attempts` times. Reward and gates judge. OPENAI_API_KEY, or the variable
`endpoint_key` names, holds an endpoint's key. A rerun after a kill asks only the missing questions.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from data.errors import DataError
from data.journal import SAMPLES, Journal
from data.parquet_io import read_parquet
from data.quality import FILE
from data.selection import prompts_by_index, select
from data.solver_rows import write_rejects
from drzero.ops.artefacts import announce
from drzero.ops.console import say
from drzero.ops.files import remove_temporaries, write_jsonl
from drzero.ops.process.lock import HeldLock
from drzero.ops.services.services import ServiceGroup
from drzero.ops.text import counted
from drzero.preflight.inputs import gate_questions
from drzero.recipe.fingerprint import fingerprint
from drzero.recipe.indices import corpus_of
from drzero.stages.conversations import Failed, journal_conditions, play_all, served_agent, with_services
from drzero.stages.models import StageModel, greet, requests_report, stage_model
from drzero.stages.prepare_data import prepare_data
from drzero.stages.preview_report import preview_report, print_preview, question_rows
from drzero.stages.preview_sample import sample_corpus
from drzero.stages.result import FOUND, REPORT, RESULT, write_report, write_result
from drzero.stages.services import check_and_resolve, search_spec, solver_spec
from drzero.stages.synthesize import PromptRow, Sample, gates_of, sample_record, sample_seed
from verl_ext.clients.question_score import score_question
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.clients.solver_agent import SolverAgent

FAILURES = "failures.jsonl"  # the journal of failed questions, which cost tokens too
_SERVICE = "model"


@dataclass(frozen=True)
class _Judged(Conversation):
    reward: dict[str, Any]


def run_preview(config: DictConfig) -> None:
    """Index a sample, play the missing questions, judge all, then write and print the report.

    Raises PreflightFailed, CorpusError, DataError, OutOfTime, ServiceDied or ConversationsFailed.
    """
    config = check_and_resolve(config, "preview")
    folder = Path(config.run.dir)
    benchmark_questions = gate_questions(config)
    with HeldLock(folder / "lock"):
        remove_temporaries(folder)
        model = stage_model(config, _SERVICE)
        greet(config, model)
        prompts, corpus = _prepare(config)
        rows: list[PromptRow] = read_parquet(prompts).to_pylist()
        conditions = journal_conditions(config, "preview", model, prompts=fingerprint(prompts))
        with Journal(folder / SAMPLES, conditions) as journal, Journal(folder / FAILURES, conditions) as lost:
            _play_missing(config, model, rows, journal, lost)
            records, failures = journal.records, lost.records
        by_prompt = {record["prompt_index"]: [record] for record in records}
        selection = select(by_prompt, rows, gates_of(config, benchmark_questions))
        report = preview_report(config, rows, records, failures, selection, corpus)
        report["model"] = model.shown
        if model.endpoint:
            report["endpoint"] = requests_report(model.endpoint)
        write_rejects(selection.rejected, folder)
        _write(config, report, question_rows(records, selection))


def _prepare(config: DictConfig) -> tuple[Path, dict[str, Any]]:
    """Index the sample and write the prompts. Returns their file, and facts about the corpus."""
    sample, known, lines = None, dict[str, Any](), list[str]()
    with open_dict(config):
        # Rates by hop count need some prompts of each.
        config.hop_ratio = [int(weight > 0) for weight in config.hop_ratio]
        if config.source is not None:
            sample = sample_corpus(corpus_of(config), config.documents, config.rows, config.data.seed)
            indexed = len(sample.corpus.ids)
            say("sample", f"{indexed} of {sample.total:,} documents of {config.source}")
            known = {"documents": sample.total, "indexed": indexed, "named": sample.named}
            if indexed < sample.total:
                lines.append(
                    f"{indexed} of {sample.total:,} documents are indexed, {sample.named} of them because "
                    "others name them. Questions of several hops may lack what the whole corpus has "
                    "(documents= takes more)"
                )
            # The index belongs to this preview.
            config.chroma.path, config.chroma.collection = f"{config.run.dir}/chromadb", "preview"
            config.chroma.shards = 1
            config.faiss.path, config.faiss.corpus = f"{config.run.dir}/faiss", None
            config.replace = True
    prompts = prepare_data(config, sample.corpus, sample.about) if sample else prepare_data(config)
    lines += json.loads((Path(config.out_dir) / FILE).read_text(encoding="utf-8"))["lines"]
    if prompts.cycles > 1:
        asked = sum(prompts.hop_counts.values())
        shown = counted(prompts.train_documents, "document")
        lines.append(f"{shown} for {counted(asked, 'prompt')}: some come twice")
    return prompts.train_path, known | {"lines": lines}


def _play_missing(
    config: DictConfig, model: StageModel, rows: Sequence[PromptRow], journal: Journal, lost: Journal
) -> None:
    done = {record["prompt_index"] for record in journal.records}
    missing = [sample for sample in questions(config, rows) if sample.prompt_index not in done]
    tries = f"each tried {config.solver.attempts} times"
    say("preview", f"{len(rows)} questions, {len(missing)} of them still to ask, {tries}, {model.shown}")
    if not missing:
        return
    specs = [search_spec(config), *([] if model.endpoint else [solver_spec(config, _SERVICE)])]
    play = partial(play_questions, config, model, prompts_by_index(rows), missing, journal, lost)
    failed = with_services(config, specs, journal.path, play)
    for reason, times in Counter(failure.reason for failure in failed).most_common(3):
        say("preview", f"failed {times} times, to be retried by the next run: {reason}")


def questions(config: DictConfig, rows: Sequence[PromptRow]) -> list[Sample]:
    """One conversation of the challenger for each prompt."""
    found = ((row["extra_info"]["index"], row["prompt"]) for row in rows)
    return [Sample(index, 0, sample_seed(config.data.seed, index, 0), prompt) for index, prompt in found]


async def play_questions(
    config: DictConfig,
    model: StageModel,
    rows: Mapping[int, Mapping[str, Any]],
    missing: Sequence[Sample],
    journal: Journal,
    lost: Journal,
    services: ServiceGroup,
) -> list[Failed[Sample]]:
    """Returns the ones that failed twice. `lost` has their cost. Raises ConversationsFailed if too many."""
    async with (
        served_agent(SearchAgent, config, model) as challenger,
        served_agent(SolverAgent, config, model) as solver,
    ):

        async def play(sample: Sample) -> _Judged:
            about = rows[sample.prompt_index]["extra_info"]
            judged = await _judge(config, challenger, solver, sample, about)
            if not judged.finished:
                spent = {"tokens_in": judged.tokens_in, "tokens_out": judged.tokens_out}
                lost.append({"prompt_index": sample.prompt_index, "reason": judged.failure} | spent)
            return judged

        def keep(sample: Sample, judged: _Judged) -> None:
            about = rows[sample.prompt_index]["extra_info"]
            journal.append(sample_record(sample, judged) | _dumped(about, judged.reward))

        total = len(journal.records) + len(missing)
        return await play_all(config, missing, play, keep, services, total=total, description="preview")


async def _judge(
    config: DictConfig, challenger: SearchAgent, solver: SolverAgent, sample: Sample, about: Mapping[str, Any]
) -> _Judged:
    asked = await challenger.converse(sample.messages, sample.seed)
    if not asked.finished:
        return _Judged(**vars(asked), reward={})
    reward = await score_question(
        asked.trajectory,
        about["document"],
        int(about["hop"]),
        solver,
        attempts=config.solver.attempts,
        hop_check=False,  # the gate `hops` checks it, and attempts still show the difficulty
        seed=sample_seed(config.data.seed, sample.prompt_index, 1),
    )
    return _Judged(
        trajectory=asked.trajectory,
        finished=reward["valid"],
        failure=reward["reason_invalid"],
        tokens_in=asked.tokens_in + reward["attempt_tokens_in"],
        tokens_out=asked.tokens_out + reward["attempt_tokens"],
        searches=asked.searches + reward["attempt_searches"],
        latency_s=asked.latency_s + reward["attempts_s"],
        reward=reward,
    )


def _dumped(about: Mapping[str, Any], reward: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a training run's dump (docs/dumps.md), so the page shows both alike."""
    return {
        "key": f"{about['index']}/0",
        "step": about["index"],
        **{name: about[name] for name in ("hop", "doc_id", "document")},
        "question": reward["question"],
        "reward": {name: value for name, value in reward.items() if name != "attempts"},
        "attempts": json.loads(reward["attempts"]),
    }


def _write(config: DictConfig, report: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
    folder = Path(config.run.dir)
    if not lines:
        raise DataError(f"no question was finished: see {folder / FAILURES}, then rerun to ask again")
    (folder / RESULT).unlink(missing_ok=True)
    write_jsonl(folder / FOUND, lines)
    announce(folder / FOUND)
    write_report(folder, report)
    print_preview(report, config.run.name)
    cost = report["cost"]
    figures = {name: report[name] for name in ("prompts", "accepted", "failed")}
    outputs = {"questions": folder / FOUND, "report": folder / REPORT}
    write_result(config, outputs, cost["tokens_in"] + cost["tokens_out"], figures)
