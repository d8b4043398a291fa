"""A solver's training rows as synthesize writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.parquet_io import training_row, write_training_rows
from verl_ext.method.prompts import solver_messages


def solver_row(index: int, split: str, answer: str, question: str = "Who came?") -> dict[str, Any]:
    """One question with its answer, of one to three hops, with a separate document."""
    extra = {"index": index, "split": split, "hop": index % 3 + 1, "doc_id": f"{split}-{index}"}
    extra |= {"document": "", "question": question}
    nothing = dict.fromkeys(("corpus_id", "generator_checkpoint", "seed", "trajectory"))
    return training_row("search_zero", solver_messages(question, "short"), [answer], extra, nothing)


def write_questions(checkpoints: Path, train: int, val: int, answers: Sequence[str] = ("Vell",)) -> None:
    """Write rows of both splits, with the answers in turn, as the first iteration's synthesize does."""
    for split, count in (("train", train), ("val", val)):
        rows = [solver_row(index, split, answers[index % len(answers)]) for index in range(count)]
        write_training_rows(checkpoints / "synthesize_iter1" / f"{split}.parquet", rows)
