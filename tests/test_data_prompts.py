"""Challenger prompts: ratio, cycling, cutting, and the parquet contract as veRL's own dataset reads it."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged import damage_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.challenger_prompts import (
    PrepareReport,
    cut_to_tokens,
    largest_remainder,
    prepare_challenger_prompts,
)
from data.demo_world import generate_world
from data.errors import DataError
from data.parquet_io import TRAINING_SCHEMA, check_training_rows, read_parquet, write_training_rows
from ops.files import atomic_path
from verl_ext.method.prompts import challenger_messages

Prepare = Callable[..., PrepareReport]


class WordTokenizer:
    """One token a word: all that counting needs."""

    def encode(self, text: str, add_special_tokens: bool) -> list[str]:
        assert not add_special_tokens
        return text.split()


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    def run(documents: int = 50, **changes: Any) -> PrepareReport:
        arguments: dict[str, Any] = {
            "rows": 20,
            "tokenizer": WordTokenizer(),
            "prompt_form": "short",
            "heldout_rows": 10,
            "seed": 0,
            "corpus_id": "tests",
            "out_dir": tmp_path / "out",
        }
        corpus = [(f"d{i}", f"Title {i}", f"Text number {i}.") for i in range(documents)]
        return prepare_challenger_prompts(corpus, **(arguments | changes))

    return run


def rows_of(path: Path | None) -> list[dict[str, Any]]:
    assert path
    return read_parquet(path).to_pylist()


def doc_ids(path: Path | None) -> list[str]:
    return [row["extra_info"]["doc_id"] for row in rows_of(path)]


# --- ratio -------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_counts_sum_up_and_stay_within_one_of_their_share(total: int, weights: list[int]) -> None:
    counts = largest_remainder(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count * sum(weights) - total * weight) < sum(weights)


@given(st.integers(0, 500), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
def test_a_total_that_divides_evenly_is_split_exactly(factor: int, weights: list[int]) -> None:
    assert largest_remainder(factor * sum(weights), weights) == [factor * weight for weight in weights]


def test_the_largest_remainders_get_the_rest() -> None:
    assert largest_remainder(8, (4, 3, 2, 1)) == [3, 2, 2, 1]  # shares 3.2, 2.4, 1.6, 0.8


@pytest.mark.parametrize(("total", "weights"), [(-1, (1,)), (1, ()), (1, (0, 0)), (1, (2, -1))])
def test_an_invalid_ratio_is_refused(total: int, weights: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="cannot split"):
        largest_remainder(total, weights)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 60), ratio=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any))
def test_rows_keep_the_ratio(prepare: Prepare, rows: int, ratio: list[int]) -> None:
    report = prepare(rows=rows, hop_ratio=ratio)
    hops = Counter(row["extra_info"]["hop"] for row in rows_of(report.train_path))
    expected = dict(enumerate(largest_remainder(rows, ratio), start=1))
    assert report.hop_counts == expected
    assert hops == {hop: count for hop, count in expected.items() if count}


def test_hops_are_shuffled(prepare: Prepare) -> None:
    hops = [row["extra_info"]["hop"] for row in rows_of(prepare(rows=40).train_path)]
    assert hops != sorted(hops)


@pytest.mark.parametrize(
    ("ratio", "name"),
    [((4, 3, 2, 1), "zero_ratio4321"), ((1, 0), "zero_ratio10"), ((10, 3), "zero_ratio10-3")],
)
def test_files_are_named_after_the_ratio(prepare: Prepare, ratio: tuple[int, ...], name: str) -> None:
    report = prepare(hop_ratio=ratio)
    assert report.train_path.name == f"{name}.parquet"
    assert report.heldout_path and report.heldout_path.name == f"{name}_heldout.parquet"


# --- documents ---------------------------------------------------------------------------------------------


def test_a_large_corpus_gives_every_row_its_own_document(prepare: Prepare) -> None:
    report = prepare(documents=200)
    used = doc_ids(report.train_path) + doc_ids(report.heldout_path)
    assert len(used) == len(set(used)) == 30
    assert report.cycles == 1 and report.heldout_is_disjoint
    assert "cycled" not in report.summary()


def test_a_small_corpus_is_cycled_evenly_and_the_report_says_so(prepare: Prepare) -> None:
    report = prepare(documents=30, rows=50)
    assert report.cycles == 2.5
    assert Counter(Counter(doc_ids(report.train_path)).values()) == {2: 10, 3: 10}
    assert "cycled 2.50 times" in report.summary()


def test_heldout_documents_are_not_trained_on(prepare: Prepare) -> None:
    report = prepare(documents=30, rows=50)
    assert set(doc_ids(report.train_path)).isdisjoint(doc_ids(report.heldout_path))


def test_the_report_says_when_a_corpus_is_too_small_to_hold_documents_out(prepare: Prepare) -> None:
    report = prepare(documents=15)
    assert not report.heldout_is_disjoint
    assert "trained on too" in report.summary()


def test_no_heldout_rows_means_no_heldout_file(prepare: Prepare) -> None:
    report = prepare(heldout_rows=0)
    assert report.heldout_path is None
    assert [path.name for path in report.train_path.parent.iterdir()] == ["zero_ratio4321.parquet"]


def test_every_document_is_equally_likely_to_be_drawn(prepare: Prepare) -> None:
    drawn = Counter(
        doc
        for seed in range(150)
        for doc in doc_ids(prepare(20, rows=5, heldout_rows=0, seed=seed).train_path)
    )
    assert len(drawn) == 20
    assert min(drawn.values()) >= 15 and max(drawn.values()) <= 65  # 37.5 each on average, sd 5.3


def test_same_inputs_give_the_same_bytes(prepare: Prepare, tmp_path: Path) -> None:
    one, two = prepare(out_dir=tmp_path / "one"), prepare(out_dir=tmp_path / "two")
    assert one.train_path.read_bytes() == two.train_path.read_bytes()
    assert one.heldout_path and two.heldout_path
    assert one.heldout_path.read_bytes() == two.heldout_path.read_bytes()


def test_another_seed_gives_other_rows(prepare: Prepare) -> None:
    assert doc_ids(prepare(seed=0).train_path) != doc_ids(prepare(seed=1).train_path)


def test_an_empty_corpus_is_refused_and_nothing_written(prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'tests' has no document with text"):
        prepare(documents=0)
    assert not (tmp_path / "out").exists()


def test_control_tokens_in_a_document_are_shown_as_the_prompt_shows_them(tmp_path: Path) -> None:
    report = prepare_challenger_prompts(
        [("d", "Title", "a <|im_end|> b")],
        rows=1,
        tokenizer=WordTokenizer(),
        prompt_form="short",
        heldout_rows=0,
        seed=0,
        corpus_id="tests",
        out_dir=tmp_path,
    )
    row = rows_of(report.train_path)[0]
    assert row["extra_info"]["document"] in row["prompt"][0]["content"]


# --- cutting -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(text=st.text(max_size=200), limit=st.integers(1, 40))
def test_a_cut_document_is_a_beginning_within_the_limit(
    smollm2_tokenizer: Any, text: str, limit: int
) -> None:
    cut = cut_to_tokens(text, smollm2_tokenizer, limit)
    assert text.startswith(cut)
    assert len(smollm2_tokenizer.encode(cut, add_special_tokens=False)) <= limit


def test_a_long_document_is_cut_close_to_the_limit_and_on_a_word(smollm2_tokenizer: Any) -> None:
    text = " ".join(passage.text for passage in list(generate_world(0).passages.values())[:20])
    cut = cut_to_tokens(text, smollm2_tokenizer, 256)
    assert 235 <= len(smollm2_tokenizer.encode(cut, add_special_tokens=False)) <= 256
    assert text[len(cut)] == " "


@pytest.mark.parametrize("text", ["日本語の文章" * 200, "🦜" * 300, "x1y2" * 400])
def test_text_without_spaces_is_cut_between_characters(smollm2_tokenizer: Any, text: str) -> None:
    cut = cut_to_tokens(text, smollm2_tokenizer, 256)
    assert text.startswith(cut)
    assert 250 <= len(smollm2_tokenizer.encode(cut, add_special_tokens=False)) <= 256


def test_a_word_that_just_fits_is_kept() -> None:
    assert cut_to_tokens("one two three four", WordTokenizer(), 2) == "one two"


def test_documents_in_rows_are_cut(smollm2_tokenizer: Any, tmp_path: Path) -> None:
    report = prepare_challenger_prompts(
        [("long", "Title", "The quick brown fox. " * 200), ("short", "Title", "A text.")],
        rows=2,
        tokenizer=smollm2_tokenizer,
        prompt_form="short",
        heldout_rows=0,
        seed=0,
        corpus_id="tests",
        out_dir=tmp_path,
    )
    lengths = [
        len(smollm2_tokenizer.encode(row["extra_info"]["document"], add_special_tokens=False))
        for row in rows_of(report.train_path)
    ]
    assert max(lengths) <= 256
    assert report.cut_documents == 1


# --- parquet contract --------------------------------------------------------------------------------------


def test_rows_follow_the_contract(prepare: Prepare) -> None:
    report = prepare()
    for index, row in enumerate(rows_of(report.train_path)):
        extra = row["extra_info"]
        assert row["data_source"] == f"search_zero_{extra['hop']}"
        assert row["prompt"] == challenger_messages(extra["document"], extra["hop"], "short")
        assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": None}}
        assert (extra["index"], extra["split"], extra["question"]) == (index, "train", None)
        assert extra["tools_kwargs"]["search"]["create_kwargs"]
        assert (row["ability"], row["agent_name"]) == ("fact-reasoning", "search_agent")
        assert row["metadata"]["corpus_id"] == "tests" and len(row["metadata"]["document_sha256"]) == 64


def test_verls_dataset_reads_the_rows(prepare: Prepare, smollm2_tokenizer: Any, tmp_path: Path) -> None:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    report = prepare(tokenizer=smollm2_tokenizer)
    config = OmegaConf.create(
        {"cache_dir": str(tmp_path), "max_prompt_length": 512, "filter_overlong_prompts_workers": 1}
    )
    dataset = RLHFDataset([str(report.train_path), str(report.heldout_path)], smollm2_tokenizer, config)
    assert len(dataset) == 30
    row, stored = dataset[3], rows_of(report.train_path)[3]
    assert row["raw_prompt"] == stored["prompt"]
    assert row["index"] == 3
    assert row["tools_kwargs"] == stored["extra_info"]["tools_kwargs"]
    assert row["reward_model"]["ground_truth"]["target"] is None


def solver_row(row: dict[str, Any]) -> dict[str, Any]:
    copy = json.loads(json.dumps(row))
    copy["data_source"] = "search_zero"
    copy["reward_model"]["ground_truth"]["target"] = ["Drosken"]
    return copy


def test_rows_with_and_without_target_share_a_schema(prepare: Prepare, tmp_path: Path) -> None:
    row = rows_of(prepare().train_path)[0]
    write_training_rows(tmp_path / "mixed.parquet", [row, solver_row(row)])
    write_training_rows(tmp_path / "plain.parquet", [row])
    assert rows_of(tmp_path / "mixed.parquet") == [row, solver_row(row)]
    assert pq.read_schema(tmp_path / "plain.parquet") == pq.read_schema(tmp_path / "mixed.parquet")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("data_source", "zero", "data_source must be"),
        ("data_source", "search_zero", "without target must be a challenger row"),
        ("prompt", [], "prompt must be"),
        ("prompt", [{"role": "user", "content": ""}], "prompt must be"),
        ("ability", "math", "ability must be"),
        ("reward_model.style", "model", "style must be"),
        ("reward_model.ground_truth.target", [], "target must be"),
        ("reward_model.ground_truth.target", [3], "target must be"),
        ("reward_model.ground_truth", None, "missing reward_model.ground_truth"),
        ("extra_info.hop", 9, "same hop"),
        ("extra_info.index", None, "index must be"),
        ("extra_info.document", "", "needs extra_info.document"),
        ("extra_info.need_tools_kwargs", False, "need_tools_kwargs must be true"),
        ("extra_info.tools_kwargs", {}, "missing extra_info.tools_kwargs.search"),
        ("agent_name", "tool_agent", "agent_name must be"),
        ("metadata", {}, "missing metadata.corpus_id"),
    ],
)
def test_a_bad_row_is_named_with_its_fault(prepare: Prepare, path: str, value: Any, message: str) -> None:
    rows = rows_of(prepare().train_path)
    *parents, name = path.split(".")
    node = rows[7]
    for parent in parents:
        node = node[parent]
    node[name] = value
    with pytest.raises(DataError, match=rf"training row 7: .*{message}"):
        check_training_rows(rows)


def test_bad_rows_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="training row 0: missing data_source"):
        write_training_rows(tmp_path / "bad.parquet", [{}])
    with pytest.raises(DataError, match="no rows to write"):
        write_training_rows(tmp_path / "bad.parquet", [])
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no parquet file at .*nowhere\.parquet: prepare the data"):
        read_parquet(tmp_path / "nowhere.parquet")


def test_missing_columns_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"ability": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet lacks the columns data_source.*it has ability"):
        read_parquet(tmp_path / "t.parquet")
    assert read_parquet(tmp_path / "t.parquet", ["ability"]).to_pylist() == [{"ability": "x"}]


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("half a file")
    with pytest.raises(DataError, match=r"t\.parquet is not a parquet file"):
        read_parquet(tmp_path / "t.parquet")


def test_a_file_with_damaged_pages_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"ability": [f"ability {i}" for i in range(100)]}), path)
    damage_pages(path)
    with pytest.raises(DataError, match=r"t\.parquet is not a parquet file or is damaged"):
        read_parquet(path, ["ability"])


FOREIGN = {
    "ground_truth is a string": (
        {"reward_model": pa.array([{"style": "rule", "ground_truth": "Vell"}])},
        r"reward_model\.ground_truth is of type string, not a struct",
    ),
    "one target": (
        {"reward_model": pa.array([{"style": "rule", "ground_truth": {"target": "Vell"}}])},
        r"reward_model\.ground_truth\.target is of type string, not list",
    ),
    "no document": (
        {"extra_info": pa.array([{"index": 0, "split": "train", "hop": 1, "doc_id": "a"}])},
        r"extra_info\.document is missing; extra_info\.question is missing",
    ),
    "the index is text": (
        {"extra_info": pa.array([{"index": "0", "hop": 1}])},
        r"extra_info\.index is of type string, not int64",
    ),
    "a prompt of text": ({"prompt": pa.array(["Who?"])}, r"prompt is of type string, not list"),
    "a null struct": (
        {"reward_model": pa.array([None], TRAINING_SCHEMA.field("reward_model").type)},
        "reward_model is null in 1 rows",
    ),
    "a nested null struct": (
        {"reward_model": pa.array([{"ground_truth": None}], TRAINING_SCHEMA.field("reward_model").type)},
        r"reward_model\.ground_truth is null in 1 rows",
    ),
}


@pytest.mark.parametrize(("columns", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_column_of_another_shape_is_refused_with_file_and_field(
    tmp_path: Path, columns: dict[str, pa.Array], message: str
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "foreign.parquet")
    with pytest.raises(DataError, match=rf"foreign\.parquet is no file of training rows.*{message}"):
        read_parquet(tmp_path / "foreign.parquet", list(columns))


def test_values_written_in_wider_types_or_all_null_are_read(tmp_path: Path) -> None:
    targets = pa.large_list(pa.large_string())
    truth = pa.struct({"style": pa.large_string(), "ground_truth": pa.struct({"target": targets})})
    rows = [{"style": "rule", "ground_truth": {"target": ["Vell"]}}]
    table = pa.table({"reward_model": pa.array(rows, truth), "ability": pa.nulls(1)})
    pq.write_table(table, tmp_path / "t.parquet", store_schema=True)
    assert read_parquet(tmp_path / "t.parquet", table.column_names).to_pylist() == table.to_pylist()


def test_a_file_without_rows_is_read(tmp_path: Path) -> None:
    pq.write_table(TRAINING_SCHEMA.empty_table(), tmp_path / "t.parquet")
    assert len(read_parquet(tmp_path / "t.parquet")) == 0


def test_the_schema_has_no_empty_struct() -> None:
    def structs(kind: pa.DataType) -> list[pa.StructType]:
        inner = [kind.field(i).type for i in range(kind.num_fields)]
        return [t for t in [kind] if pa.types.is_struct(t)] + [s for t in inner for s in structs(t)]

    assert all(s.num_fields for field in TRAINING_SCHEMA for s in structs(field.type))


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"
