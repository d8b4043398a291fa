"""Benchmark files as questions, and the draw of a smaller number."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged import damage_pages
from hypothesis import given
from hypothesis import strategies as st

from data.benchmarks import BenchmarkQuestion, choose_questions, load_benchmark
from data.demo_world import generate_world, write_world
from data.errors import DataError
from data.parquet_io import write_training_rows

CHAIN = {"id": "run-0-0001", "hop": 2, "question": "Who?", "answer": "Vell", "doc_ids": ["a"]}


def published_row(**changes: Any) -> dict[str, Any]:
    """A row of the published nq_hotpotqa_train, with every column it has."""
    question, answers = "who got the first nobel prize in physics", ["Wilhelm Conrad Röntgen", "Röntgen"]
    row = {
        "id": "test_0",
        "question": question,
        "golden_answers": answers,
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Answer the given question. {question}?"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"index": 0, "split": "test"},
        "metadata": None,
    }
    return row | changes


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_chains(path: Path, *chains: Any) -> Path:
    path.write_text("".join(json.dumps(chain) + "\n" for chain in chains))
    return path


def test_the_demo_worlds_chains_are_one_benchmark_per_hop_count(tmp_path: Path) -> None:
    world = generate_world(0, "run", passages=60, chains_per_hop=5)
    write_world(world, tmp_path)
    questions = load_benchmark(tmp_path / "chains.jsonl")
    assert Counter(question.benchmark for question in questions) == {f"demo_{h}hop": 5 for h in (1, 2, 3, 4)}
    assert [(q.id, q.question, q.targets, q.hop) for q in questions] == [
        (chain.id, chain.question, (chain.answer,), chain.hop) for chain in world.chains
    ]


def test_a_chain_names_the_documents_that_hold_its_facts_if_it_knows_them(tmp_path: Path) -> None:
    unknowing = {name: value for name, value in CHAIN.items() if name != "doc_ids"}
    path = write_chains(tmp_path / "chains.jsonl", CHAIN, unknowing)
    assert [question.doc_ids for question in load_benchmark(path)] == [("a",), ()]


@pytest.mark.parametrize(
    ("named", "documents"),
    [
        ({"doc_ids": ["a", "b"]}, ("a", "b")),
        ({"extra_info": {"doc_id": "a"}}, ("a",)),
        ({"extra_info": {"doc_id": None}}, ()),
    ],
)
def test_a_row_names_its_documents_in_a_list_or_as_the_one(
    named: dict[str, Any], documents: tuple[str, ...], tmp_path: Path
) -> None:
    row = published_row()
    extra = row["extra_info"] | named.get("extra_info", {})
    path = write_parquet(tmp_path / "test.parquet", [row | named | {"extra_info": extra}])
    assert load_benchmark(path)[0].doc_ids == documents


def test_the_published_layout_holds_one_benchmark_per_data_source(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "test.parquet", [published_row(), published_row(data_source="musique")])
    first, second = load_benchmark(str(path))
    targets = ("Wilhelm Conrad Röntgen", "Röntgen")
    assert first == BenchmarkQuestion(
        "nq", "test_0", "who got the first nobel prize in physics", targets, None
    )
    assert second.key == "musique/test_0"


def test_verls_preprocessed_copy_gives_the_same_benchmarks(tmp_path: Path) -> None:
    row = published_row(data_source="searchR1_nq")
    extra = {**row["extra_info"], "question": row["question"], "need_tools_kwargs": True}
    kept = ("data_source", "prompt", "ability", "reward_model", "metadata")
    path = write_parquet(
        tmp_path / "test.parquet", [{name: row[name] for name in kept} | {"extra_info": extra}] * 2
    )
    questions = load_benchmark(path)
    assert [question.key for question in questions] == ["nq/0", "nq/1"]
    assert questions[0].question == row["question"]
    assert questions[0].targets == tuple(row["golden_answers"])


def test_this_projects_own_rows_with_targets_are_a_benchmark_too(tmp_path: Path) -> None:
    row = {
        "data_source": "search_zero",
        "prompt": [{"role": "user", "content": "Who?"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Vell"]}},
        "extra_info": {
            "index": 0,
            "split": "val",
            "hop": 3,
            "doc_id": "a",
            "document": "Vell came.",
            "question": "Who?",
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": {"data_source": "search_zero"}}},
        },
        "agent_name": "search_agent",
        "metadata": dict.fromkeys(
            ("corpus_id", "document_sha256", "generator_checkpoint", "seed", "trajectory")
        ),
    }
    write_training_rows(tmp_path / "val.parquet", [row])
    assert load_benchmark(tmp_path / "val.parquet") == [
        BenchmarkQuestion("search_zero", "0", "Who?", ("Vell",), 3, ("a",))
    ]


def test_a_single_target_may_be_a_plain_string(tmp_path: Path) -> None:
    row = published_row(reward_model={"style": "rule", "ground_truth": {"target": "Vell"}})
    assert load_benchmark(write_parquet(tmp_path / "test.parquet", [row]))[0].targets == ("Vell",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": " "}, "row 1 has no question"),
        ({"data_source": None}, "row 1 has no data_source"),
        ({"reward_model": {"style": "rule", "ground_truth": {"target": []}}}, "row 1 has no answers"),
        ({"reward_model": {"style": "rule", "ground_truth": {"target": None}}}, "row 1 has no answers"),
        ({"reward_model": None}, "row 1 has no answers"),
    ],
)
def test_a_row_that_cannot_be_asked_or_scored_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_parquet(tmp_path / "test.parquet", [published_row(), published_row(**changes)])
    with pytest.raises(DataError, match=rf"test\.parquet, {message}"):
        load_benchmark(path)


@pytest.mark.parametrize("missing", ["question", "data_source", "reward_model"])
def test_a_parquet_of_another_layout_is_refused_with_what_it_has(tmp_path: Path, missing: str) -> None:
    row = published_row()
    del row[missing]
    path = write_parquet(tmp_path / "foreign.parquet", [row])
    with pytest.raises(DataError, match=r"foreign\.parquet.*expected data_source.*found .*golden_answers"):
        load_benchmark(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no question chain.*found none"),
        (json.dumps({**CHAIN, "answer": None}), "line 2 is no question chain.*answer missing"),
        (json.dumps({"question": "Who?", "answer": "Vell"}), "found question, answer .id, hop missing"),
    ],
)
def test_a_line_that_is_no_chain_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chains.jsonl"
    path.write_text(f"{json.dumps(CHAIN)}\n{line}\n")
    with pytest.raises(DataError, match=message):
        load_benchmark(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chains.jsonl", "", "holds no question"),
        ("test.parquet", "not parquet", "is not a parquet file"),
        ("test.csv", "a,b", "is no benchmark file"),
        ("absent.jsonl", None, "there is no benchmark file at"),
    ],
)
def test_a_file_that_is_no_benchmark_is_refused_by_name(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as refusal:
        load_benchmark(tmp_path / name)
    assert name in str(refusal.value)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", '{"id": "ä"}'.encode("latin-1")])
def test_a_file_that_is_no_text_in_utf_8_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chains.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"chains\.jsonl, line 1 is not JSON in UTF-8"):
        load_benchmark(tmp_path / "chains.jsonl")


def test_a_parquet_file_with_a_damaged_page_is_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "test.parquet", [published_row(id=f"test_{i}") for i in range(50)])
    damage_pages(path)
    with pytest.raises(DataError, match=r"test\.parquet is not a parquet file or is damaged"):
        load_benchmark(path)


HUB_FILE = "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; the hub itself is out of reach (HF_HUB_OFFLINE)."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_hub_file_is_read_from_the_hubs_cache(hub_cache: Path) -> None:
    repo = hub_cache / "datasets--PeterJinGo--nq_hotpotqa_train"
    revision = "0" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots" / revision).mkdir(parents=True)
    write_parquet(repo / "snapshots" / revision / "test.parquet", [published_row()])
    assert [question.key for question in load_benchmark(HUB_FILE)] == ["nq/test_0"]


def test_a_hub_file_out_of_reach_says_what_to_do(hub_cache: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be fetched.*HF_HUB_OFFLINE, or download the file"):
        load_benchmark(HUB_FILE)


@pytest.mark.parametrize("url", ["hf://PeterJinGo/nq_hotpotqa_train", "hf://datasets/a/b/notes.txt"])
def test_a_hub_address_that_names_no_benchmark_file_is_refused(url: str) -> None:
    with pytest.raises(DataError, match="write hf://datasets/OWNER/NAME/FILE"):
        load_benchmark(url)


# --- the choice ---------------------------------------------------------------------------------------------


def questions_of(counts: dict[str, int]) -> list[BenchmarkQuestion]:
    return [
        BenchmarkQuestion(name, str(i), "Who?", ("Vell",), None)
        for name, n in counts.items()
        for i in range(n)
    ]


counts = st.dictionaries(st.sampled_from(["nq", "popqa", "musique"]), st.integers(1, 30), min_size=1)


@given(counts, st.integers(1, 40), st.integers(0, 3))
def test_a_choice_takes_as_many_of_each_benchmark_in_their_order(
    counts: dict[str, int], per_benchmark: int, seed: int
) -> None:
    questions = questions_of(counts)
    chosen = choose_questions(questions, per_benchmark, seed)
    expected = {name: min(n, per_benchmark) for name, n in counts.items()}
    assert Counter(question.benchmark for question in chosen) == expected
    assert chosen == [question for question in questions if question in chosen]


@given(counts, st.integers(1, 20), st.integers(0, 20), st.integers(0, 3))
def test_a_larger_choice_holds_the_smaller_one(
    counts: dict[str, int], few: int, more: int, seed: int
) -> None:
    questions = questions_of(counts)
    assert set(choose_questions(questions, few, seed)) <= set(choose_questions(questions, few + more, seed))


def test_another_seed_chooses_others() -> None:
    questions = questions_of({"nq": 100})
    assert choose_questions(questions, 10, 0) != choose_questions(questions, 10, 1)


def test_without_a_limit_all_are_chosen() -> None:
    questions = questions_of({"nq": 3, "popqa": 2})
    assert choose_questions(questions, None, 0) == questions
