"""The scripted teacher over an index of made-up packages: its questions have answers, its lies are known."""

import json
from collections import Counter
from functools import cache

import pytest
from fastapi.testclient import TestClient
from made_pairs import prompt, record

from bench.lies import main
from bench.rewarded import judge
from bench.teacher import Teacher
from data.gates import evidence, hops, integrity
from data.pairs import pair_of
from drzero.ops.records import append_json_lines, read_json_lines
from examples.one_question import EMBEDDER, Player
from examples.package_corpus import Package
from search.chroma.store import open_collection
from search.embedders import Embedder
from search.indexing.shards import build_index
from verl_ext.method.answers import contains_answer
from verl_ext.method.format_score import retrieved_passages
from verl_ext.method.prompts import challenger_messages, solver_messages
from verl_ext.method.solver_reward import solver_answer
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

NAMES = ("galmir", "sendra", "ulvit", "pelgoth", "marnes", "ysker", "tolvane", "brisfal")
PEOPLE = (
    "Kim Davies",
    "Ada Quill",
    "Ivo Brand",
    "Nara Dunn",
    "Mara Tesk",
    "Jo A. Vell",
    "Per Lund",
    "Lu Kelm",
)
LICENCES = ("MIT", "ISC", "BSD-2-Clause", "Apache-2.0", "MPL-2.0", "PSF-2.0", "MIT-0", "0BSD")


def packages():
    """Eight packages: each needs the one after it, and the last needs none."""
    for number, (name, author, licence) in enumerate(zip(NAMES, PEOPLE, LICENCES, strict=True)):
        facts = {"author": author, "licence": licence}
        facts |= {"python": f"3.{number + 2}", "release": f"1.{number}.7"}
        facts |= {"requires": NAMES[number + 1]} if number + 1 < len(NAMES) else {}
        yield Package(name, name, ("It reads the gauges of a river.",), facts)


DOCUMENTS = [{"id": package.id, "title": package.title, "text": package.text()} for package in packages()]


@pytest.fixture(scope="module")
def searching(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in DOCUMENTS))
    build_index(folder / "corpus.jsonl", folder / "chromadb", "corpus", EMBEDDER)
    with open_collection(folder / "chromadb", "corpus") as index:
        yield cache(Player(None, None, Embedder(EMBEDDER), index).answer)


def played(teacher, searching, messages, seed):
    """A conversation, as an endpoint's client plays it."""
    messages, turns = [dict(message) for message in messages], []
    while not turns or turns[-1].calls:
        answer = teacher.post("/v1/chat/completions", json={"messages": messages, "seed": seed}).json()
        messages.append(message := answer["choices"][0]["message"])
        asked = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        calls = tuple(searching(SearchCall("raw", tuple(one["query_list"]))) for one in asked)
        messages += [{"role": "tool", "content": call.response} for call in calls]
        turns.append(Turn(message["content"], calls))
    return Trajectory(tuple(turns))


def asked(teacher, searching, hop, form="short", seed=1):
    """The pair that it makes of each document that leads far enough."""
    for document in DOCUMENTS[: len(NAMES) + 1 - hop]:
        shown = f"{document['title']}\n{document['text']}"
        messages = challenger_messages(shown, hop, form)
        trajectory = played(teacher, searching, messages, seed)
        yield pair_of(record(*trajectory.turns), prompt(0, hop, shown))


@pytest.mark.parametrize("form", ["short", "full"])
@pytest.mark.parametrize("hop", [1, 2, 3])
def test_its_questions_pass_the_gates_and_its_solver_answers_them(searching, hop, form):
    teacher, wordings, searches = TestClient(Teacher().app()), set(), []
    for pair in asked(teacher, searching, hop, form):
        assert [gate(pair) for gate in (evidence, hops, integrity)] == [None] * 3, pair.question
        attempt = played(teacher, searching, solver_messages(pair.question, form), seed=2)
        assert solver_answer(attempt) == pair.answer
        searches.append(len(attempt.searches))
        wordings.add(pair.question.replace(pair.document.split()[0], "it"))
    # In so small a corpus a search may find the next package as well.
    assert len(wordings) > 4 and 1 <= min(searches) <= max(searches) == hop


@pytest.mark.parametrize("hop", [1, 2])
def test_it_lies_in_two_ways_and_says_where(searching, hop, tmp_path):
    teacher = TestClient(Teacher(lies=1.0, answers=tmp_path / "answers.jsonl").app())
    pairs = [pair for seed in range(3) for pair in asked(teacher, searching, hop, seed=seed)]
    told = read_json_lines(tmp_path / "answers.jsonl")
    assert [(one["question"], one["answer"]) for one in told] == [(p.question, p.answer) for p in pairs]
    for pair, one in zip(pairs, told, strict=True):
        passages = "\n".join([pair.document, *retrieved_passages(pair.trajectory)])
        assert contains_answer(passages, one["right"]) and one["answer"] != one["right"]
        assert contains_answer(passages, one["answer"]) == (one["lie"] == "passage")
    kinds = Counter(one["lie"] for one in told)
    assert min(kinds["passage"], kinds["invented"]) >= len(told) / 4


def test_it_lies_in_the_share_that_was_asked_for_in_both_roles(searching, tmp_path):
    teacher = TestClient(Teacher(lies=0.25, answers=tmp_path / "answers.jsonl").app())
    for seed in range(12):
        for pair in asked(teacher, searching, 1, seed=seed):
            played(teacher, searching, solver_messages(pair.question, "short"), seed)
    told = read_json_lines(tmp_path / "answers.jsonl")
    for role in ("challenger", "solver"):
        lies = [one["lie"] is not None for one in told if one["role"] == role]
        assert 0.15 < sum(lies) / len(lies) < 0.35


@pytest.mark.parametrize(
    "said", ["Who are you?", "Write a 1-hop question from this document.\n<document>\nA\n</document>"]
)
def test_a_prompt_that_it_cannot_play_is_refused(said):
    body = {"messages": [{"role": "user", "content": said}]}
    answer = TestClient(Teacher().app()).post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "the teacher" in answer.json()["error"]["message"]


def test_a_question_that_it_cannot_read_gets_an_answer_that_says_so(searching):
    attempt = played(TestClient(Teacher().app()), searching, solver_messages("Who are you?", "full"), seed=1)
    assert solver_answer(attempt) == "unknown"


def test_the_fate_of_each_lie_is_counted(tmp_path, capsys):
    fates = [
        ("passage", 1, True, [], 0),
        ("passage", 1, True, [], 2),
        ("invented", 2, False, ["evidence: none", "hops: few"], 0),
        (None, 2, True, [], 3),
        (None, 2, False, ["hops: few"], 3),
    ]
    for number, (lie, hop, accepted, reasons, right) in enumerate(fates):
        said = {"question": f"Who wrote {number}?", "answer": "Kim Davies"}
        append_json_lines(tmp_path / "answers.jsonl", said | {"role": "challenger", "lie": lie})
        row = {"hop": hop, "accepted": accepted, "reasons": reasons, "k": right}
        append_json_lines(tmp_path / "questions.jsonl", said | row)
    main([str(tmp_path / "answers.jsonl"), str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| true | 2 | 2 | 1 hops | 1 | 0 |",
        "| false, in a passage | 1 | 2 | 0 | 2 | 1 |",
        "| false, invented | 2 | 1 | 1 evidence, 1 hops | 0 | 0 |",
    ]


@pytest.mark.parametrize(
    ("question", "answer", "verdict"),
    [
        ("Who wrote idna?", "kim davies", "right"),
        ("Who wrote idna?", "Alex Grönholm", "wrong"),
        ("Who wrote the first package that anyio requires?", "Kim Davies", "right"),
        ("Who wrote the first package that idna requires?", "Kim Davies", "wrong"),  # which requires none
        ("Who wrote the last package that anyio requires?", "Kim Davies", "unread"),
        ("Who wrote the moon?", "Kim Davies", "unread"),
    ],
)
def test_a_rewarded_answer_is_judged_by_what_the_corpus_states(question, answer, verdict):
    facts = {"anyio": {"author": "Alex Grönholm", "requires": "idna"}, "idna": {"author": "Kim Davies"}}
    assert judge(question, answer, facts) == verdict
