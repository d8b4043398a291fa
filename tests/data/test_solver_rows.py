"""The solver's files: the row contract, the split by document, pairing, and each prompt in one file."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pairs import pair, prompt, search

from bench.planted_faults import FILE_FAULTS, damaged
from data import solver_rows
from data.errors import DataError, PairingError
from data.pairs import Pair
from data.parquet_io import TRAINING_SCHEMA, check_training_rows, read_parquet, write_training_rows
from data.selection import RefusedSample, Rejection, prompts_by_index
from data.solver_rows import (
    SolverSplitReport,
    check_pairing,
    check_partition,
    held_out_documents,
    write_rejects,
    write_solver_split,
)
from verl_ext.method.prompts import solver_messages
from verl_ext.method.trajectory import Trajectory

Write = Callable[..., SolverSplitReport]
RIVERS = ["Galmir", "Tesk", "Zolvan", "Kelm", "Vorn", "Nalk", "Brulm", "Hask"]


def about(index: int, document: int | None = None) -> Pair:
    """An accepted pair about its own document, unless another is named."""
    number = index if document is None else document
    river = RIVERS[index % len(RIVERS)] + "x" * (index // len(RIVERS))
    text = f"Town {number}\nTown {number} lies on a river."
    made = pair(
        f"On which river does town {index} lie?", river, search(river), index=index, hop=2, document=text
    )
    return replace(made, seed=500 + index)


def prompts_of(pairs: list[Pair]) -> list[dict[str, Any]]:
    return [prompt(p.prompt_index, p.hop, p.document, p.doc_id) for p in pairs]


def rejection(index: int) -> Rejection:
    sample = RefusedSample(0, "Who is it?", None, ("pair: the last turn gives no answer",))
    return Rejection(index, 1, f"doc{index}", (sample,))


@pytest.fixture
def write(tmp_path):
    def run(pairs: list[Pair], **changes: Any) -> SolverSplitReport:
        arguments: dict[str, Any] = {
            "prompts": prompts_of(pairs),
            "out_dir": tmp_path / "out",
            "prompt_form": "short",
            "generator_checkpoint": "challenger_iter1/global_step_2",
            "seed": 0,
        }
        return write_solver_split(pairs, **(arguments | changes))

    return run


def rows_of(path: Path | None) -> list[dict[str, Any]]:
    assert path
    return read_parquet(path).to_pylist()


# --- rows --------------------------------------------------------------------------------------------------


def test_rows_follow_the_contract(write):
    pairs = [about(i) for i in range(6)]
    report = write(pairs, prompt_form="full", max_turns=3)
    for split, path in (("train", report.train_path), ("val", report.val_path)):
        rows = rows_of(path)
        check_training_rows(rows)
        for row in rows:
            made = pairs[row["extra_info"]["index"]]
            document_hash = sha256(made.document.encode()).hexdigest()
            assert row["data_source"] == "search_zero"
            assert row["prompt"] == solver_messages(made.question, "full", 3)
            assert row["reward_model"]["ground_truth"]["target"] == [made.answer]
            assert row["extra_info"] == {
                "index": made.prompt_index,
                "split": split,
                "hop": 2,
                "doc_id": made.doc_id,
                "document": made.document,
                "question": made.question,
                "need_tools_kwargs": True,
                "tools_kwargs": {"search": {"create_kwargs": {"data_source": "search_zero"}}},
            }
            assert Trajectory.from_dict(json.loads(row["metadata"].pop("trajectory"))) == made.trajectory
            assert row["metadata"] == {
                "corpus_id": "tests",
                "document_sha256": document_hash,
                "generator_checkpoint": "challenger_iter1/global_step_2",
                "seed": made.seed,
            }


def test_the_same_pairs_give_the_same_bytes_in_any_order(write, tmp_path):
    pairs = [about(i) for i in range(9)]
    one = write(pairs, out_dir=tmp_path / "one")
    two = write(pairs[::-1], out_dir=tmp_path / "two")
    assert one.train_path.read_bytes() == two.train_path.read_bytes()
    assert one.val_path and two.val_path and one.val_path.read_bytes() == two.val_path.read_bytes()


def test_no_accepted_pair_is_an_error_that_points_to_the_reasons(write, tmp_path):
    with pytest.raises(DataError, match=r"no pair was accepted from 3 prompts.*rejects\.jsonl"):
        write([], prompts=[prompt(i) for i in range(3)])
    assert not (tmp_path / "out" / "train.parquet").exists()


# --- split -------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(DOCUMENTS, st.integers(0, 5), st.integers(0, 10))
def test_held_out_documents_leave_some_on_both_sides_and_keep_to_their_rows(documents, seed, rows):
    pairs = [about(index, document) for index, document in enumerate(documents)]
    held_out = held_out_documents(pairs, seed, rows)
    keys = [sha256(made.document.encode()).hexdigest() for made in pairs]
    assert held_out <= set(keys) and (held_out or len(set(keys)) == 1)
    if rows < len(pairs):
        assert held_out != set(keys)
    smallest = min(map(documents.count, set(documents)))  # where every document has more rows
    assert sum(key in held_out for key in keys) <= max(rows, smallest)


def test_a_document_is_on_one_side_even_under_two_ids(write):
    pairs = [replace(about(i, document=i // 3), doc_id=f"id{i}") for i in range(12)]
    report = write(pairs, val_share=0.4)
    paths = report.train_path, report.val_path
    train, val = ({row["extra_info"]["document"] for row in rows_of(path)} for path in paths)
    assert train.isdisjoint(val) and train and val
    assert (report.train_rows, report.val_rows) == (9, 3)


def test_the_split_follows_the_seed(write):
    pairs = [about(i) for i in range(30)]
    first, second = (rows_of(write(pairs, seed=seed).val_path) for seed in (0, 1))
    assert {row["extra_info"]["index"] for row in first} != {row["extra_info"]["index"] for row in second}


def test_validation_has_at_most_its_maximum_of_rows(write):
    assert write([about(i) for i in range(30)], val_share=0.5, max_val_rows=4).val_rows == 4


def test_a_single_document_gives_no_validation_file_and_removes_an_old_one(write):
    assert write([about(0), about(1)]).val_path is not None
    report = write([about(i, document=0) for i in range(3)])
    assert (report.train_rows, report.val_rows, report.val_path) == (3, 0, None)
    assert [path.name for path in report.train_path.parent.iterdir()] == ["train.parquet"]


# --- pairing -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Pairs, and the rows of the file that they were written to."""
    pairs = [about(i) for i in range(8)]
    path = tmp_path_factory.mktemp("written")
    write_solver_split(
        pairs, prompts_of(pairs), path, prompt_form="short", generator_checkpoint="c", seed=0, max_val_rows=1
    )
    rows = rows_of(path / "train.parquet")
    kept = {row["extra_info"]["index"] for row in rows}
    return [made for made in pairs if made.prompt_index in kept], rows


def check(path: Path, pairs: list[Pair]) -> None:
    check_pairing(
        path,
        pairs,
        prompts_by_index(prompts_of(pairs)),
        partial(solver_messages, form="short"),
        split="train",
        generator_checkpoint="c",
    )


def save(rows: list[dict[str, Any]], path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=TRAINING_SCHEMA), path)
    return path


def test_a_file_as_written_is_paired(written, tmp_path):
    pairs, rows = written
    check(save(rows, tmp_path / "rows.parquet"), pairs)


@pytest.mark.parametrize("fault", FILE_FAULTS.values(), ids=FILE_FAULTS)
def test_pairing_refuses_every_planted_fault(fault, written, tmp_path):
    pairs, rows = written
    for number, faulty in enumerate(damaged(rows, fault, 5, seed=0)):
        with pytest.raises(PairingError):
            check(save(faulty, tmp_path / f"{number}.parquet"), pairs)


NO_TRAJECTORY = r"metadata\.trajectory is no trajectory"


@pytest.mark.parametrize(
    ("group", "field", "value", "said"),
    [
        ("extra_info", "hop", 3, r"extra_info\.hop does not belong to the challenger prompt"),
        ("metadata", "corpus_id", "other", r"metadata\.corpus_id does not belong"),
        *(("metadata", "trajectory", text, NO_TRAJECTORY) for text in (None, "{", "[]", '{"turns": [{}]}')),
    ],
)
def test_a_mismatch_names_file_row_and_field(group, field, value, said, written, tmp_path):
    pairs, rows = written
    changed = [rows[0], rows[1] | {group: rows[1][group] | {field: value}}, *rows[2:]]
    index = rows[1]["extra_info"]["index"]
    with pytest.raises(PairingError, match=rf"some\.parquet, row 1 \(prompt {index}\): {said}"):
        check(save(changed, tmp_path / "some.parquet"), pairs)


@contextmanager
def wrong_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A writer that puts each answer one row too low."""

    def shifted(path: Path, rows: list[dict[str, Any]], check: Any) -> None:
        targets = [row["reward_model"] for row in rows]
        shifted_by_one = zip(rows, targets[1:] + targets[:1], strict=True)
        write_training_rows(path, [row | {"reward_model": target} for row, target in shifted_by_one], check)

    with monkeypatch.context() as patch:
        patch.setattr(solver_rows, "write_training_rows", shifted)
        yield


def test_a_file_that_fails_the_pairing_check_is_not_kept(write, tmp_path, monkeypatch):
    with wrong_answers(monkeypatch), pytest.raises(PairingError, match=r"out/train\.parquet, row 0"):
        write([about(i) for i in range(6)])
    assert list((tmp_path / "out").iterdir()) == []


def test_pairing_can_be_switched_off(write, monkeypatch):
    with wrong_answers(monkeypatch):
        assert write([about(i) for i in range(6)], pairing=False).train_rows


# --- every prompt once -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rejected", "message"),
    [
        ([5, 6], None),
        ([5], r"1 are missing \(such as 6\)"),
        ([5, 6, 2], r"1 are present more than once \(such as 2\)"),
        ([5, 6, 9], r"1 are not of this partition \(such as 9\)"),
    ],
)
def test_each_prompt_must_be_in_exactly_one_file(rejected, message, write, tmp_path):
    pairs = [about(i) for i in range(5)]
    prompts = [*prompts_of(pairs), prompt(5), prompt(6)]
    write(pairs, prompts=prompts)
    write_rejects(map(rejection, rejected), tmp_path / "out")
    with pytest.raises(DataError, match=message) if message else nullcontext():
        check_partition(tmp_path / "out", prompts)


def test_rejects_are_a_line_each_with_their_reasons(tmp_path):
    write_rejects([rejection(4)], tmp_path)
    lines = (tmp_path / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    sample = {"sample": 0, "question": "Who is it?", "answer": None}
    reasons = {"reasons": ["pair: the last turn gives no answer"]}
    expected = {"prompt_index": 4, "hop": 1, "doc_id": "doc4", "samples": [sample | reasons]}
    assert [json.loads(line) for line in lines] == [expected | {"reason": "every sample was refused"}]
