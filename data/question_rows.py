"""Finds a record's question by the field names of published benchmarks, FlashRAG and this project."""

import ast
import calendar
import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from search.sources.document import is_missing

QUESTION = ("question", "extra_info.question", "query", "problem")
ANSWERS = (
    "reward_model.ground_truth.target",
    "golden_answers",
    "possible_answers",
    "answers",
    "answer",
    "targets",
    "target",
    "gold_answers",
    "gold_answer",
    "ground_truth",
)
ALIASES = ("answer_aliases",)  # accepted besides the answer (MuSiQue)
IDS = ("id", "_id", "qid", "question_id", "questionid")
HOP = ("hop", "extra_info.hop")
DOCUMENTS = ("doc_ids", "extra_info.doc_id")
SOURCE = "data_source"  # names the benchmark of a row in a file with several

# Answers are objects in TriviaQA and SQuAD.
_PARTS = ("value", "aliases", "normalized_aliases", "normalizedaliases", "text")
_QUOTED = r"'[^']*'|\"[^\"]*\""
# pandas writes an array of texts into a csv as numpy prints it, without commas.
_PRINTED_ARRAY = re.compile(rf"\[\s*(?:{_QUOTED})(?:\s+(?:{_QUOTED}))+\s*\]")
# MuSiQue has the number of hops only in its ids: 2hop__…, 3hop1__….
_HOPS_IN_ID = re.compile(r"([1-9])hop\d?__.+")


@dataclass(frozen=True)
class FieldNames:
    """The fields of question, answers and documents, if they have unknown names."""

    question: str | None = None
    answers: str | None = None
    documents: str | None = None


@dataclass(frozen=True)
class QuestionRow:
    """The contents of a record, empty where it has none."""

    question: str
    answers: tuple[str, ...]
    id: str
    hop: int | None
    documents: tuple[str, ...]
    source: str | None  # None without the field, empty if it has no text
    read_as: str | None  # how the answer was read, if it is no text


def read_row(record: Mapping[str, Any], names: FieldNames, typed: bool = True) -> QuestionRow:
    """Read one record, where `typed` is False for a csv. The caller judges missing parts."""
    question = _first(record, (names.question,) if names.question else QUESTION)
    found = _first(record, (names.answers,) if names.answers else ANSWERS)
    value = found if typed else _of_text(found)
    answers = texts(value)
    is_same = answers in ((), (str(found),)) or isinstance(value, str | Sequence | Mapping)
    documents = texts(_first(record, (names.documents,) if names.documents else DOCUMENTS))
    own_id = " ".join(texts(_first(record, IDS))[:1])
    return QuestionRow(
        question=question.strip() if isinstance(question, str) else "",
        answers=tuple(dict.fromkeys((*answers, *texts(_first(record, ALIASES))))) if answers else (),
        id=own_id,
        hop=_hop(_first(record, HOP), own_id),
        documents=documents,
        source="".join(texts(find(record, SOURCE))[:1]) if has(record, SOURCE) else None,
        read_as=None if is_same else f"{found} is read as {' or '.join(answers)}",
    )


def find(record: Any, name: str) -> Any:
    """Return the value of a field (`a.b` within an object), or None."""
    found = list(_found(record, name))
    return found[0] if found else None


def has(record: Any, name: str) -> bool:
    """Whether a record has a field, with whatever value."""
    return any(True for _ in _found(record, name))


def texts(value: Any) -> tuple[str, ...]:
    """The texts in a field: of a text, a list (maybe printed as text), an object, or another value."""
    if isinstance(value, str):
        if (listed := _listed(value)) is not None:
            return texts(listed)
        return (value.strip(),) if value.strip() else ()
    if isinstance(value, bytes):
        return texts(value.decode(errors="replace"))
    if isinstance(value, bool):
        return ("yes", "true") if value else ("no", "false")
    if isinstance(value, int | float | Decimal):
        if not isinstance(value, int) and not math.isfinite(value):
            return ()
        # A column of whole numbers with a gap arrives as 1914.0.
        whole, point, rest = f"{Decimal(str(value)):f}".partition(".")
        return (f"{whole}{point}{rest.rstrip('0')}".rstrip("."),)
    if isinstance(value, datetime.date | datetime.time):
        return _spelt(value)
    if isinstance(value, Mapping):
        value = [find(value, part) for part in _PARTS]
    if isinstance(value, Sequence):
        return tuple(dict.fromkeys(text for one in value for text in texts(one)))
    return ()


def plain(name: str) -> str:
    """Normalise a field name's case, spaces and hyphens."""
    return re.sub(r"[\s-]+", "_", name.strip()).lower()


def _spelt(value: datetime.date | datetime.time) -> tuple[str, ...]:
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        value = value.date()
    if isinstance(value, datetime.datetime | datetime.time):
        return (str(value).removesuffix(":00"),)
    month = calendar.month_name[value.month]
    return str(value), f"{value.day} {month} {value.year}", f"{month} {value.day}, {value.year}"


def _of_text(value: Any) -> Any:
    """What pandas wrote as True or 1914.0 into a csv."""
    text = value.strip() if isinstance(value, str) else ""
    if text in ("True", "False"):
        return text == "True"
    return int(text[:-2]) if re.fullmatch(r"-?\d+\.0", text) else value


def _first(record: Any, names: Sequence[str]) -> Any:
    found = (find(record, name) for name in names)
    return next((value for value in found if value != [] and not is_missing(value)), None)


def _found(record: Any, name: str) -> Iterator[Any]:
    if not isinstance(record, Mapping):
        return
    wanted = plain(name)
    for key, value in record.items():
        if plain(str(key)) == wanted:
            yield value
    head, dot, rest = name.partition(".")
    if dot:
        for outer in _found(record, head):
            yield from _found(outer, rest)


def _listed(text: str) -> list[Any] | None:
    """A list printed as text by JSON, Python or numpy. None for other text."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    if _PRINTED_ARRAY.fullmatch(text):
        return [quoted[1:-1] for quoted in re.findall(_QUOTED, text)]
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, list):
            return found
    return None


def _hop(value: Any, own_id: str) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    in_id = _HOPS_IN_ID.fullmatch(own_id)
    return int(in_id[1]) if in_id else None
