"""An attempt as an answer: its state, its sources, and the sentence that holds the evidence."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drzero.agent.answer import Source, answer_of, sources_of
from verl_ext.clients.solver_agent import SolverAttempt
from verl_ext.method.answers import contains_answer
from verl_ext.method.search_calls import refuse_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

VELL = "Orrin is a harbour town. It lies on the river Vell, near Sarn. Dr. Tesk was born there."


def attempt(answer, *, failure=None, calls=()):
    trajectory = Trajectory((Turn("", tuple(calls)),))
    return SolverAttempt(trajectory, failure is None, failure, 70, 9, len(calls), 1.234, answer)


def passage(text, title="Orrin", key="1"):
    return Source(key, title, text, "query")


def evidence(answer, text, title="Orrin"):
    [source] = answer_of("Where?", attempt(answer), [passage(text, title)]).sources
    return source.evidence


@pytest.mark.parametrize(
    ("answer", "failure", "found", "state"),
    [
        ("Vell", None, [VELL], "supported"),
        ("Marl", None, [VELL], "unsupported"),
        ("Vell", None, [], "unsupported"),
        (None, None, [VELL], "none"),
        ("", None, [VELL], "none"),
        (None, "a search failed: away", [VELL], "failed"),
        ("Vell", "late", [VELL], "failed"),
        # Every other passage has these words.
        ("yes", None, ["They said yes."], "unsupported"),
        ("No Man's Land", None, ["It is No Man's Land."], "supported"),
        # Nothing that could be found.
        ("?!", None, ["What?!"], "unsupported"),
        ("the", None, ["the town"], "unsupported"),
    ],
)
def test_an_answer_is_supported_only_by_a_passage_that_has_its_words(answer, failure, found, state):
    assert answer_of("Where?", attempt(answer, failure=failure), map(passage, found)).state == state


@pytest.mark.parametrize(
    ("answer", "text", "sentence"),
    [
        ("Vell", VELL, "It lies on the river Vell, near Sarn."),
        ("Tesk", VELL, "Dr. Tesk was born there."),
        ("Vel", VELL, None),
        # Over the end of a sentence the whole passage is the evidence.
        ("Sarn. Dr. Tesk", VELL, VELL),
        ("1,914", "It was 1914. Later came 1915.", "It was 1914."),
        ("U.S.", "It left the U.S. in May", "It left the U.S. in May"),
        # The first of two.
        ("Vell", "The Vell is long. The Vell is cold.", "The Vell is long."),
        ("東京", "京都は古い。首都は東京です。川がある。", "首都は東京です。"),
        ("กรุงเทพ", "เมืองหลวงคือกรุงเทพมหานคร", "เมืองหลวงคือกรุงเทพมหานคร"),
        ("Vell", "", None),
    ],
)
def test_the_evidence_is_the_first_sentence_with_the_answer(answer, text, sentence):
    assert evidence(answer, text) == sentence


def test_a_title_is_evidence_where_no_sentence_is():
    assert evidence("Vell", "It is a river.", title="The Vell") == "The Vell"
    assert evidence("Vell", "The Vell is a river.", title="The Vell") == "The Vell is a river."


def test_sources_with_evidence_come_first_and_each_passage_once():
    found = [Source("1", "a", "Nothing.", "q1"), Source("2", "b", "The Vell.", "q1")]
    again = [Source("2", "b", "The Vell.", "q2"), Source("3", "b", "The Vell.", "q2")]
    answer = answer_of("Where?", attempt("Vell"), [*found, *again])
    assert [(one.id, one.query) for one in answer.sources] == [("2", "q1"), ("3", "q2"), ("1", "q1")]


def test_the_passages_of_a_service_are_taken_as_they_come():
    theirs = [
        {"title": "Orrin", "text": "A town.", "contents": "Orrin\nA town.", "id": "7"},
        {"contents": "x\ny"},
    ]
    assert list(sources_of(["one", "two"], [theirs, []])) == [
        Source("7", "Orrin", "A town.", "one"),
        Source("", "", "x\ny", "one"),
    ]


def test_searches_are_the_queries_that_were_answered():
    calls = [
        SearchCall("", ("a", "b"), "found"),
        SearchCall("", None, "no such tool"),
        SearchCall("", ("late",), failed=True),
        refuse_call(SearchCall("", ("too long",)), "too long"),
        SearchCall("", ("last turn",)),
    ]
    assert answer_of("Where?", attempt("Vell", calls=calls), []).searches == ["a", "b"]


def test_the_json_form_has_all_and_can_be_written():
    hostile = passage('<script>alert("Vell")</script>\x1b[31m\u202e', title="Vell\x00")
    record = answer_of("Where?", attempt("Vell"), [hostile]).to_dict()
    assert json.loads(json.dumps(record)) == record
    assert record == {
        "question": "Where?",
        "answer": "Vell",
        "state": "supported",
        "failure": None,
        "sources": [vars(hostile) | {"evidence": hostile.text}],
        "searches": [],
        "tokens_in": 70,
        "tokens_out": 9,
        "seconds": 1.23,
    }


TEXT = st.text(st.sampled_from("ab 1.,!?。の\n\"')é\u200b"), max_size=40)


@given(TEXT, TEXT, TEXT)
@example("a", "a.。 a", "")
@example("。", "。1", "")
def test_evidence_is_a_part_that_has_the_answer_and_is_missed_in_none(answer, text, title):
    found = evidence(answer, text, title)
    anywhere = contains_answer(text, answer) or contains_answer(title, answer)
    assert (found is not None) == anywhere
    if found is not None:
        assert contains_answer(found, answer) and (found in text or found == title)
