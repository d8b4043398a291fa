"""Benchmark files as questions, and the draw of a smaller number."""

import json
from collections import Counter
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback_hub import NO_HUB, LoopbackHub
from solver_rows import solver_row

from data.benchmarks import BenchmarkQuestion, choose_questions, load_benchmark
from data.demo_world import generate_world, write_world
from data.errors import DataError
from data.parquet_io import write_training_rows
from data.question_rows import FieldNames, read_row
from drzero.ops.hub import hub_fault
from drzero.stages.evaluate.benchmark_scores import PAPER_BENCHMARKS

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


def test_the_demo_worlds_chains_are_one_benchmark_per_hop_count(tmp_path):
    world = generate_world(0, "run", passages=60, chains_per_hop=5)
    write_world(world, tmp_path)
    questions = load_benchmark(tmp_path / "chains.jsonl")
    assert Counter(question.benchmark for question in questions) == {f"demo_{h}hop": 5 for h in (1, 2, 3, 4)}
    assert [(q.id, q.question, q.targets, q.hop) for q in questions] == [
        (chain.id, chain.question, (chain.answer,), chain.hop) for chain in world.chains
    ]


@pytest.mark.parametrize(
    ("named", "documents"),
    [
        ({"doc_ids": ["a", "b"]}, ("a", "b")),
        ({"extra_info": {"doc_id": "a"}}, ("a",)),
        ({"extra_info": {"doc_id": None}}, ()),
        ({}, ()),
    ],
)
def test_a_row_names_its_documents_in_a_list_or_as_the_one(named, documents, tmp_path):
    path = write_parquet(tmp_path / "test.parquet", [published_row(**named)])
    assert load_benchmark(path)[0].doc_ids == documents


def test_the_published_layout_holds_one_benchmark_per_data_source(tmp_path):
    path = write_parquet(tmp_path / "test.parquet", [published_row(), published_row(data_source="musique")])
    first, second = load_benchmark(str(path))
    row = published_row()
    assert first == BenchmarkQuestion("nq", "test_0", row["question"], tuple(row["golden_answers"]), None)
    assert second.key == "musique/test_0"
    assert [q.benchmark for q in load_benchmark(f"mine={path}")] == ["mine_nq", "mine_musique"]


def test_verls_preprocessed_copy_gives_the_same_benchmarks(tmp_path):
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


def test_this_projects_own_rows_with_targets_are_a_benchmark_too(tmp_path):
    write_training_rows(tmp_path / "val.parquet", [solver_row(2, "val", "Vell")])
    assert load_benchmark(tmp_path / "val.parquet") == [
        BenchmarkQuestion("search_zero", "0", "Who came?", ("Vell",), 3, ("val-2",))
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (published_row(question=" "), "row 2: no question"),
        (published_row(data_source=None), "row 2: no data_source"),
        (published_row(golden_answers=None, reward_model=None), "row 2: no answer"),
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: no object"),
        (json.dumps({**CHAIN, "question": "Who \ud83d?"}), "line 2: half of a surrogate pair"),
        (json.dumps({**CHAIN, "answer": ["a", "\ude00"]}), "line 2: half of a surrogate pair"),
        (json.dumps({**CHAIN, "data_source": "\ud83d"}), "line 2: half of a surrogate pair"),
    ],
)
def test_a_record_that_cannot_be_asked_or_scored_is_named(tmp_path, record, message):
    path = tmp_path / ("chains.jsonl" if isinstance(record, str) else "test.parquet")
    if isinstance(record, str):
        path.write_text(f"{json.dumps(CHAIN)}\n{record}\n")
    else:
        write_parquet(path, [published_row(), record])
    with pytest.raises(DataError, match=f"1 of 2 records cannot be asked and scored: {message}"):
        load_benchmark(path)


def test_all_faults_of_a_file_are_in_one_list(tmp_path):
    rows = [("Who?", "Vell"), ("", "Vell"), ("Where?", ""), *[("When?", "")] * 12]
    path = tmp_path / "questions.csv"
    path.write_text("question,answer\nHow?,so,or so\n" + "".join(f"{q},{a}\n" for q, a in rows))
    with pytest.raises(DataError) as refusal:
        load_benchmark(path)
    said = str(refusal.value)
    assert said.startswith(f"{path}: 15 of 16 records cannot be asked and scored: row 1: 3 fields, and the ")
    assert "; row 3: no question; row 4: no answer; row 5: no answer; " in said
    assert "; and 5 more. Correct them" in said and "row 14" not in said


def test_a_test_split_without_answers_is_refused_with_the_likely_cause(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"_id": "5a", "question": "Who?", "answer": null}\n' * 2)
    with pytest.raises(DataError, match=r"2 of 2 records .*A test split is often published without"):
        load_benchmark(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("frage,answer", r"question or .*, but frage, answer: name .* by question_fields\.question="),
        ("question,antwort", r"or answers or .*, but question, antwort: .* question_fields\.answers="),
        ("frage,antwort", r"question or .*, but frage, antwort: "),
    ],
)
def test_a_field_of_an_unknown_name_is_asked_for(tmp_path, header, said):
    (tmp_path / "questions.csv").write_text(f"{header}\nWho?,Vell\n")
    write_parquet(tmp_path / "questions.parquet", [dict.fromkeys(header.split(","), "Vell")])
    for name in ("questions.csv", "questions.parquet"):
        with pytest.raises(DataError, match=rf"{name} has no field .*{said}"):
            load_benchmark(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chains.jsonl", b"", "holds no question"),
        ("test.parquet", b"not parquet", "cannot be read: not a parquet file, or damaged"),
        ("test.xlsx", b"a,b", "is no benchmark file: a benchmark is a csv"),
        ("absent.jsonl", None, "there is no benchmark file at"),
    ],
)
def test_a_file_that_is_no_benchmark_is_refused_by_name(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refusal:
        load_benchmark(tmp_path / name)
    assert name in str(refusal.value)


HUB_FILE = "hf://datasets/PeterJinGo/nq_hotpotqa_train/test.parquet"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_fault.cache_clear()
    yield
    hub_fault.cache_clear()


def test_a_hub_file_is_fetched_and_then_read_from_the_hubs_cache(hub_cache, tmp_path):
    content = write_parquet(tmp_path / "test.parquet", [published_row()]).read_bytes()
    with LoopbackHub({"PeterJinGo/nq_hotpotqa_train": {"test.parquet": content}}, port=NO_HUB):
        assert [question.key for question in load_benchmark(HUB_FILE)] == ["nq/test_0"]
    hub_fault.cache_clear()
    assert [question.key for question in load_benchmark(HUB_FILE)] == ["nq/test_0"]


def test_a_hub_file_out_of_reach_says_what_to_do(hub_cache):
    with pytest.raises(DataError, match=r"cannot be fetched.*HF_HUB_OFFLINE, or download it"):
        load_benchmark(HUB_FILE)


@pytest.mark.parametrize("url", ["hf://PeterJinGo/nq_hotpotqa_train", "hf://datasets/a/b/notes.txt"])
def test_a_hub_address_that_names_no_benchmark_file_is_refused(url):
    with pytest.raises(DataError, match="write hf://datasets/OWNER/NAME/FILE"):
        load_benchmark(url)


# --- one's own questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("exam.csv", "question,answer\nWho founded Orrin?,Vell\n"),
        ("exam.csv", "Question;Answer\r\nWho founded Orrin?;Vell\r\n"),
        ("exam.tsv", 'question\tanswers\nWho founded Orrin?\t["Vell"]\n'),
        ("exam.csv", "n,question,answers\n7,Who founded Orrin?,\"['Vell']\"\n"),
        ("exam.jsonl", '{"question": "Who founded Orrin?", "answers": ["Vell"]}\n\n'),
        ("exam.jsonl", '{"query": "Who founded Orrin?", "target": "Vell"}\n'),
        ("exam.json", '[{"question": "Who founded Orrin?", "golden_answers": ["Vell"]}]'),
        ("exam.json", '{"version": 1, "data": [{"problem": "Who founded Orrin?", "answer": "Vell"}]}'),
    ],
)
def test_a_table_of_questions_is_one_benchmark_named_like_the_file(tmp_path, name, content):
    (tmp_path / name).write_text(content, newline="")
    expected = BenchmarkQuestion("exam", "0", "Who founded Orrin?", ("Vell",), None)
    assert load_benchmark(tmp_path / name) == [expected]


def test_the_user_names_a_benchmark_and_its_fields(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my q=1.csv").write_text("frage,antwort,quelle\nWer?,Vell,doc-1\n")
    names = FieldNames(question="frage", answers="antwort", documents="quelle")
    expected = [BenchmarkQuestion("staff exam", "0", "Wer?", ("Vell",), None, ("doc-1",))]
    for place in (tmp_path / "my q=1.csv", "~/my q=1.csv"):
        assert load_benchmark(f"staff exam={place}", names) == expected
    assert load_benchmark(tmp_path / "my q=1.csv", names)[0].benchmark == "my q=1"


@pytest.mark.parametrize(
    ("answer", "targets"),
    [
        (1914, ("1914",)),
        (1914.0, ("1914",)),
        pytest.param(10**400, (str(10**400),), id="400 digits"),
        (["Vell", "", "Vell", "the Vell"], ("Vell", "the Vell")),
        ("[sic]", ("[sic]",)),
        ("['Vell' \"Ada's\"]", ("Vell", "Ada's")),
        ("['Vell', \"Ada's\"]", ("Vell", "Ada's")),
        ({"text": ["Vell"], "answer_start": [3]}, ("Vell",)),
        ({"value": "Vell", "aliases": ["Ada"], "normalized_aliases": ["ada"]}, ("Vell", "Ada", "ada")),
        ("Vell, Ada", ("Vell, Ada",)),
        (True, ("yes", "true")),
        ([False, "never"], ("no", "false", "never")),
        (float("nan"), ()),
        (float("inf"), ()),
        (1e-7, ("0.0000001",)),
        (Decimal("3.50"), ("3.5",)),
        (Decimal("NaN"), ()),
        (date(1914, 7, 28), ("1914-07-28", "28 July 1914", "July 28, 1914")),
        (datetime(1914, 7, 28), ("1914-07-28", "28 July 1914", "July 28, 1914")),
        (datetime(1914, 7, 28, 9, 30), ("1914-07-28 09:30",)),
        (time(9, 30), ("09:30",)),
        (b"Vell", ("Vell",)),
    ],
)
def test_accepted_answers_are_read_from_whatever_holds_them(answer, targets):
    assert read_row({"question": "Who?", "answer": answer}, FieldNames()).answers == targets


@pytest.mark.parametrize(
    ("answer", "targets", "note"),
    [
        ("1914.0", ("1914",), "1914.0 is read as 1914"),
        ("-5.0", ("-5",), "-5.0 is read as -5"),
        ("True", ("yes", "true"), "True is read as yes or true"),
        ("C++", ("C++",), "'C++' is compared as 'c'"),
        ("Vell", ("Vell",), None),
    ],
)
def test_what_becomes_of_an_answer_in_a_csv_is_said(tmp_path, answer, targets, note):
    (tmp_path / "exam.csv").write_text(f"question,answer\nWhich?,{answer}\n")
    (question,) = load_benchmark(tmp_path / "exam.csv")
    assert (question.targets, question.note) == (targets, note)


def test_typed_answers_of_a_parquet_are_read_by_their_value(tmp_path):
    columns = [
        pa.array([3.14], pa.float32()),
        pa.array([True]),
        pa.array([date(1914, 7, 28)]),
        pa.array([Decimal("2.50")]),
        pa.array(["1914.0"]),
    ]
    read = []
    for column in columns:
        pq.write_table(pa.table({"question": ["Which?"], "answer": column}), tmp_path / "exam.parquet")
        (question,) = load_benchmark(tmp_path / "exam.parquet")
        read.append((question.targets[0], question.note))
    assert read == [
        ("3.14", "'3.14' is compared as '314'"),
        ("yes", "True is read as yes or true"),
        ("1914-07-28", "1914-07-28 is read as 1914-07-28 or 28 July 1914 or July 28, 1914"),
        ("2.5", "2.50 is read as 2.5"),
        ("1914.0", "'1914.0' is compared as '19140'"),
    ]


def test_a_file_that_has_changed_is_read_again(tmp_path):
    path = tmp_path / "exam.csv"
    for answer in ("Vell", "Ada Quill"):
        path.write_text(f"question,answer\nWho?,{answer}\n")
        assert load_benchmark(path)[0].targets == (answer,)


# --- the seven benchmarks of the paper: published/ has a record of each, with all its fields ----------------

PUBLISHED = Path(__file__).parent / "published"
MOON = ("14 December 1972 UTC", "December 1972")
LEWIS = ("Sinclair Lewis", "Harry Sinclair Lewis", "harry sinclair lewis", "sinclair lewis")


@pytest.mark.parametrize(
    ("name", "key", "asks", "targets", "hop"),
    [
        ("nq_open/NQ-open.dev.jsonl", "NQ-open.dev/0", "when", MOON, None),
        ("triviaqa/unfiltered-web-dev.json", "unfiltered-web-dev/tc_1", "Which American", LEWIS, None),
        ("PopQA/test.tsv", "PopQA/4222362", "What is George", ("politician", "political leader"), None),
        ("hotpot_dev_fullwiki_v1.json", "hotpot_dev_fullwiki_v1/5a8b57f25", "Were Scott", ("yes",), None),
        ("2wikimultihopqa/dev.json", "2wikimultihopqa/8813f87c0", "Who is", ("Małgorzata Braunek",), None),
        (
            "musique/data/musique_ans_v1.0_dev.jsonl",
            "musique_ans_v1.0_dev/2hop__460946_294723",
            "Who is the spouse",
            ("Miquette Giraudy", "M. Giraudy"),
            2,
        ),
        ("bamboogle/test.csv", "bamboogle/0", "Who was president", ("james madison",), None),
    ],
)
def test_the_seven_benchmarks_are_read_as_published(name, key, asks, targets, hop):
    (question,) = load_benchmark(PUBLISHED / name)
    assert question.key.startswith(key) and question.question.startswith(asks)
    assert (question.targets, question.hop) == (targets, hop)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("triviaqa/unfiltered-web-dev.json", LEWIS),
        ("musique/data/musique_ans_v1.0_dev.jsonl", ("Miquette Giraudy", "M. Giraudy")),
    ],
)
def test_parquet_copies_on_the_hub_are_read_too(tmp_path, name, targets):
    records = json.loads((PUBLISHED / name).read_text())
    (row,) = records.get("Data", [records])
    path = tmp_path / "data" / "validation-00000-of-00001.parquet"
    path.parent.mkdir()
    (question,) = load_benchmark(write_parquet(path, [row]))
    assert question.benchmark == tmp_path.name
    assert (question.targets, question.question) == (targets, load_benchmark(PUBLISHED / name)[0].question)


@pytest.mark.parametrize("name", PAPER_BENCHMARKS)
def test_flashrags_copies_have_the_names_of_the_papers_table(tmp_path, name):
    split = "test" if name in ("nq", "triviaqa", "popqa", "bamboogle") else "dev"
    record = {"id": f"{split}_0", "question": "Who?", "golden_answers": ["Vell", "the Vell"], "metadata": {}}
    (tmp_path / name).mkdir()
    path = tmp_path / name / f"{split}.jsonl"
    path.write_text(json.dumps(record))
    assert load_benchmark(path) == [BenchmarkQuestion(name, f"{split}_0", "Who?", ("Vell", "the Vell"), None)]


# --- the choice ---------------------------------------------------------------------------------------------


def questions_of(counts: dict[str, int]) -> list[BenchmarkQuestion]:
    numbered = [(name, str(i)) for name, n in counts.items() for i in range(n)]
    return [BenchmarkQuestion(name, number, "Who?", ("Vell",), None) for name, number in numbered]


counts = st.dictionaries(st.sampled_from(["nq", "popqa", "musique"]), st.integers(1, 30), min_size=1)


@given(counts, st.integers(1, 20), st.integers(0, 20), st.integers(0, 3))
def test_a_choice_keeps_order_and_a_larger_one_holds_a_smaller_one(counts, few, more, seed):
    questions = questions_of(counts)
    chosen = choose_questions(questions, few, seed)
    expected = {name: min(n, few) for name, n in counts.items()}
    assert Counter(question.benchmark for question in chosen) == expected
    assert chosen == [question for question in questions if question in chosen]
    assert set(chosen) <= set(choose_questions(questions, few + more, seed))


def test_the_seed_decides_the_choice_and_no_limit_takes_all():
    questions = questions_of({"nq": 100})
    assert choose_questions(questions, 10, 0) != choose_questions(questions, 10, 1)
    assert choose_questions(questions, None, 0) == questions
