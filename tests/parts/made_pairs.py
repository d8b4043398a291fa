"""Challenger prompts, sample records and pairs, written by hand for tests."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.pairs import Pair, pair_of
from data.parquet_io import training_row, write_training_rows
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import challenger_messages
from verl_ext.method.search_calls import render_tool_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

DOCUMENT = "Drosken\nDrosken is a town in the region of Kelm and lies on the river Galmir."
PASSAGE = {"title": "Galmir", "text": "Galmir is a river that rises in the region of Tesk."}


def prompt(
    index: int = 0, hop: int = 1, document: str = DOCUMENT, doc_id: str | None = None
) -> dict[str, Any]:
    """The fields of a challenger prompt row that a pair needs."""
    return {
        "prompt": challenger_messages(document, hop, "short"),
        "extra_info": {"index": index, "hop": hop, "doc_id": doc_id or f"doc{index}", "document": document},
        "metadata": {"corpus_id": "tests", "document_sha256": sha256(document.encode()).hexdigest()},
    }


def write_prompts(path: Path, prompts: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of such prompts, as prepare-data does."""
    about = {"corpus_id": "tests", "generator_checkpoint": None, "seed": None, "trajectory": None}
    rows = []
    for row in prompts:
        info = {**row["extra_info"], "split": "train", "question": None}
        rows.append(training_row(f"search_zero_{info['hop']}", row["prompt"], None, info, about))
    write_training_rows(path, rows)


def last_turn(question: str = "On which river does Drosken lie?", answer: str = "Galmir") -> str:
    return f"<think>I can ask for that.</think>\n<question>{question}</question>\n<answer>{answer}</answer>"


def search(query: str = "Galmir", **changes: Any) -> Turn:
    """A turn with a search, answered unless `changes` say otherwise."""
    text = f"<think>I will search {query}.</think>\n{render_tool_call([query])}"
    fields: dict[str, Any] = {
        "raw": text,
        "queries": (query,),
        "response": format_passages([query], [[PASSAGE]]),
    }
    return Turn(text, (SearchCall(**(fields | changes)),))


def record(
    *turns: Turn | str, prompt_index: int = 0, sample: int = 0, seed: int | None = None
) -> dict[str, Any]:
    """A sample record of these turns; a plain string is a turn without calls."""
    whole = tuple(Turn(turn) if isinstance(turn, str) else turn for turn in turns)
    return {
        "prompt_index": prompt_index,
        "sample": sample,
        "seed": 100 * prompt_index + sample if seed is None else seed,
        "trajectory": Trajectory(whole).to_dict(),
        "tokens_in": 10,
        "tokens_out": 5,
        "latency_s": 0.1,
    }


def pair(
    question: str = "On which river does Drosken lie?",
    answer: str = "Galmir",
    *searches: Turn,
    index: int = 0,
    sample: int = 0,
    hop: int = 1,
    document: str = DOCUMENT,
) -> Pair:
    """The pair of a conversation that searches and then writes question and answer."""
    whole = record(*searches, last_turn(question, answer), prompt_index=index, sample=sample)
    made = pair_of(whole, prompt(index, hop, document))
    assert isinstance(made, Pair), made
    return made
