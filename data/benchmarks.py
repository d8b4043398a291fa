"""Benchmark questions with their accepted answers, read from benchmark files.

    questions = load_benchmark("outputs/corpus/chains.jsonl")
    questions = load_benchmark("hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet")

Two layouts are read. The demo world's `chains.jsonl` becomes one benchmark per hop count (`demo_1hop`, …). A
parquet file in the layout of the published `nq_hotpotqa_train` holds several benchmarks, one per value of
`data_source`; veRL's preprocessed copy of it (`searchR1_nq`, …) and this project's own rows with targets are
read the same way.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import DataError
from data.parquet_io import arrow_faults
from ops.hub import hub_fault

HUB_PREFIX = "hf://"
_HUB_URL = re.compile(
    r"hf://datasets/(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?/(?P<file>.+\.(parquet|jsonl))"
)
_CHAIN_FIELDS = {"id": str, "hop": int, "question": str, "answer": str}
_TARGETS = "reward_model.ground_truth.target"
# The published file has the question in a column, veRL's copy in extra_info.
_QUESTION_COLUMNS = ("question", "extra_info.question")
_ADVICE = (
    "take the demo's chains.jsonl, test.parquet of the published nq_hotpotqa_train, or veRL's preprocessed "
    "copy of it"
)


@dataclass(frozen=True)
class BenchmarkQuestion:
    """One question of a benchmark."""

    benchmark: str
    id: str
    """Unique within the benchmark."""
    question: str
    targets: tuple[str, ...]
    """The accepted answers, at least one."""
    hop: int | None
    """Number of facts that the answer takes; None if unknown."""
    doc_ids: tuple[str, ...] = ()
    """The documents that hold these facts; empty if unknown."""

    @property
    def key(self) -> str:
        """Unique among the questions of all benchmarks."""
        return f"{self.benchmark}/{self.id}"


def load_benchmark(source: str | Path) -> list[BenchmarkQuestion]:
    """Read the questions of one file, in its order; `source` is as for `benchmark_file`.

    Raises:
        DataError: the file is missing or cannot be downloaded, is in neither layout, holds no question, or
            one without answers; the message names the file and the line or row.
    """
    path = benchmark_file(source)
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path} is no benchmark file, neither .jsonl nor .parquet: {_ADVICE}")
    questions = list(_read_chains(path) if path.suffix == ".jsonl" else _read_parquet(path))
    if not questions:
        raise DataError(f"{path} holds no question: {_ADVICE}")
    return questions


def benchmark_file(source: str | Path) -> Path:
    """Return the local file of a source: a path, or `hf://datasets/OWNER/NAME[@REVISION]/FILE` on the hub.

    A hub file is downloaded once, into the hub's own cache. Raises DataError if the file does not exist.
    """
    if not str(source).startswith(HUB_PREFIX):
        path = Path(source)
        if not path.is_file():
            raise DataError(f"there is no benchmark file at {path}: correct the path, or {_ADVICE}")
        return path
    match = _HUB_URL.fullmatch(str(source))
    if match is None:
        raise DataError(
            f"{source} names no file on the hub: write hf://datasets/OWNER/NAME/FILE, for example "
            "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet"
        )
    # Imported here because most uses need no hub.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    fault = hub_fault()
    try:
        return Path(
            hf_hub_download(
                match["repo"],
                match["file"],
                repo_type="dataset",
                revision=match["revision"] or None,
                local_files_only=fault is not None,
            )
        )
    except (OSError, ValueError, EntryNotFoundError) as error:
        raise DataError(
            f"{source} cannot be fetched, and the hub's cache does not hold it ({fault or error}). Check the "
            "name, your connection and HF_HUB_OFFLINE, or download the file and give its path"
        ) from error


def choose_questions(
    questions: Iterable[BenchmarkQuestion], per_benchmark: int | None, seed: int
) -> list[BenchmarkQuestion]:
    """Draw at most `per_benchmark` questions of each benchmark, kept in their order; None takes all.

    A smaller draw is a subset of a larger one with the same seed, so answers stay valid when more questions
    are wanted later.
    """
    questions = list(questions)
    if per_benchmark is None:
        return questions

    def place_in_draw(question: BenchmarkQuestion) -> bytes:
        return hashlib.sha256(f"{seed}/{question.key}".encode()).digest()

    by_benchmark: dict[str, list[str]] = {}
    for question in sorted(questions, key=place_in_draw):
        by_benchmark.setdefault(question.benchmark, []).append(question.key)
    chosen = {key for keys in by_benchmark.values() for key in keys[:per_benchmark]}
    return [question for question in questions if question.key in chosen]


def _read_chains(path: Path) -> Iterator[BenchmarkQuestion]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                chain = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not JSON in UTF-8 ({error}): {_ADVICE}") from error
            fields = chain if isinstance(chain, dict) else {}
            wrong = [name for name, kind in _CHAIN_FIELDS.items() if not isinstance(fields.get(name), kind)]
            if wrong:
                raise DataError(
                    f"{path}, line {number} is no question chain: expected the fields "
                    f"{', '.join(_CHAIN_FIELDS)}, found {', '.join(fields) or 'none'} ({', '.join(wrong)} "
                    f"missing or of another type): {_ADVICE}"
                )
            yield BenchmarkQuestion(
                benchmark=f"demo_{fields['hop']}hop",
                id=fields["id"],
                question=fields["question"],
                targets=(fields["answer"],),
                hop=fields["hop"],
                doc_ids=tuple(fields["doc_ids"]) if _are_texts(fields.get("doc_ids")) else (),
            )


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    batch.validate(full=True)  # texts must be UTF-8
    return _flat(pa.Table.from_batches([batch])).to_pylist()


def _read_parquet(path: Path) -> Iterator[BenchmarkQuestion]:
    with arrow_faults(path, _ADVICE), pq.ParquetFile(path) as file:
        names = _flat(file.schema_arrow.empty_table()).column_names
        question = next((name for name in _QUESTION_COLUMNS if name in names), None)
        if question is None or not {"data_source", _TARGETS} <= set(names):
            raise DataError(
                f"{path} is not in the layout of nq_hotpotqa_train: expected data_source, {_TARGETS} and "
                f"{' or '.join(_QUESTION_COLUMNS)}, found {', '.join(sorted(names))}: {_ADVICE}"
            )
        columns = {"source": "data_source", "targets": _TARGETS, "question": question}
        optional = {
            "id": "id",
            "hop": "extra_info.hop",
            "doc_ids": "doc_ids",
            "doc_id": "extra_info.doc_id",
        }
        columns |= {field: name for field, name in optional.items() if name in names}
        rows = (row for batch in file.iter_batches(columns=[*columns.values()]) for row in _rows(batch))
        for number, row in enumerate(rows):
            yield _question_of(path, number, {field: row[name] for field, name in columns.items()})


def _flat(table: pa.Table) -> pa.Table:
    """The table with a column `a.b` for each field b of a struct a, at any depth."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def _question_of(path: Path, number: int, fields: Mapping[str, Any]) -> BenchmarkQuestion:
    targets = [fields["targets"]] if isinstance(fields["targets"], str) else fields["targets"]
    checks = (
        ("data_source", _is_text(fields["source"])),
        ("question", _is_text(fields["question"])),
        (f"answers in {_TARGETS} (prompts of a challenger have none)", _are_texts(targets)),
    )
    if lacks := [what for what, is_there in checks if not is_there]:
        raise DataError(f"{path}, row {number} has no {lacks[0]}: {_ADVICE}")
    own_id = fields.get("id")
    return BenchmarkQuestion(
        benchmark=fields["source"].removeprefix("searchR1_"),
        id=str(number if own_id is None else own_id),
        question=fields["question"],
        targets=tuple(targets),
        hop=fields.get("hop"),
        doc_ids=_documents(fields),
    )


def _documents(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The documents that a row names, in its list or, as this project's own rows, as the one."""
    if _are_texts(fields.get("doc_ids")):
        return tuple(fields["doc_ids"])
    return (fields["doc_id"],) if _is_text(fields.get("doc_id")) else ()


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)
