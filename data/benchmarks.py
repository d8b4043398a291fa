"""Reads benchmark questions: one benchmark per file, `data_source`, or hop count of a demo world."""

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from data.errors import DataError
from data.question_rows import ANSWERS, QUESTION, FieldNames, QuestionRow, has, read_row
from drzero.ops.text import is_encodable
from search.sources.document import CorpusError
from search.sources.files import Hints, SourceFile
from search.sources.hub import HUB_URL, fetch_data_set
from search.sources.records import READERS, Bad
from verl_ext.method.answers import lost_in_comparison

HUB_PREFIX = "hf://"
CHAINS = "chains.jsonl"  # the demo world's questions
_NAMED = re.compile(r"(?P<name>[^=/:~]+)=(?P<place>.+)", re.DOTALL)
_SUFFIX = re.compile(r"(\.[a-z]+)(\.(gz|zst|bz2))?$")
# The name of a split says less than its folder.
_SPLIT = re.compile(r"(train|test|dev|val|valid|validation)(-\d+-of-\d+)?")
_ADVICE = (
    "a benchmark is a csv, tsv, jsonl, json or parquet file with a question and its answer, or a list of "
    "accepted answers, in each record"
)
_FAULTS_SHOWN = 10


@dataclass(frozen=True)
class BenchmarkQuestion:
    """One question of a benchmark."""

    benchmark: str
    id: str  # unique within the benchmark
    question: str
    targets: tuple[str, ...]  # the accepted answers, at least one
    hop: int | None  # number of facts that the answer needs, if known
    doc_ids: tuple[str, ...] = ()  # the documents with these facts, if known
    note: str | None = None  # what became of an answer that is no text, or that loses signs in the comparison

    @property
    def key(self) -> str:
        """Unique among the questions of all benchmarks."""
        return f"{self.benchmark}/{self.id}"


def load_benchmark(source: str | Path, names: FieldNames | None = None) -> list[BenchmarkQuestion]:
    """Read a file's questions. Raises DataError that lists every record that cannot be asked or scored."""
    path = benchmark_file(source)
    stat = path.stat()
    # Preflight, the estimate and the stage read the same file.
    questions = list(_read(path, _title(source), names or FieldNames(), (stat.st_size, stat.st_mtime_ns)))
    name, found = split_name(source)[0], {question.benchmark for question in questions}
    if name is None:
        return questions
    several = len(found) > 1
    return [replace(q, benchmark=f"{name}_{q.benchmark}" if several else name) for q in questions]


def split_name(source: str | Path) -> tuple[str | None, str]:
    """Split `NAME=PATH` into name (or None) and path."""
    match = _NAMED.fullmatch(str(source))
    if match is None or Path(source).is_file():  # a path may have = in it
        return None, str(source)
    return match["name"].strip(), match["place"].strip()


def benchmark_file(source: str | Path) -> Path:
    """Return the local file of a path or `hf://datasets/OWNER/NAME[@REVISION]/FILE`, or raise DataError."""
    source = split_name(source)[1]
    path = Path(source).expanduser()
    if source.startswith(HUB_PREFIX):
        match = HUB_URL.fullmatch(source)
        if match is None or SourceFile(Path(match["path"] or ""), "").kind not in READERS:
            raise DataError(
                f"{source} names no file on the hub: write hf://datasets/OWNER/NAME/FILE, for example "
                "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet"
            )
        try:
            path = fetch_data_set(source)
        except CorpusError as error:
            raise DataError(str(error)) from error
    if not path.is_file():
        raise DataError(f"there is no benchmark file at {path}: correct the path")
    return path


def choose_questions(
    questions: Iterable[BenchmarkQuestion], per_benchmark: int | None, seed: int
) -> list[BenchmarkQuestion]:
    """Draw at most `per_benchmark` questions of each benchmark. Smaller draws are subsets of larger ones."""
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


def _title(source: str | Path) -> str:
    place = split_name(source)[1]
    hub = HUB_URL.fullmatch(place)
    path = PurePosixPath(f"{hub['repo']}/{hub['path']}" if hub else Path(place).expanduser().absolute())
    for part in (_SUFFIX.sub("", path.name), *(parent.name for parent in path.parents)):
        if part and part != "data" and not _SPLIT.fullmatch(part):
            return part
    return path.name


@functools.lru_cache(maxsize=8)
def _read(
    path: Path, title: str, names: FieldNames, signature: tuple[int, int]
) -> tuple[BenchmarkQuestion, ...]:
    kind = SourceFile(path, path.name).kind
    if kind not in READERS:
        raise DataError(f"{path} is no benchmark file: {_ADVICE}")
    unit = READERS[kind][0]
    questions: list[BenchmarkQuestion] = []
    faults: list[str] = []
    first: dict[str, Any] | None = None
    for number, record in _records(path, kind):
        if isinstance(record, dict) and not isinstance(record, Bad):
            first = first or record
            row = read_row(record, names, typed=kind not in (".csv", ".tsv"))
            fault = _fault(row)
        else:
            row, fault = None, record.why if isinstance(record, Bad) else "no object"
        if fault is None and row is not None:
            questions.append(_question(row, path.name, title, number))
        else:
            faults.append(f"{unit} {number}: {fault}")
    if faults:
        raise DataError(_refusal(path, faults, first, len(questions), names))
    if not questions:
        raise DataError(f"{path} holds no question: {_ADVICE}")
    return tuple(questions)


def _fault(row: QuestionRow) -> str | None:
    lacks = [what for what, is_there in (("question", row.question), ("answer", row.answers)) if not is_there]
    if lacks:
        return f"no {' and no '.join(lacks)}"
    if not is_encodable([row.question, row.answers, row.id, row.documents, row.source]):
        return "half of a surrogate pair, such as \\ud83d, which is no character"
    return "no data_source, which other rows have" if row.source == "" else None


def _question(row: QuestionRow, file: str, title: str, number: int) -> BenchmarkQuestion:
    benchmark = title if row.source is None else row.source.removeprefix("searchR1_")
    if file == CHAINS and row.source is None:
        benchmark = f"demo_{row.hop}hop"
    compared = ((answer, lost_in_comparison(answer)) for answer in row.answers)
    lost = (f"{answer!r} is compared as {form!r}" for answer, form in compared if form is not None)
    return BenchmarkQuestion(
        benchmark=benchmark,
        # As before this read other files than parquet: from 0.
        id=row.id or str(number - 1),
        question=row.question,
        targets=row.answers,
        hop=row.hop,
        doc_ids=row.documents,
        note=row.read_as or next(lost, None),
    )


def _refusal(
    path: Path, faults: list[str], first: dict[str, Any] | None, good: int, names: FieldNames
) -> str:
    if first is not None and good == 0:
        wanted = {
            "question": (names.question,) if names.question else QUESTION,
            "answers": (names.answers,) if names.answers else ANSWERS,
        }
        for role, known in wanted.items():
            if not any(has(first, name) for name in known):
                fields = ", ".join(map(str, list(first)[:20]))
                return (
                    f"{path} has no field {' or '.join(known)}, but {fields}: name the field with the {role} "
                    f"by question_fields.{role}=FIELD"
                )
    listed = "; ".join(faults[:_FAULTS_SHOWN])
    more = f"; and {len(faults) - _FAULTS_SHOWN:,} more" if len(faults) > _FAULTS_SHOWN else ""
    only = (
        ""
        if good
        else ". A test split is often published without answers, and a challenger's prompts have none"
    )
    return (
        f"{path}: {len(faults):,} of {len(faults) + good:,} records cannot be asked and scored: {listed}"
        f"{more}{only}. Correct them, or leave them out of the file"
    )


def _records(path: Path, kind: str) -> Iterator[tuple[int, Any]]:
    try:
        yield from READERS[kind][1](path, Hints())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}. Correct it; {_ADVICE}") from error
