"""Reads each row of a written solver file back and checks that its fields belong together.

Published code for this step has written new answers next to old prompts, so a mismatch is an error.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.errors import DataError, PairingError
from data.pairs import Pair, question_and_answer
from data.parquet_io import check_training_rows, read_parquet
from verl_ext.method.prompts import Message
from verl_ext.method.trajectory import Trajectory

Ask = Callable[[str], list[Message]]
_NOT_KEPT = "The file is not kept; this is a bug or a damaged disk, so do not train on what was written"


def check_pairing(
    path: Path,
    pairs: Sequence[Pair],
    prompts: Mapping[int, Mapping[str, Any]],
    ask: Ask,
    *,
    source: str,
    split: str,
    generator_checkpoint: str,
    shown_as: Path | None = None,
) -> int:
    """Check every row of the file (`shown_as` in errors). Returns their number. Raises PairingError."""
    name = shown_as or path
    awaited = {pair.prompt_index: pair for pair in pairs}
    tools = {"search": {"create_kwargs": {"data_source": source}}}
    same = (source, split, tools, generator_checkpoint)
    rows = read_parquet(path).to_pylist()
    try:
        check_training_rows(rows)
    except DataError as error:
        raise PairingError(f"{name}: {error}. {_NOT_KEPT}") from error
    for number, row in enumerate(rows):
        index = row["extra_info"]["index"]
        pair = awaited.pop(index, None)
        if pair is None or index not in prompts:
            raise PairingError(f"{name}, row {number}: there is no (further) pair of prompt {index}")
        if fault := _fault(row, pair, prompts[index], ask, same):
            raise PairingError(f"{name}, row {number} (prompt {index}): {fault}. {_NOT_KEPT}")
    if awaited:
        raise PairingError(f"{name}: {len(awaited)} accepted pairs are missing, e.g. prompt {min(awaited)}")
    return len(pairs)


def _fault(
    row: Mapping[str, Any], pair: Pair, prompt_row: Mapping[str, Any], ask: Ask, same: tuple[Any, ...]
) -> str | None:
    extra, metadata = row["extra_info"], row["metadata"]
    try:
        trajectory = Trajectory.from_dict(json.loads(metadata["trajectory"] or ""))
    except (ValueError, KeyError, TypeError):
        return "metadata.trajectory is no trajectory"
    question, answer = question_and_answer(trajectory)
    target = row["reward_model"]["ground_truth"]["target"]
    source, corpus_id = prompt_row["extra_info"], prompt_row["metadata"]["corpus_id"]
    document_hash = sha256((extra["document"] or "").encode()).hexdigest()
    checks = (
        ("extra_info.question", extra["question"] == question, "the row's trajectory"),
        ("reward_model.ground_truth.target", target == [answer], "the row's trajectory"),
        ("prompt", row["prompt"] == ask(extra["question"]), "the row's question"),
        ("metadata.document_sha256", metadata["document_sha256"] == document_hash, "the row's document"),
        ("extra_info.document", extra["document"] == source["document"], "the challenger prompt"),
        ("extra_info.doc_id", extra["doc_id"] == source["doc_id"], "the challenger prompt"),
        ("extra_info.hop", extra["hop"] == source["hop"], "the challenger prompt"),
        ("metadata.corpus_id", metadata["corpus_id"] == corpus_id, "the challenger prompt"),
        ("metadata.seed", metadata["seed"] == pair.seed, "the accepted sample"),
        ("metadata.trajectory", trajectory == pair.trajectory, "the accepted sample"),
        ("data_source", row["data_source"] == same[0], "this file"),
        ("split", extra["split"] == same[1], "this file"),
        ("tools_kwargs", extra["tools_kwargs"] == same[2], "this file"),
        ("generator_checkpoint", metadata["generator_checkpoint"] == same[3], "this file"),
    )
    wrong = (f"{name} does not belong to {other}" for name, belongs, other in checks if not belongs)
    return next(wrong, None)
