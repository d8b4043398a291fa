"""The solver's training data: accepted pairs as parquet rows, and the file of rejected prompts.

Training and validation share no document: a hash of document and seed decides.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.errors import DataError, PairingError
from data.pairs import Pair, question_and_answer
from data.parquet_io import check_training_rows, read_parquet, training_row, write_training_rows
from data.selection import Rejection, prompts_by_index
from drzero.ops.files import write_jsonl
from drzero.ops.records import read_json_lines
from verl_ext.method.prompts import MAX_TURNS, Message, PromptForm, solver_messages
from verl_ext.method.solver_reward import SYNTHESIZED
from verl_ext.method.trajectory import Trajectory

TRAIN, VAL, REJECTS = "train.parquet", "val.parquet", "rejects.jsonl"
Ask = Callable[[str], list[Message]]
_NOT_KEPT = "The file is not kept; this is a bug or a damaged disk, so do not train on what was written"


@dataclass(frozen=True)
class SolverSplitReport:
    """What `write_solver_split` wrote."""

    train_path: Path
    val_path: Path | None  # None if all pairs share one document, which cannot be in both files
    train_rows: int
    val_rows: int


def write_solver_split(
    accepted: Sequence[Pair],
    prompts: Sequence[Mapping[str, Any]],
    out_dir: Path,
    *,
    prompt_form: PromptForm,
    max_turns: int = MAX_TURNS,
    generator_checkpoint: str,
    seed: int,
    val_share: float = 0.1,
    max_val_rows: int = 1200,
    pairing: bool = True,
) -> SolverSplitReport:
    """Write `train.parquet` and `val.parquet` (at most `val_share` and `max_val_rows`, but one document).

    Raises DataError without accepted pairs, PairingError if a row read back is inconsistent.
    """
    if not accepted:
        raise DataError(
            f"no pair was accepted from {len(prompts)} prompts, so the solver has nothing to train on: see "
            f"{out_dir / REJECTS} for the reasons, then train the challenger longer or loosen the gates"
        )
    rows = prompts_by_index(prompts)
    ask = partial(solver_messages, form=prompt_form, max_turns=max_turns)
    ordered = sorted(accepted, key=lambda pair: pair.prompt_index)
    held_out = held_out_documents(ordered, seed, min(int(val_share * len(ordered)), max_val_rows))
    train = [pair for pair in ordered if document_key(pair) not in held_out]
    val = [pair for pair in ordered if document_key(pair) in held_out]
    for split, pairs in (("train", train), ("val", val)):
        path = out_dir / f"{split}.parquet"
        if not pairs:
            path.unlink(missing_ok=True)  # of an earlier run
            continue
        made = [
            _solver_row(pair, split, ask(pair.question), rows[pair.prompt_index], generator_checkpoint)
            for pair in pairs
        ]
        check = partial(
            check_pairing,
            pairs=pairs,
            prompts=rows,
            ask=ask,
            split=split,
            generator_checkpoint=generator_checkpoint,
            shown_as=path,
        )
        write_training_rows(path, made, check if pairing else None)
    return SolverSplitReport(out_dir / TRAIN, out_dir / VAL if val else None, len(train), len(val))


def _solver_row(
    pair: Pair, split: str, messages: list[dict[str, str]], prompt: Mapping[str, Any], checkpoint: str
) -> dict[str, Any]:
    extra_info = {
        "index": pair.prompt_index,
        "split": split,
        **{name: getattr(pair, name) for name in ("hop", "doc_id", "document", "question")},
    }
    metadata = {
        "corpus_id": prompt["metadata"]["corpus_id"],
        "generator_checkpoint": checkpoint,
        "seed": pair.seed,
        "trajectory": json.dumps(pair.trajectory.to_dict(), ensure_ascii=False),
    }
    return training_row(SYNTHESIZED, messages, [pair.answer], extra_info, metadata)


def check_pairing(
    path: Path,
    pairs: Sequence[Pair],
    prompts: Mapping[int, Mapping[str, Any]],
    ask: Ask,
    *,
    split: str,
    generator_checkpoint: str,
    shown_as: Path | None = None,
) -> None:
    """Read each row of the file back, and check that its fields belong together. Raises PairingError.

    Published code for this step has written new answers next to old prompts, so a mismatch is an error, which
    names the file as `shown_as`.
    """
    name = shown_as or path
    awaited = {pair.prompt_index: pair for pair in pairs}
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
        if fault := _mismatch(row, pair, prompts[index], ask, split, generator_checkpoint):
            raise PairingError(f"{name}, row {number} (prompt {index}): {fault}. {_NOT_KEPT}")
    if awaited:
        raise PairingError(f"{name}: {len(awaited)} accepted pairs are missing, e.g. prompt {min(awaited)}")


def _mismatch(
    row: Mapping[str, Any], pair: Pair, prompt: Mapping[str, Any], ask: Ask, split: str, checkpoint: str
) -> str | None:
    extra, metadata = row["extra_info"], row["metadata"]
    try:
        trajectory = Trajectory.from_dict(json.loads(metadata["trajectory"] or ""))
    except (ValueError, KeyError, TypeError):
        return "metadata.trajectory is no trajectory"
    question, answer = question_and_answer(trajectory)
    target = row["reward_model"]["ground_truth"]["target"]
    source, corpus_id = prompt["extra_info"], prompt["metadata"]["corpus_id"]
    tools = {"search": {"create_kwargs": {"data_source": SYNTHESIZED}}}
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
        ("data_source", row["data_source"] == SYNTHESIZED, "this file"),
        ("split", extra["split"] == split, "this file"),
        ("tools_kwargs", extra["tools_kwargs"] == tools, "this file"),
        ("generator_checkpoint", metadata["generator_checkpoint"] == checkpoint, "this file"),
    )
    wrong = (f"{name} does not belong to {other}" for name, belongs, other in checks if not belongs)
    return next(wrong, None)


def write_rejects(rejected: Iterable[Rejection], out_dir: Path) -> None:
    """Write `rejects.jsonl`, a line per prompt without a pair. `samples` is empty if services failed."""
    write_jsonl(out_dir / REJECTS, (rejection.to_dict() for rejection in rejected))


def check_partition(out_dir: Path, prompts: Sequence[Mapping[str, Any]]) -> None:
    """Check that each prompt is in exactly one of the three written files, or raise DataError."""
    places: Counter[int] = Counter()
    for path in (out_dir / TRAIN, out_dir / VAL):
        if path.exists():
            extras = read_parquet(path, ["extra_info"])["extra_info"].to_pylist()
            places.update(extra["index"] for extra in extras)
    places.update(record["prompt_index"] for record in read_json_lines(out_dir / REJECTS))
    known = prompts_by_index(prompts)
    faults = {
        "missing": [index for index in known if places[index] == 0],
        "present more than once": [index for index, count in places.items() if count > 1],
        "not of this partition": [index for index in places if index not in known],
    }
    wrong = [f"{len(found)} are {what} (such as {min(found)})" for what, found in faults.items() if found]
    if wrong:
        raise DataError(
            f"{TRAIN}, {VAL} and {REJECTS} of {out_dir} do not hold each prompt of the partition exactly "
            f"once: {'; '.join(wrong)}. Remove these files and synthesize again"
        )


def held_out_documents(pairs: Sequence[Pair], seed: int, rows: int) -> set[str]:
    """Return documents with at most `rows` rows together, else the smallest, but never the only one."""
    sizes = Counter(document_key(pair) for pair in pairs)
    if len(sizes) < 2:
        return set()
    shuffled = sorted(sizes, key=lambda key: sha256(f"{seed}/{key}".encode()).digest())
    chosen: set[str] = set()
    room = rows
    for key in shuffled:
        if sizes[key] <= room:
            chosen.add(key)
            room -= sizes[key]
    return chosen or {min(shuffled, key=sizes.__getitem__)}


def document_key(pair: Pair) -> str:
    """A hash of the text, because a corpus may hold one text under several ids."""
    return sha256(pair.document.encode()).hexdigest()
