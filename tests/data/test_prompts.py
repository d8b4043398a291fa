"""Challenger prompts: ratio, cycling, cutting, and the parquet contract as veRL's own dataset reads it."""

import random
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solver_rows import solver_row
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from data.challenger_prompts import (
    PrepareReport,
    cut_to_tokens,
    largest_remainder,
    prepare_challenger_prompts,
)
from data.demo_world import generate_world
from data.errors import DataError
from data.hop_ratio import assign_hops
from data.parquet_io import TRAINING_SCHEMA, check_training_rows, read_parquet, write_training_rows
from data.prose import prose_share, without_lead_in
from data.quality import quality_lines
from search.embedders import Embedder, EmbedderSpec
from search.indexing.chunking import Chunker, Chunking, document_of
from search.sources.document import Document
from verl_ext.method.passages import defuse
from verl_ext.method.prompts import challenger_messages


def word_tokenizer() -> Tokenizer:
    """One token a word: all that counting needs."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The packaged embedder's: what chunks and prompts are counted with."""
    return Embedder(EmbedderSpec("packaged-minilm", "cpu")).plain_tokenizer()


@cache
def small_chunker() -> Chunker:
    return Chunker(Embedder(EmbedderSpec("packaged-minilm", "cpu")), Chunking(64, 8))


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def prepare(tmp_path):
    def run(documents: int = 50, **changes: Any) -> PrepareReport:
        arguments: dict[str, Any] = {
            "rows": 20,
            "tokenizer": word_tokenizer(),
            "prompt_form": "short",
            "heldout_rows": 10,
            "seed": 0,
            "corpus_id": "tests",
            "out_dir": tmp_path / "out",
        }
        corpus = [(f"d{i}", f"Title {i}", f"Text number {i}.") for i in range(documents)]
        return prepare_challenger_prompts(changes.pop("corpus", corpus), **(arguments | changes))

    return run


def rows_of(path: Path | None) -> list[dict[str, Any]]:
    assert path
    return read_parquet(path).to_pylist()


def doc_ids(path: Path | None) -> list[str]:
    return [row["extra_info"]["doc_id"] for row in rows_of(path)]


# --- ratio -------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any))
def test_counts_sum_up_and_stay_within_one_of_their_share(total, weights):
    counts = largest_remainder(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count * sum(weights) - total * weight) < sum(weights)


def test_the_largest_remainders_get_the_rest():
    assert largest_remainder(8, (4, 3, 2, 1)) == [3, 2, 2, 1]  # shares 3.2, 2.4, 1.6, 0.8


@pytest.mark.parametrize(("total", "weights"), [(-1, (1,)), (1, ()), (1, (0, 0)), (1, (2, -1))])
def test_an_invalid_ratio_is_refused(total, weights):
    with pytest.raises(DataError, match="cannot split"):
        largest_remainder(total, weights)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 60), ratio=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any))
def test_rows_keep_the_ratio(prepare, rows, ratio):
    report = prepare(rows=rows, hop_ratio=ratio)
    hops = Counter(row["extra_info"]["hop"] for row in rows_of(report.train_path))
    expected = dict(enumerate(largest_remainder(rows, ratio), start=1))
    assert report.hop_counts == expected
    assert hops == {hop: count for hop, count in expected.items() if count}


def test_hops_are_shuffled_and_the_seed_decides_the_documents(prepare):
    hops = [row["extra_info"]["hop"] for row in rows_of(prepare(rows=40).train_path)]
    assert hops != sorted(hops)
    assert doc_ids(prepare(seed=0).train_path) != doc_ids(prepare(seed=1).train_path)


def test_of_documents_in_random_order_the_first_that_are_fit_are_taken_and_no_more_read(prepare):
    read = []

    def corpus() -> Iterator[tuple[str, str, str]]:
        for number in range(1000):
            read.append(number)
            empty, again = number % 10 == 3, number % 10 == 7
            yield f"d{number}", "Title", "" if empty else f"Text number {number - again}."

    report = prepare(corpus=corpus(), rows=20, heldout_rows=10, drawn_from=10**6)
    shown = {*doc_ids(report.train_path), *doc_ids(report.heldout_path)}
    fit = [number for number in read if number % 10 not in (3, 7)]
    assert shown == {f"d{number}" for number in fit} and len(fit) == 30
    assert (report.corpus_documents, report.read_documents) == (10**6, len(read))
    assert report.short.count + report.repeated.count == len(read) - 30
    (line, *_) = quality_lines(report, None, None)
    assert line.startswith(f"{len(read)} of 1,000,000 entries were drawn at random")


@pytest.mark.parametrize(
    ("ratio", "name"),
    [((4, 3, 2, 1), "zero_ratio4321"), ((1, 0), "zero_ratio10"), ((10, 3), "zero_ratio10-3")],
)
def test_files_are_named_after_the_ratio(prepare, ratio, name):
    report = prepare(hop_ratio=ratio)
    assert report.train_path.name == f"{name}.parquet"
    assert report.heldout_path and report.heldout_path.name == f"{name}_heldout.parquet"


# --- documents ---------------------------------------------------------------------------------------------


def test_a_large_corpus_gives_every_row_its_own_document(prepare):
    report = prepare(documents=200)
    used = doc_ids(report.train_path) + doc_ids(report.heldout_path)
    assert len(used) == len(set(used)) == 30
    assert report.cycles == 1 and report.heldout_is_disjoint
    assert "cycled" not in report.summary()


def test_a_small_corpus_is_cycled_evenly_and_the_report_says_so(prepare):
    report = prepare(documents=30, rows=50)
    assert report.cycles == 2.5
    assert Counter(Counter(doc_ids(report.train_path)).values()) == {2: 10, 3: 10}
    assert "cycled 2.50 times" in report.summary()
    assert set(doc_ids(report.train_path)).isdisjoint(doc_ids(report.heldout_path))
    report = prepare(documents=15)
    assert not report.heldout_is_disjoint and "trained on too" in report.summary()


def test_without_held_out_rows_or_documents_no_file_is_written(prepare, tmp_path):
    with pytest.raises(DataError, match="'tests' has no document to ask about"):
        prepare(documents=0)
    assert not (tmp_path / "out").exists()
    assert prepare(heldout_rows=0).heldout_path is None
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["zero_ratio4321.parquet"]


def test_every_document_is_equally_likely_to_be_drawn(prepare):
    reports = (prepare(20, rows=5, heldout_rows=0, seed=seed) for seed in range(150))
    drawn = Counter(doc for report in reports for doc in doc_ids(report.train_path))
    assert len(drawn) == 20
    assert min(drawn.values()) >= 15 and max(drawn.values()) <= 65  # 37.5 each on average, sd 5.3


def test_same_inputs_give_the_same_bytes(prepare, tmp_path):
    one, two = prepare(out_dir=tmp_path / "one"), prepare(out_dir=tmp_path / "two")
    assert one.train_path.read_bytes() == two.train_path.read_bytes()
    assert one.heldout_path and two.heldout_path
    assert one.heldout_path.read_bytes() == two.heldout_path.read_bytes()


# --- what is fit to be asked about -------------------------------------------------------------------------


def test_documents_below_the_floor_are_counted_and_not_asked_about(prepare):
    report = prepare(documents=0, corpus=[("a", "RF", "Radio frequency."), *LONG], min_document_tokens=8)
    assert set(doc_ids(report.train_path)) <= {doc for doc, _, _ in LONG}
    assert (report.short.count, report.short.examples) == (1, ["RF Radio frequency."])
    with pytest.raises(DataError, match=r"of 50 .* 50 have fewer than 9 tokens \(min_document_tokens\)"):
        prepare(min_document_tokens=9)


LISTING = "```\nfor level in levels:\n    log(level, 'Message no. %d', i)\nif level == 4:\n    stop()\n```"


LINES = "print the harbour of the town"
COMMENTED = """  onSend: (request, reply) => {
    // This hook will always be executed after those of the whole application
    done() // which is why it is called so late
  },
};
# Another one, of a shell or of Python, has other signs before it
/* and this is one as well, which ends where it began */"""


def test_what_is_no_sentences_is_counted_and_not_asked_about(prepare):
    corpus = [("code", "Levels", LISTING), ("see", "boot", "n. See {bounce}."), *LONG]
    report = prepare(documents=0, corpus=corpus, min_prose=0.15)
    assert set(doc_ids(report.train_path)) <= {doc for doc, _, _ in LONG} and report.unsaid.count == 2
    assert "2 of 22 entries with hardly a sentence" in next(quality_lines(report, None, None))
    with pytest.raises(DataError, match=r"of 2 .* 2 less than 15% .* \(min_prose\)\. Index longer texts"):
        prepare(documents=0, corpus=corpus[:2], min_prose=0.15)
    assert prepare(documents=0, corpus=corpus[:2]).unsaid.count == 0


@pytest.mark.parametrize(
    ("text", "is_prose"),
    [
        ("The harbour of `Orrin` is as old as the town, says {the map}.", True),
        ("東京は日本の首都である。人口は多い。", True),
        ("हिन्दी विश्व की एक प्रमुख भाषा है और भारत की राजभाषा है।", True),
        ("القاهرة هي عاصمة مصر، وهي أكبر مدينة فيها، فهل زرتها؟", True),
        (unicodedata.normalize("NFD", "Été après été, les élèves préféraient être à la mer."), True),
        (LISTING, False),
        (COMMENTED, False),
        (f"```js\n{COMMENTED}\n```", False),
        (COMMENTED.partition("};")[0] + "```\n\nThe harbour is old.", False),  # begins inside of a fence
        ("So the harbour of the old town is shown by\n\n```\n" + LINES, True),  # ends inside of one
        (f"{LINES}\n```\nThis harbour is as old as the town, which is why it is so small.", True),
        ("The harbour is called as follows in the old map.\n```js\nx()\n```\nNobody knows why it is.", True),
        ("| 'B' | unsigned_char |\n| 'b' | unsigned_char |\n| 'c' | char |", False),
        ("- [onReady](#onready)\n- [The onListen hook](#onlisten)\n- [Manage errors](#errors)", False),
    ],
)
def test_prose_is_what_has_words_in_a_row(text, is_prose):
    assert (prose_share(text) > 0.5) == is_prose and (prose_share(text) < 0.1) != is_prose


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It has two parts. The output is:", "It has two parts."),
        ("It has two parts, e.g. a head.\n\nSee e.g. this:\n\n**Note:**\n", "It has two parts, e.g. a head."),
        ("It has two parts.\n\n## The parts\n\nThey are:\n", "It has two parts."),
        ("There are two: a head and a tail.", "There are two: a head and a tail."),
        ("There are two:", "There are two:"),
        ("  Two parts.\n\n  It has. The output is:\n", "  Two parts.\n\n  It has."),
        ("Old.\n\n\nNew.\n\n# Why？", "Old.\n\n\nNew."),  # a heading is no sentence
    ],
)
def test_a_prompt_does_not_end_with_what_introduces_the_next_chunk(prepare, text, shown):
    assert without_lead_in(text) == shown
    rows = rows_of(prepare(documents=0, corpus=[("a", "Orrin", text)], rows=2).train_path)
    assert {row["extra_info"]["document"] for row in rows} == {f"Orrin\n{shown}"}


def test_texts_that_differ_in_white_space_alone_are_asked_about_once(prepare):
    twice = [(f"b{doc}", title, text.replace(" ", "\n  ")) for doc, title, text in LONG]
    report = prepare(documents=0, corpus=[*LONG, *twice], rows=60, heldout_rows=0)
    assert report.repeated.count == len(LONG) and report.train_documents == len(LONG)


LONG = [(f"d{n}", f"Title {n}", f"Orrin {n} is a town. It lies on the river Vell {n}.") for n in range(20)]


def test_no_document_is_asked_for_more_hops_than_its_chain_has(prepare):
    chains = {doc: 1 + n % 3 for n, (doc, _, _) in enumerate(LONG)}
    report = prepare(documents=0, corpus=LONG, rows=40, heldout_rows=0, chains=chains)
    for row in rows_of(report.train_path):
        assert row["extra_info"]["hop"] <= chains[row["extra_info"]["doc_id"]]
    assert report.wanted_hops == {1: 16, 2: 12, 3: 8, 4: 4}
    # The four of 4 hops have 3, as 12 or 14 rows can carry; nothing else changes.
    assert report.hop_counts == {1: 16, 2: 12, 3: 12, 4: 0}
    told = list(quality_lines(report, chains, None))
    assert told[0].startswith(
        "of 20 entries 13 begin a chain of 2 documents that name each other, 6 of 3, 0 "
    )
    assert "the hop ratio is adapted" in told[1] and "not 16 of 1 hop, 12 of 2 hops, 8 of 3" in told[1]


def towns(names: Iterable[str]) -> list[tuple[str, str, str]]:
    return [
        (name, name, f"Orrin {n} is a town. It lies on the river Vell {n}.") for n, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("ratio", "heldout_rows", "counts"),
    [
        ([4, 3, 2, 1], 0, [16, 12, 8, 4]),
        ([4, 3, 2, 1], 10, [16, 12, 8, 4]),
        ([1, 1, 1, 1], 10, [10, 10, 10, 10]),
        ([0, 1, 0, 2], 0, [0, 13, 7, 20]),  # 27 of four were wanted
        ([1], 0, [40]),
    ],
)
def test_documents_are_chosen_that_carry_the_hops_wanted(prepare, ratio, heldout_rows, counts):
    """Of 500 documents 60 begin chains, 20 each of two, three and four."""
    corpus = towns(f"d{n}" for n in range(500))
    chains = {doc: 2 + n % 3 if n < 60 else 1 for n, (doc, _, _) in enumerate(corpus)}
    report = prepare(corpus=corpus, rows=40, heldout_rows=heldout_rows, chains=chains, hop_ratio=ratio)
    assert list(report.hop_counts.values()) == counts
    assert len(set(doc_ids(report.train_path))) == 40


def test_prompts_are_spread_over_documents_before_their_chunks(prepare):
    names = [f"book{n % 2}#{n}-0123456789ab" for n in range(120)] + [f"note{n}" for n in range(8)]
    report = prepare(corpus=towns(names), rows=12, heldout_rows=0)
    shown = Counter(map(document_of, doc_ids(report.train_path)))
    assert shown == {"book0": 2, "book1": 2} | dict.fromkeys(names[120:], 1)


def test_where_the_corpus_carries_all_hops_the_rows_are_those_of_the_ratio_alone(prepare):
    as_published = prepare(documents=0, corpus=LONG).train_path.read_bytes()
    chains = dict.fromkeys((doc for doc, _, _ in LONG), 4)
    assert prepare(documents=0, corpus=LONG, chains=chains).train_path.read_bytes() == as_published


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=60))
def test_hops_are_given_to_rows_that_carry_them_and_only_ever_become_fewer(both):
    hops, carried = map(list, zip(*both, strict=True))
    given_hops = assign_hops(hops, carried, random.Random(0))
    assert all(1 <= hop <= most for hop, most in zip(given_hops, carried, strict=True))
    for most in (2, 3, 4):
        wanted = sum(hop >= most for hop in hops)
        able = sum(carry >= most for carry in carried)
        assert sum(hop >= most for hop in given_hops) <= wanted
        if able == len(hops):
            assert sum(hop >= most for hop in given_hops) == wanted


def test_rows_that_too_few_carry_are_shared_in_the_ratio():
    """Of 100 rows 24 carry four hops, and 60 are wanted: 30 of two, 20 of three, 10 of four."""
    hops, carried = [1] * 40 + [2] * 30 + [3] * 20 + [4] * 10, [4] * 24 + [1] * 76
    counts = Counter(assign_hops(hops, carried, random.Random(0)))
    assert counts == {1: 76, 2: 11, 3: 9, 4: 4}


# --- cutting -----------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(text=st.text(max_size=200), limit=st.integers(1, 40))
def test_a_cut_document_is_a_beginning_within_the_limit(tokenizer, text, limit):
    cut = cut_to_tokens(text, tokenizer, limit)
    assert text.startswith(cut)
    assert count(tokenizer, cut) <= limit


def test_a_long_document_is_cut_close_to_the_limit_and_after_a_sentence(tokenizer):
    text = " ".join(passage.text for passage in list(generate_world(0).passages.values())[:20])
    cut = cut_to_tokens(text, tokenizer, 256)
    assert 215 <= count(tokenizer, cut) <= 256
    assert cut.endswith(".") and text[len(cut)] == " "


@pytest.mark.parametrize("text", ["日本語の文章" * 200, "x1y2" * 400])
def test_text_without_spaces_is_cut_between_characters(tokenizer, text):
    assert 1 <= count(tokenizer, cut_to_tokens(text, tokenizer, 256)) <= 256
    assert cut_to_tokens("one two three four", word_tokenizer(), 2) == "one two"


def test_documents_in_rows_are_cut_after_a_sentence_and_named(prepare):
    long = ("long", "Title", "The quick brown fox runs. " * 200)
    report = prepare(documents=0, corpus=[long, *LONG[:1]], rows=2, heldout_rows=0, max_document_tokens=30)
    shown = {row["extra_info"]["doc_id"]: row["extra_info"]["document"] for row in rows_of(report.train_path)}
    assert shown["long"] == "Title\n" + "The quick brown fox runs. " * 4 + "The quick brown fox runs."
    assert report.cut_documents.count == 1


@given(
    st.lists(st.sampled_from(["Orrin is a town.", "It is old!", "<|im_end|> Who?"]), min_size=1, max_size=90)
)
def test_a_prompt_shows_every_chunk_whole(tokenizer, sentences):
    chunker = small_chunker()
    for chunk in chunker.split(Document("d", "Orrin", " ".join(sentences))):
        whole = defuse(f"{chunk.title}\n{chunk.text}".strip())
        assert cut_to_tokens(whole, tokenizer, 64) == whole


# --- parquet contract --------------------------------------------------------------------------------------


def test_rows_follow_the_contract(prepare):
    report = prepare(corpus=[(f"d{n}", "Title", f"a <|im_end|> {n}") for n in range(50)])
    for index, row in enumerate(rows_of(report.train_path)):
        extra = row["extra_info"]
        assert row["data_source"] == f"search_zero_{extra['hop']}"
        assert row["prompt"] == challenger_messages(extra["document"], extra["hop"], "short")
        assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": None}}
        assert (extra["index"], extra["split"], extra["question"]) == (index, "train", None)
        assert extra["tools_kwargs"]["search"]["create_kwargs"]
        assert (row["ability"], row["agent_name"]) == ("fact-reasoning", "search_agent")
        assert row["metadata"]["corpus_id"] == "tests" and len(row["metadata"]["document_sha256"]) == 64


def test_verls_dataset_reads_the_rows(prepare, smollm2_tokenizer, tmp_path):
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    report = prepare()
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


def test_rows_with_and_without_target_share_a_schema(prepare, tmp_path):
    rows = [rows_of(prepare().train_path)[0], solver_row(0, "train", "Vell")]
    write_training_rows(tmp_path / "mixed.parquet", rows)
    write_training_rows(tmp_path / "plain.parquet", rows[:1])
    assert rows_of(tmp_path / "mixed.parquet") == rows
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
def test_a_bad_row_is_named_with_its_fault(prepare, path, value, message):
    rows = rows_of(prepare().train_path)
    *parents, name = path.split(".")
    node = rows[7]
    for parent in parents:
        node = node[parent]
    node[name] = value
    with pytest.raises(DataError, match=rf"training row 7: .*{message}"):
        check_training_rows(rows)


def test_bad_rows_are_not_written(tmp_path):
    with pytest.raises(DataError, match="training row 0: missing data_source"):
        write_training_rows(tmp_path / "bad.parquet", [{}])
    with pytest.raises(DataError, match="no rows to write"):
        write_training_rows(tmp_path / "bad.parquet", [])
    assert list(tmp_path.iterdir()) == []


def damage_pages(path: Path) -> None:
    """Overwrite all of a parquet file but its footer, so that it still opens."""
    content = path.read_bytes()
    # The last eight bytes are the footer's length, little-endian, and the magic.
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:4] + b"\xff" * (footer - 4) + content[footer:])


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no parquet file at .*nowhere\.parquet: prepare the data"):
        read_parquet(tmp_path / "nowhere.parquet")
    path = tmp_path / "t.parquet"
    path.write_text("half a file")
    with pytest.raises(DataError, match=r"t\.parquet is not a parquet file"):
        read_parquet(path)
    pq.write_table(pa.table({"ability": [f"ability {i}" for i in range(100)]}), path)
    with pytest.raises(DataError, match=r"t\.parquet lacks the columns data_source.*it has ability"):
        read_parquet(path)
    assert len(read_parquet(path, ["ability"])) == 100
    damage_pages(path)
    with pytest.raises(DataError, match=r"t\.parquet is not a parquet file or is damaged"):
        read_parquet(path, ["ability"])


TRUTH = TRAINING_SCHEMA.field("reward_model").type


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("prompt", pa.array(["Who?"]), r"prompt is of type string, not list"),
        ("reward_model", pa.array([{"ground_truth": "Vell"}]), "of type string, not a struct"),
        ("extra_info", pa.array([{"index": "0", "hop": 1}]), r"index is of type string, not int64"),
        ("extra_info", pa.array([{"index": 0}]), r"document is missing; extra_info\.question is missing"),
        ("reward_model", pa.array([None], TRUTH), "reward_model is null in 1 rows"),
        ("reward_model", pa.array([{"ground_truth": None}], TRUTH), r"reward_model\.ground_truth is null"),
    ],
)
def test_a_column_of_another_shape_is_refused_with_file_and_field(tmp_path, name, column, message):
    pq.write_table(pa.table({name: column}), tmp_path / "foreign.parquet")
    with pytest.raises(DataError, match=rf"foreign\.parquet has the columns of training rows .*{message}"):
        read_parquet(tmp_path / "foreign.parquet", [name])


def test_values_written_in_wider_types_or_all_null_are_read(tmp_path):
    targets = pa.large_list(pa.large_string())
    truth = pa.struct({"style": pa.large_string(), "ground_truth": pa.struct({"target": targets})})
    rows = [{"style": "rule", "ground_truth": {"target": ["Vell"]}}]
    table = pa.table({"reward_model": pa.array(rows, truth), "ability": pa.nulls(1)})
    pq.write_table(table, tmp_path / "t.parquet", store_schema=True)
    assert read_parquet(tmp_path / "t.parquet", table.column_names).to_pylist() == table.to_pylist()
