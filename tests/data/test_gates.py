"""The gates: what each refuses and accepts, and exact counts for planted faults."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_pairs import DOCUMENT, PASSAGE, pair, search

from bench.gates import ALL_FAULTS, count_caught, false_alarms, gates_for, replace_section
from bench.planted_faults import FAULTS, clean_pairs
from bench.planted_wording import ORDINARY
from data.benchmarks import BenchmarkQuestion
from data.contamination import DEFAULT_NGRAM, OverlapIndex, contamination
from data.duplicates import AcceptedQuestions, duplicates, measured_cosine, near_duplicates
from data.errors import DataError
from data.gates import Gates, GateSettings, evidence, hops, integrity
from data.pairs import Pair
from search.embedders import PACKAGED_EMBEDDER, Embedder, EmbedderSpec
from verl_ext.method.passages import format_passages

WORDS = st.sampled_from(["who", "what", "river", "town", "mayor", "of", "drosken", "galmir", "kelm", "born"])
QUESTIONS = st.lists(WORDS, min_size=1, max_size=14).map(" ".join)


@pytest.fixture(scope="module")
def embed():
    """The packaged embedder."""
    return Embedder(EmbedderSpec(PACKAGED_EMBEDDER, "cpu")).encode_queries


def letters(texts: Sequence[str]) -> np.ndarray:
    """An embedding by hand: counts of letters, as unit vectors."""
    counts = np.array(
        [[text.lower().count(letter) + 1e-6 for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
    )
    return counts / np.linalg.norm(counts, axis=1, keepdims=True)


# --- evidence ----------------------------------------------------------------------------------------------


NEITHER = "the answer is neither in the document nor in a retrieved passage"
NOTHING = "neither the document nor a retrieved passage has anything that the question names"
GUESS = "no text has some name of the question, so yes or no is a guess"
QUERIES = ("Zolvan", "Drosken")
ECHOED = search(queries=QUERIES, response=format_passages(QUERIES, [[PASSAGE], [PASSAGE]]))
FAILED = (search(failed=True), search(response="[1] Kelm: a region"))
RIVER = "On which river does Drosken lie?"


@pytest.mark.parametrize(
    ("question", "answer", "searches", "reason"),
    [
        (RIVER, "galmir.", (), None),
        (RIVER, "Tesk", (), NEITHER),
        (RIVER, "Galm", (), NEITHER),  # part of a word
        ("In which region does it rise?", "Tesk", (search(),), None),
        ("Where?", "Tesk", FAILED, NEITHER),
        ("Who leads Drosken?", "Zolvan", (ECHOED,), NEITHER),  # the query above its passages
        *(("Does Drosken lie on a river?", answer, (), None) for answer in ("yes", "No.")),
        *(("Does Drosken lie on the Tesk?", answer, (), GUESS) for answer in ("yes", "No.")),
        *(("Does Drosken lie on the Tesk?", answer, (search(),), None) for answer in ("yes", "No.")),
        ("What is the capital of France?", "Galmir", (), NOTHING),
        ("Which Droskener river is it?", "Galmir", (), None),
        ("on which river is the town?", "Galmir", (), None),
        ("挪威的首都是哪里？", "Galmir", (), None),
        ("Did Napoleon see the river of Drosken?", "Galmir", (), None),
    ],
)
def test_evidence_is_an_answer_and_the_questions_names_in_what_was_read(question, answer, searches, reason):
    found = evidence(pair(question, answer, *searches, hop=1 + bool(searches)))
    assert found == (reason and f"evidence: {reason}")


# --- hops --------------------------------------------------------------------------------------------------

TOWNS = ("Kelm", "Tesk", "Orrin", "Vell")


@pytest.mark.parametrize("hop", [1, 2, 3, 4])
def test_a_chain_of_h_hops_takes_h_minus_1_searches(hop):
    enough = [search(town) for town in TOWNS[: hop - 1]]
    assert hops(pair("In which region does it rise?", "Tesk", *enough, hop=hop)) is None
    if enough:
        assert (hops(pair("In which region?", "Tesk", *enough[1:], hop=hop)) or "").startswith("hops: ")


BAD_CALL = {"queries": None, "error": "the call is not JSON"}


@pytest.mark.parametrize(
    "changes", [{"response": None}, {"failed": True}, BAD_CALL, {"response": "No results."}]
)
def test_a_search_without_passages_is_no_hop(changes):
    assert hops(pair("In which region does it rise?", "Tesk", search(**changes), hop=2)) is not None


def test_an_answer_in_its_own_document_takes_one_hop():
    asked = ("On which river does it lie?", "the Galmir", search())
    assert hops(pair(*asked, hop=1)) is None
    assert hops(pair(*asked, hop=2)) == (
        "hops: the answer stands in the document that 2 hops should lead away from"
    )
    assert hops(pair("Is no town there?", "No", search(), hop=2, document="No town is there.")) is None


# --- integrity ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("Is the river of Drosken the Galmir?", "Galmir", "gives its answer away in plain words"),
        ("Where was he born?", "Drosken", "does not say who or what"),
        ("Who leads Drosken? When was it founded?", "Galmir", "asks twice"),
        ("Which river is it, " + "in this town " * 20 + "?", "Galmir", "has 65 words, at most 50"),
        ("On which river does Drosken lie?", "Yes", "yes or no answers a question for something else"),
        ("Drosken lies on a river.", "Galmir", "does not ask"),
        ("On which river does {town} lie?", "Galmir", "the question has a placeholder"),
        ("On which river does Drosken lie?", "[insert answer]", "the answer has a placeholder"),
        ("On which river does Drosken lie?", "the one two three four five six", "6 words, at most 5"),
        ("On which river does Drosken lie?", "?!", "has no words"),
        ("Which town lies on the Galmir?", "It's", "names nothing"),
    ],
)
def test_integrity_names_what_is_wrong(question, answer, reason):
    found = integrity(pair(question, answer), max_answer_words=5) or ""
    assert found.startswith("integrity: ") and reason in found


# --- contamination -----------------------------------------------------------------------------------------


LONG = "In which region does the river that flows past Drosken rise?"
RIVERS = ("Galmir", "Tesk", "Zolvan", "Kelm", "Vorn", "Nalk", "Brulm", "Hask")


def known(*questions: str, ngram: int = DEFAULT_NGRAM) -> OverlapIndex:
    """An index of benchmark questions whose answers differ from every pair's here."""
    return OverlapIndex(map(benchmark_question, questions), ngram)


def benchmark_question(text: str) -> BenchmarkQuestion:
    return BenchmarkQuestion("b", text, text, ("Xyzzy",), None)


@pytest.mark.parametrize("question", [LONG, LONG.upper(), "Say, " + LONG, LONG.replace("rise?", "begin?")])
def test_a_run_of_words_from_a_benchmark_is_contamination(question):
    found = contamination(pair(question), known(LONG))
    assert found and found.startswith("contamination: ")


def test_a_run_of_words_that_many_benchmark_questions_share_is_contamination_only_in_a_copy():
    asked = [f"In which region does the river that flows past the town of {name} rise?" for name in RIVERS]
    index = known(*asked)
    assert index.overlap(asked[0].replace(RIVERS[0], "Oslo")) is None
    assert index.overlap(f"Say, {asked[0]}") is not None


@pytest.mark.parametrize(
    ("question", "answer", "same"),
    [
        ("Who married the Vell of Oslo?", "the Tarmek", True),
        ("Whom did Vell (Oslo) take as a spouse?", "Tarmek", True),
        ("Who married the Vell of Oslo?", "Kelm", False),
        ("Who married the Vell of Rome?", "Tarmek", False),
        ("Is Vell of Oslo married?", "yes", False),
    ],
)
def test_a_benchmarks_fact_in_other_words_is_contamination(question, answer, same):
    index = OverlapIndex(
        [BenchmarkQuestion("b", "1", "Who is the spouse of Vell, mayor of Oslo?", ("Tarmek", "yes"), 2)]
    )
    found = contamination(pair(question, answer), index)
    assert ("asks for the same fact" in found if found else False) == same


@given(st.lists(QUESTIONS, max_size=6), QUESTIONS, st.integers(2, 9), st.randoms(use_true_random=False))
def test_case_and_punctuation_change_no_overlap(asked, question, ngram, rng):
    def dressed(text: str) -> str:
        return "".join(
            rng.choice((c, c.upper())) + (rng.choice(("", "!", "'")) if c != " " else " the ") for c in text
        )

    plain = known(*asked, ngram=ngram).overlap(question)
    assert known(*map(dressed, asked), ngram=ngram).overlap(question) == plain
    assert known(*asked, ngram=ngram).overlap(dressed(question)) == plain


@given(st.lists(QUESTIONS, max_size=5), QUESTIONS, st.integers(2, 9))
def test_overlap_of_few_questions_is_what_its_definition_says(asked, question, ngram):
    words = question.split()  # QUESTIONS are in normal form
    runs = [" ".join(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    shared = any(f" {run} " in f" {other} " for run in runs for other in asked)
    shorts = [(question, other) for other in asked if len(words) < ngram]
    shorts += [(other, question) for other in asked if len(other.split()) < ngram]
    expected = shared or any(f" {short} " in f" {other} " for short, other in shorts)
    assert (known(*asked, ngram=ngram).overlap(question) is not None) == expected


ZH = "奥林天文台是由谁在1904年建立的？"
JA = "1904年にオリン天文台を建てたのは誰ですか"


@pytest.mark.parametrize(
    ("known_question", "question", "answer", "found"),
    [
        (ZH, "请问奥林天文台是由谁在1904年建立的呢？", "Kelm", "has"),  # two words added
        (ZH, "奥林 天文台 是由谁 在1904年 建立的", "Kelm", "has"),
        (ZH, "谁于1904年创建了奥林天文台？", "Xyzzy", "same fact"),
        (ZH, "奥林天文台是由谁在1905年扩建的？", "Kelm", None),
        ("谁建立了奥林？", "请问谁建立了奥林？", "Kelm", "has"),
        (JA, "オリン天文台は1904年に誰が作りましたか", "Xyzzy", "same fact"),
        ("누가 오린천문대를 1904년에 세웠나?", "1904년 오린천문대는 누가 지었나?", "Xyzzy", "same fact"),
        ("누가 오린천문대를 1904년에 세웠나?", "오린도서관은 누가 1904년에 지었나?", "Xyzzy", None),
    ],
)
def test_questions_without_spaces_overlap_by_their_characters(known_question, question, answer, found):
    reason = contamination(pair(question, answer), known(known_question))
    assert (found in (reason or "")) if found else reason is None


def test_common_characters_are_no_contamination_but_a_copy_is():
    names = ("奥林", "德罗", "加米", "泰斯", "佐凡", "凯姆", "沃恩", "纳克")
    index = known(*(f"流经{name}城的那条河流发源于哪一个地区的山脉之中？" for name in names))
    assert index.overlap("流经罗马城的那条河流发源于哪一个地区的山脉之中？") is None
    assert index.overlap("请问流经奥林城的那条河流发源于哪一个地区的山脉之中？") is not None


@pytest.mark.parametrize(
    ("length", "reason"), [(75, None), (77, "integrity: the question has 51 words, at most 50 are allowed")]
)
def test_a_long_question_without_spaces_is_counted_by_its_characters(length, reason):
    assert integrity(pair("山" * (length - 1) + "吗？", "凯姆")) == reason
    assert integrity(pair("流经奥林城的是什么河？", "水" * 16)) == (
        "integrity: the answer has 11 words, at most 10 are allowed"
    )


# --- duplicates --------------------------------------------------------------------------------------------


def index_of(accepted: list[Any], candidate: Any, cosine: float = 0.9) -> AcceptedQuestions:
    index = AcceptedQuestions([*accepted, candidate], letters, cosine)
    for one in accepted:
        index.add(one)
    return index


@pytest.mark.parametrize(
    ("question", "other"),
    [
        ("On which river does Drosken lie?", "on which river does DROSKEN lie"),
        ("On which river does Drosken lie?", "On which river does the Drosken lie ?!"),
        (ZH, "奥林 天文台 是由谁 在 1904 年建立的"),
    ],
)
def test_the_same_words_are_a_duplicate_whatever_the_answer(question, other):
    again = pair(other, "Kelm", index=1)
    assert duplicates(again, index_of([pair(question)], again)) == "duplicates: prompt 0 asks the same"


OTHER, REPHRASED = "Which river flows past Drosken?", "Does Drosken lie on which river?"


def cosine_of(question: str) -> float:
    """The cosine of a question with every pair's own."""
    return float((letters([question]) @ letters([pair().question]).T).item())


@pytest.mark.parametrize(
    ("question", "answer", "document", "cosine", "same"),
    [
        (REPHRASED, "the galmir", DOCUMENT, 0.9, True),
        (REPHRASED, "Kelm", DOCUMENT, 0.9, True),
        (REPHRASED, "Kelm", "Another town", 0.9, False),
        (OTHER, "Galmir", DOCUMENT, cosine_of(OTHER) - 0.001, True),
        (OTHER, "Galmir", DOCUMENT, cosine_of(OTHER) + 0.001, False),
        # Answers without a common word need closer questions.
        (OTHER, "the river Galmir", DOCUMENT, cosine_of(OTHER) - 0.001, True),
        (OTHER, "Kelm", DOCUMENT, cosine_of(OTHER) - 0.001, False),
    ],
)
def test_close_questions_are_near_duplicates_with_one_answer_or_about_one_document(
    question, answer, document, cosine, same
):
    other = pair(question, answer, index=1, document=document)
    index = index_of([pair()], other, cosine)
    assert duplicates(other, index) is None
    assert (near_duplicates(other, index) or "").startswith("near_duplicates: prompt 0 ") == same


def test_only_accepted_questions_count():
    first, other = pair(), pair(REPHRASED, index=1)
    index = AcceptedQuestions([first, other], letters, 0.9)
    assert duplicates(other, index) is None and near_duplicates(other, index) is None


def test_only_questions_whose_answer_or_document_another_prompt_has_are_embedded():
    asked: list[str] = []

    def watch(texts: Sequence[str]) -> np.ndarray:
        asked.extend(texts)
        return letters(texts)

    def about(document: str, question: str, answer: str, index: int, sample: int = 0) -> Pair:
        return pair(question, answer, index=index, sample=sample, document=document)

    candidates = [
        *(about("one", "Who is it?", "a", 0), about("one", "Who was it?", "b", 0, sample=1)),
        *(about("two", "What is it?", "c", 1), about("three", "What was it?", "c", 2)),
        *(about("four", "When is it?", "d", 3), about("four", "When was it?", "e", 4)),
    ]
    AcceptedQuestions(candidates, watch, 0.9)
    assert asked == ["What is it?", "What was it?", "When is it?", "When was it?"]


def test_the_measured_cosine_separates_rephrasings_from_other_questions(embed):
    cosine = measured_cosine(embed, chains_per_hop=25)
    same, other = embed(["Who wrote The Zolvan Lamp?", "Who is the author of The Zolvan Lamp?"])
    strange = embed(["What is the length of the river that flows past Drosken?"])[0]
    assert same @ strange < cosine <= same @ other


# --- settings ----------------------------------------------------------------------------------------------


def test_near_duplicates_need_an_embedder():
    with pytest.raises(DataError, match="needs an embedder"):
        Gates(GateSettings())


NAMES = ("evidence", "hops", "integrity", "contamination", "duplicates", "near_duplicates")


@pytest.mark.parametrize("name", NAMES)
def test_a_gate_that_is_off_judges_nothing(name):
    settings = replace(GateSettings(near_duplicate_cosine=0.9), **{name: False})
    gates = Gates(settings, embed=letters, benchmark_questions=[benchmark_question("Who?")])
    assert {*gates.per_pair, *gates.across_pairs} == {*NAMES} - {name}


def test_every_reason_begins_with_the_name_of_its_gate():
    bad = pair("Drosken lies somewhere.", "Zolvan", index=1, hop=2)
    known = [benchmark_question(bad.question)]
    gates = Gates(GateSettings(near_duplicate_cosine=0.1), embed=letters, benchmark_questions=known)
    accepted = gates.accepted([bad, replace(bad, prompt_index=2)])
    accepted.add(replace(bad, prompt_index=2))
    reasons = gates.judge(bad) | gates.judge_across(bad, accepted)
    assert list(reasons) == [*gates.per_pair, *gates.across_pairs]
    assert all(reason.startswith(f"{name}: ") for name, reason in reasons.items())


# --- planted faults ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clean():
    return clean_pairs(seed=3, per_hop=5)


@pytest.fixture(scope="module")
def gates(clean, embed):
    return gates_for(clean, embed, cosine=0.86)


# What a gate judges by likeness is caught only in part; everything else always, or never.
LIKENESS = {
    ("evidence", "conversation of another prompt"),
    ("evidence", "question of another chain"),
    ("integrity", "last word of the answer in the question"),
    ("integrity", "answer reversed"),
    ("contamination", "one word replaced"),
}


@pytest.mark.parametrize(
    "fault",
    [f for f in ALL_FAULTS if f.gate != "near_duplicates" and (f.gate, f.name) not in LIKENESS],
    ids=lambda fault: f"{fault.gate}: {fault.name}",
)
def test_visible_faults_are_all_caught_and_others_never(fault, clean, gates):
    planted = fault.plant(clean, seed=0)
    assert planted
    caught = count_caught(gates, fault.gate, planted, clean.pairs)
    assert caught == (len(planted) if fault.visible else 0)


def test_most_rephrased_questions_are_caught(clean, gates):
    rephrased = [fault for fault in FAULTS if re.match(r"rephrased, \d", fault.name)]
    planted = [faulty for fault in rephrased for faulty in fault.plant(clean, 0)]
    assert len(planted) == 20
    assert count_caught(gates, "near_duplicates", planted, clean.pairs) >= 16


@pytest.mark.parametrize(
    ("name", "share"), [("rephrased, another answer", 0.35), ("rephrased, another form of the answer", 0.7)]
)
def test_rephrased_questions_are_caught_whatever_the_answer(name, share, clean, gates):
    (fault,) = (fault for fault in ALL_FAULTS if fault.name == name)
    planted = fault.plant(clean, 0)
    assert count_caught(gates, "near_duplicates", planted, clean.pairs) >= share * len(planted)


@pytest.mark.parametrize(("question", "answer"), ORDINARY)
def test_ordinary_questions_have_integrity(question, answer):
    assert integrity(pair(question, answer)) is None


def test_clean_pairs_pass_every_gate(clean, gates, embed):
    foreign = Gates(
        GateSettings(near_duplicate_cosine=0.86), embed=embed, benchmark_questions=[benchmark_question(LONG)]
    )
    assert set(false_alarms(clean, gates, foreign).values()) == {0}


def test_the_bench_replaces_its_own_section_only():
    readme = "## One\n\nfirst\n\n## Gates\n\nold\n\n## Two\n\nsecond\n"
    assert replace_section(readme, "## Gates", "new") == readme.replace("old", "new")
    assert replace_section("## One\n\nfirst\n", "## Gates", "new") == "## One\n\nfirst\n\n## Gates\n\nnew\n"
