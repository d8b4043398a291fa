"""Checks of the inputs of synthesize and evaluate: prompts, challenger, gates, benchmark questions."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig

from data.benchmarks import BenchmarkQuestion, choose_questions, load_benchmark
from data.errors import DataError
from data.gates import GateSettings
from data.parquet_io import read_parquet
from data.question_rows import FieldNames
from drzero.ops.bearer import MODEL_KEY, bearer_of
from drzero.ops.text import is_loopback
from drzero.preflight.context import CheckContext
from drzero.preflight.environment import writable_place
from drzero.preflight.finding import Finding, error, note, refusal, warning
from drzero.recipe.indices import index_of
from search.sources.corpus import is_there
from search.sources.files import KINDS
from verl_ext.checkpoints import saved_step
from verl_ext.method.passages import defuse

_SAMPLED = 50
_NOTES_SHOWN = 3
_NAME_OTHERS = (
    "Name the files to ask with benchmarks=[…] (in a loop: stages.evaluate.benchmarks=[…], or "
    "evaluations=false for none)"
)


def partition_rows(config: DictConfig) -> list[dict[str, Any]]:
    """The prompts of the configured partition, in file order."""
    path, partition, partitions = Path(config.data.train_files), config.partition, config.partitions
    if not 1 <= partition <= partitions:
        raise refusal(
            "partition",
            f"there is no partition {partition} of {partitions}: the prompts are used up after {partitions} "
            "iterations",
            "set partition= to reuse one, or set a larger partitions= from the first iteration on",
        )
    if not path.exists():
        why = f"no prompts at {path} (data.train_files)"
        raise refusal("data.train_files", why, "make them with `drzero prepare-data`")
    table = read_parquet(path)
    rows: list[dict[str, Any]] = table.to_pylist()[partition - 1 :: partitions]
    if not rows:
        why = f"{path} has {len(table)} rows, so partition {partition} of {partitions} is empty"
        fix = "set fewer partitions, or make more with `drzero prepare-data rows=…`"
        raise refusal("partitions", why, fix)
    repeated = [i for i, n in Counter(row["extra_info"]["index"] for row in rows).items() if n > 1]
    if repeated:
        why = f"{path} has several rows with extra_info.index {repeated[0]}, which must identify a sample"
        raise refusal("data.train_files", why, "remake the prompts with `drzero prepare-data`")
    return rows


def check_prompts(ctx: CheckContext) -> None:
    """Prompts must be about the collection's documents, by a sample, unless a running service has them."""
    config = ctx.config
    if not Path(config.data.train_files).exists():
        return  # check_challenger_data reports it
    rows = partition_rows(config)
    if config.retrieval.url is not None:
        return
    shown = [row["extra_info"] for row in rows[:: max(1, len(rows) // _SAMPLED)]]
    texts = {info["doc_id"]: info["document"] for info in shown}
    if foreign := _foreign(config, texts):
        raise refusal(
            index_of(config).setting,
            f"the prompts in {config.data.train_files} are about other documents than {index_of(config)} has "
            f"({len(foreign)} of {len(texts)} sampled, e.g. {foreign[0]!r})",
            f"set {index_of(config).setting} to the index of their corpus, or remake them with "
            "`drzero prepare-data`",
        )


def _foreign(config: DictConfig, texts: Mapping[str, str]) -> list[str]:
    with closing(index_of(config).open()) as store:
        found = store.passages_of(list(texts))
    stored = {doc_id: defuse(passage.strip()) for doc_id, passage in found.items()}
    return [
        doc_id
        for doc_id, text in texts.items()
        if doc_id not in stored or not stored[doc_id].startswith(text)
    ]


def _missing(config: DictConfig, named: Sequence[str]) -> list[str]:
    with closing(index_of(config).open()) as store:
        there = store.documents_among(named)
    return [doc_id for doc_id in named if doc_id not in there]


def check_challenger(ctx: CheckContext) -> Iterator[Finding]:
    """The challenger must be a model or a run with a checkpoint, unless the loop will make it."""
    folder = Path(ctx.config.challenger)
    if ctx.is_to_come(folder) or ctx.config.get("endpoint"):  # an endpoint replaces it
        return
    if folder.is_dir() and not (folder / "config.json").is_file() and not saved_step(folder):
        why = f"{folder} is neither a model folder nor a run with a checkpoint"
        yield error("challenger", why, "name the export or the run folder of a trained challenger")
    if folder.is_absolute() and not folder.is_dir():
        fix = "set challenger= to the export or the run folder of a trained one"
        why = f"there is nothing at {folder}"
        yield error("challenger", why, f"train one with `drzero challenger`, or {fix}")


def check_gates(ctx: CheckContext) -> Iterator[Finding]:
    """The gates' benchmarks must be readable."""
    gates = ctx.config.gates
    for source in gates.benchmarks:
        load_benchmark(source, question_fields(ctx.config))
    if gates.contamination and not gates.benchmarks:
        why = "no benchmark is named, so generated questions are compared with none"
        yield warning("gates.benchmarks", why, "name the files that the solver will be evaluated on")


def check_hold_out(ctx: CheckContext) -> None:
    """The questions must be readable, and name their documents. Raises DataError."""
    held_out_documents(ctx.config.hold_out, question_fields(ctx.config))


def held_out_documents(benchmarks: Iterable[str], names: FieldNames | None = None) -> set[str]:
    """The documents these benchmark files are about. Raises DataError for a question without any."""
    documents: set[str] = set()
    for source in benchmarks:
        for question in load_benchmark(source, names):
            if not question.doc_ids:
                raise DataError(
                    f"hold_out: question {question.id!r} of {source} names no document (doc_ids, or the "
                    "field in question_fields.documents), so nothing can be held out for it. Name its "
                    "documents, or use the file only for gates.benchmarks"
                )
            documents.update(question.doc_ids)
    return documents


def check_corpus_source(ctx: CheckContext) -> Iterator[Finding]:
    """The corpus must exist, and the prompts' folder be writable."""
    config = ctx.config
    if not (ctx.machine.is_local or ctx.starting):  # files of another machine
        return
    if config.source is not None and not is_there(config.source):
        yield error("source", f"no corpus at {config.source}", KINDS)
    try:
        writable_place(Path(config.out_dir).absolute())
    except OSError as reason:
        why = f"{config.out_dir} cannot be written ({reason.strerror} at {reason.filename})"
        yield error("out_dir", why, "choose another place, or make this one writable")


def check_hops(ctx: CheckContext) -> Iterator[Finding]:
    """Some hop count must have a weight, and a question of h hops needs h turns."""
    ratio, turns = ctx.config.hop_ratio, ctx.config.rollout.max_turns
    if not any(ratio):
        yield error("hop_ratio", "has no weight above 0", "leave it at [4,3,2,1]")
    elif len(ratio) > turns:
        why = (
            f"a question of {len(ratio)} hops takes {len(ratio) - 1} searches and an answer, in {turns} turns"
        )
        yield error("hop_ratio", why, f"give {turns} weights at most, or raise rollout.max_turns")


def check_merge_source(ctx: CheckContext) -> Iterator[Finding]:
    """The run to merge must have a checkpoint, unless the loop will make it."""
    folder = Path(ctx.config.source)
    if not ctx.is_of_the_loop(folder) and not saved_step(folder):
        why = f"there is no checkpoint in {folder}"
        yield error("source", why, "name the folder of a trained run (run.dir)")


def question_fields(config: DictConfig) -> FieldNames:
    """Field names in question files."""
    names = config.question_fields
    return FieldNames(names.question, names.answers, names.documents)


def gate_settings(config: DictConfig) -> GateSettings:
    """The gates' settings."""
    names = {field.name for field in fields(GateSettings)}
    return GateSettings(**{str(name): value for name, value in config.gates.items() if name in names})


def gate_questions(config: DictConfig) -> list[BenchmarkQuestion]:
    """The benchmark questions that pairs must not repeat. Raises DataError."""
    names = question_fields(config)
    return [question for file in config.gates.benchmarks for question in load_benchmark(file, names)]


def check_endpoint(ctx: CheckContext) -> Iterator[Finding]:
    """An endpoint needs an address without secrets, a key that is set, and no plain HTTP.

    Messages need prompts that explain the task, token ids the tokenizer. Raises TokenUnusable.
    """
    config, api = ctx.config, ctx.config.get("api")
    if config.endpoint is None:
        if api == "chat":
            yield error("api", "no endpoint is named to chat with", "set endpoint= to its address")
        return
    has_key, variable = bearer_of(config.endpoint_key) is not None, config.endpoint_key
    yield from _address(config.endpoint, variable if has_key else None)
    if not has_key and variable != MODEL_KEY:
        why = f"the environment variable {variable} should hold the endpoint's key, and is not set"
        yield error("endpoint_key", why, "set it, or leave endpoint_key out")
    if api == "completions":
        if config.tokenizer is None:
            why = "an endpoint takes token ids, so its model's tokenizer is needed here too"
            fix = "set tokenizer= to the folder or hub id of the model that it serves, or set api=chat"
            yield error("tokenizer", why, fix)
    elif ctx.plays:
        yield error("api", "an environment is played by token ids", "set tokenizer=, and leave api= out")
    elif config.prompts.form == "short" and ctx.stage != "warm_start":  # its preview asks in full
        why = "short prompts only name the task, for a model trained on that wording"
        yield warning("prompts.form", why, "choose the prompts of a capable model, such as model=qwen2.5-3b")


def _address(endpoint: str, key: str | None) -> Iterator[Finding]:
    shown = "not shown" if {"@", "?"} & set(endpoint) else endpoint
    try:
        address = urlsplit(endpoint)
        is_address = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # a port that is no number, or an open bracket
        is_address = False
    if not is_address:
        yield error("endpoint", "is no address", "write one such as https://api.example.com/v1", value=shown)
        return
    if address.username or address.password or address.query:
        why = "the address holds a user, a password or a query, and addresses are written into reports"
        fix = "leave them out: endpoint_key names the environment variable for the key"
        yield error("endpoint", why, fix, value="not shown")
    if address.scheme == "http" and not is_loopback(endpoint) and key:
        yield warning(
            "endpoint", f"the key in {key} would be sent in the clear", "use https, or unset the key"
        )


def check_questions(ctx: CheckContext) -> Iterator[Finding]:
    """There must be questions, and they must be about this corpus. Notes what becomes of odd answers."""
    questions = load_questions(ctx.config)
    if notes := list(dict.fromkeys(question.note for question in questions if question.note)):
        more = f", and {len(notes) - _NOTES_SHOWN:,} more" if len(notes) > _NOTES_SHOWN else ""
        why = f"answers lose signs by SQuAD's rules, or are no texts: {'; '.join(notes[:_NOTES_SHOWN])}{more}"
        yield note("benchmarks", why)


def load_questions(config: DictConfig) -> list[BenchmarkQuestion]:
    """The questions of `benchmarks` in order. Published ones name no documents, so any corpus fits them.

    Raises PreflightFailed for an unreadable file or one about another corpus, DataError for no question.
    """
    if not config.benchmarks:
        raise DataError(f"benchmarks is empty, so there is nothing to ask. {_NAME_OTHERS}")
    questions: list[BenchmarkQuestion] = []
    for source in config.benchmarks:
        try:
            found = load_benchmark(source, question_fields(config))
        except DataError as reason:
            raise refusal("benchmarks", str(reason), _NAME_OTHERS) from reason
        questions += found
        sample = found[:: max(1, len(found) // _SAMPLED)]
        named = sorted({doc_id for question in sample for doc_id in question.doc_ids})
        if named and config.retrieval.url is None and (foreign := _missing(config, named)):
            raise refusal(
                "benchmarks",
                f"the questions in {source} are about other documents than {index_of(config)} has "
                f"({len(foreign)} of {len(named)} sampled are missing, e.g. {foreign[0]!r}), so they cannot "
                "be answered",
                _NAME_OTHERS,
            )
    repeated = [key for key, times in Counter(question.key for question in questions).items() if times > 1]
    if repeated:
        raise DataError(
            f"{len(repeated)} questions are duplicated, e.g. {repeated[0]}: in benchmarks name each file "
            "once, with different names (NAME=PATH sets one), and give each question its own id"
        )
    wanted = [q for q in questions if config.hops is None or q.hop is None or q.hop in config.hops]
    if not wanted:
        there = ", ".join(map(str, sorted({q.hop for q in questions if q.hop is not None})))
        raise DataError(f"hops={list(config.hops)} leaves no question to ask: benchmarks has hops {there}")
    return choose_questions(wanted, config.questions_per_benchmark, config.data.seed)
