"""The question of one record of a file, whatever its fields are called.

    row = read_row({"Question": "Who founded Orrin?", "Answer": "Vell"}, FieldNames())
    row.question, row.answers                             # "Who founded Orrin?", ("Vell",)

The names known here are those of the seven benchmarks as they were published, of their copies in the layouts
of Search-R1 and FlashRAG, and of this project's own files; case, spaces and hyphens in names do not count.
Others are given by `FieldNames`.
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

QUESTION = ("question", "extra_info.question", "query", "problem")
ANSWERS = (
    *("reward_model.ground_truth.target", "golden_answers", "possible_answers", "answers", "answer"),
    *("targets", "target", "gold_answers", "gold_answer", "ground_truth"),
)
ALIASES = ("answer_aliases",)
"""Accepted besides the answer (MuSiQue)."""
IDS = ("id", "_id", "qid", "question_id", "questionid")
HOP = ("hop", "extra_info.hop")
DOCUMENTS = ("doc_ids", "extra_info.doc_id")
SOURCE = "data_source"
"""Names the benchmark of a row where a file holds several."""
KNOWN = (*QUESTION, *ANSWERS, *ALIASES, *IDS, *HOP, *DOCUMENTS, SOURCE)

# Where an answer is an object: TriviaQA's, and SQuAD's.
_PARTS = ("value", "aliases", "normalized_aliases", "normalizedaliases", "text")
_QUOTED = r"'[^']*'|\"[^\"]*\""
# As numpy prints an array of texts, which is what pandas writes into a csv: no commas.
_PRINTED_ARRAY = re.compile(rf"\[\s*(?:{_QUOTED})(?:\s+(?:{_QUOTED}))+\s*\]")
# MuSiQue has the number of hops in its ids alone: 2hop__…, 3hop1__….
_HOPS_IN_ID = re.compile(r"([1-9])hop\d?__.+")


@dataclass(frozen=True)
class FieldNames:
    """The fields of question, answers and documents, where they are not among the known ones."""

    question: str | None = None
    answers: str | None = None
    documents: str | None = None


@dataclass(frozen=True)
class Row:
    """What a record says; empty where it says nothing."""

    question: str
    answers: tuple[str, ...]
    id: str
    hop: int | None
    documents: tuple[str, ...]
    source: str | None
    """None without the field; empty where it is there and has no text."""


def read_row(record: Mapping[str, Any], names: FieldNames) -> Row:
    """Read one record; what is missing in it is for the caller to judge."""
    question = _first(record, (names.question,) if names.question else QUESTION)
    answers = texts(_first(record, (names.answers,) if names.answers else ANSWERS))
    documents = texts(_first(record, (names.documents,) if names.documents else DOCUMENTS))
    own_id = " ".join(texts(_first(record, IDS))[:1])
    return Row(
        question=question.strip() if isinstance(question, str) else "",
        answers=tuple(dict.fromkeys((*answers, *texts(_first(record, ALIASES))))) if answers else (),
        id=own_id,
        hop=_hop(_first(record, HOP), own_id),
        documents=documents,
        source="".join(texts(find(record, SOURCE))[:1]) if has(record, SOURCE) else None,
    )


def find(record: Any, name: str) -> Any:
    """The value of a field, `a.b` within an object; None without it."""
    found = list(_found(record, name))
    return found[0] if found else None


def has(record: Any, name: str) -> bool:
    """Whether a record has a field, with whatever value."""
    return any(True for _ in _found(record, name))


def texts(value: Any) -> tuple[str, ...]:
    """The texts that a field gives: one, a list, such a list written as text, or an object with them."""
    if isinstance(value, str):
        if (listed := _listed(value)) is not None:
            return texts(listed)
        return (value.strip(),) if value.strip() else ()
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int | float):
        # A column of whole numbers with a gap in it comes as 1914.0.
        whole = isinstance(value, float) and value.is_integer()
        return (
            () if isinstance(value, float) and math.isnan(value) else (str(int(value) if whole else value),)
        )
    if isinstance(value, Mapping):
        value = [find(value, part) for part in _PARTS]
    if isinstance(value, Sequence):
        return tuple(dict.fromkeys(text for one in value for text in texts(one)))
    return ()


def plain(name: str) -> str:
    """A field's name without what people write differently."""
    return re.sub(r"[\s-]+", "_", name.strip()).lower()


def _first(record: Any, names: Sequence[str]) -> Any:
    """The first of these fields that has something in it."""
    return next((value for name in names if (value := find(record, name)) not in (None, "", [])), None)


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
    """A list that was written as text, as JSON or as Python or numpy print it; None for other text."""
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
