"""Demonstrations, read back with the parsers and scores of the rollouts."""

import re
from collections import Counter
from itertools import pairwise, product

import pytest

from data.demo_world import generate_world
from data.world_language import RELATIONS
from drzero.policies.demonstrations import make_demonstrations, world_retriever
from verl_ext.method.answers import extract_last_tag
from verl_ext.method.challenger_reward import has_integrity
from verl_ext.method.format_score import format_score
from verl_ext.method.prompts import MAX_TURNS, challenger_messages, solver_messages
from verl_ext.method.search_calls import parse_tool_calls
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

CHALLENGER = {1: 80, 2: 60, 3: 40, 4: 20}
SOLVER = {1: 40, 2: 40, 3: 20, 4: 10}


def make(world, seed=0):
    """Demonstrations of every hop, searched in the whole world."""
    find = world_retriever(world)
    return make_demonstrations(world, challenger=CHALLENGER, solver=SOLVER, retrieve=find, seed=seed)


@pytest.fixture(scope="module")
def world():
    return generate_world(0, "warmstart")


@pytest.fixture(scope="module")
def demonstrations(world):
    return make(world)


def of_kind(demonstrations, kind):
    return [demonstration for demonstration in demonstrations if demonstration["kind"] == kind]


def trajectory_of(demonstration):
    """The demonstration as a rollout would be recorded."""
    messages = demonstration["messages"][1:]
    turns = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            response = messages[i + 1]["content"] if i + 1 < len(messages) else None
            calls = [
                SearchCall(raw=call.raw, queries=call.queries, response=response)
                for call in parse_tool_calls(message["content"])
            ]
            turns.append(Turn(message["content"], tuple(calls)))
    return Trajectory(tuple(turns))


def question_and_answer(demonstration):
    last = demonstration["messages"][-1]["content"]
    question, answer = extract_last_tag(last, "question"), extract_last_tag(last, "answer")
    return question or "", answer or ""


def test_demonstrations_have_the_requested_counts_roles_and_searches(world, demonstrations):
    assert make(world) == demonstrations
    assert make(world, seed=1) != demonstrations
    for kind, counts in (("challenger", CHALLENGER), ("solver", SOLVER)):
        assert Counter(d["hop"] for d in of_kind(demonstrations, kind)) == counts
    for demonstration in demonstrations:
        roles = [message["role"] for message in demonstration["messages"]]
        assert roles[0] == "user" and roles[-1] == "assistant"
        assert roles[1:-1] == ["assistant", "tool"] * (len(roles) // 2 - 1)
        assert roles.count("assistant") <= MAX_TURNS
    for demonstration in of_kind(demonstrations, "challenger"):
        assert len(trajectory_of(demonstration).searches) == demonstration["hop"] - 1
    for demonstration in of_kind(demonstrations, "solver"):
        assert len(trajectory_of(demonstration).searches) == demonstration["hop"]


def test_prompts_are_short_and_questions_and_answers_are_right(demonstrations, world):
    for demonstration in of_kind(demonstrations, "challenger"):
        question, answer = question_and_answer(demonstration)
        assert has_integrity(question, answer)
        document = demonstration["messages"][0]["content"]
        score = format_score(trajectory_of(demonstration), document, demonstration["hop"], answer)
        assert score.total == 1, demonstration
    documents = [f"{passage.title}\n{passage.text}" for passage in world.passages.values()]
    challenger_prompts = {
        challenger_messages(document, hop, "short")[0]["content"]
        for document in documents
        for hop in range(1, 5)
    }
    solver_prompts = {solver_messages(chain.question, "short")[0]["content"] for chain in world.chains}
    for demonstration in demonstrations:
        prompts = challenger_prompts if demonstration["kind"] == "challenger" else solver_prompts
        assert demonstration["messages"][0]["content"] in prompts
    answers = {chain.question: chain.answer for chain in world.chains}
    for demonstration in of_kind(demonstrations, "solver"):
        question = demonstration["messages"][0]["content"].splitlines()[-1]
        assert question_and_answer(demonstration)[1] == answers[question]


def test_every_thought_is_backed_by_what_was_read_before(world, demonstrations):
    names = [entity.name for entity in world.entities.values()]
    for demonstration in demonstrations:
        read = ""
        for message in demonstration["messages"]:
            if message["role"] == "assistant":
                thought = extract_last_tag(message["content"], "think") or ""
                assert all(name in read for name in names if re.search(rf"\b{name}\b", thought)), thought
            read += message["content"]


def test_turns_are_short_and_passages_queries_and_questions_vary(demonstrations):
    words = [
        len(message["content"].split())
        for demonstration in demonstrations
        for message in demonstration["messages"]
        if message["role"] == "assistant"
    ]
    assert max(words) <= 50
    places = Counter()
    for demonstration in of_kind(demonstrations, "solver"):
        for call, response in pairwise(demonstration["messages"]):
            if response["role"] == "tool":
                query = parse_tool_calls(call["content"])[0].queries
                titles = [line[4:].split(":")[0] for line in response["content"].splitlines()]
                assert query
                places[next(i for i, title in enumerate(titles) if title in query[0])] += 1
    assert set(places) == {0, 1, 2}
    calls = [call for d in demonstrations for turn in trajectory_of(d).turns for call in turn.calls]
    questions = [call for call in calls if call.queries and call.queries[0].endswith("?")]
    assert 0.3 < len(questions) / len(calls) < 0.7
    openings = {question_and_answer(d)[0].split()[0] for d in of_kind(demonstrations, "challenger")}
    assert {"Who", "Which", "What", "In", "When"} <= openings


@pytest.mark.parametrize("seed", range(3))
def test_no_entity_of_the_run_split_occurs(seed, demonstrations):
    text = " ".join(message["content"] for d in demonstrations for message in d["messages"])
    words = set(re.findall(r"\w+", text))
    for entity in generate_world(seed, "run").entities.values():
        assert words.isdisjoint(word for word in entity.name.split() if entity.kind == "person")
        assert entity.name not in text


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_no_two_relations_of_an_evaluated_question_follow_each_other(world, demonstrations, share):
    evaluated = generate_world(0, "run", chain_share=share).chains
    pairs = {pair for chain in evaluated for pair in pairwise(chain.relations)}
    assert pairs.isdisjoint(pair for chain in world.chains for pair in pairwise(chain.relations))
    said = [RELATIONS[last].asks + RELATIONS[last].means for _, last in pairs]
    asked = [question_and_answer(d)[0] for d in of_kind(demonstrations, "challenger")]
    asked += [d["messages"][0]["content"].splitlines()[-1] for d in of_kind(demonstrations, "solver")]
    for (first, _), phrases in zip(pairs, said, strict=True):
        for phrase, inner in product(phrases, RELATIONS[first].means):
            words = re.escape(phrase.format(x=inner.format(x="NAME"))).replace("NAME", ".+")
            assert not [question for question in asked if re.search(words, question)], words


def test_the_run_split_is_refused():
    with pytest.raises(ValueError, match="'warmstart' split, got 'run'"):
        make(generate_world(0, "run"))


def test_too_few_chains_are_reported(world):
    with pytest.raises(ValueError, match="more chains_per_hop"):
        make_demonstrations(world, challenger={1: 101}, solver={}, retrieve=world_retriever(world))


def test_a_search_that_misses_the_needed_passage_is_not_shown(world):
    find = world_retriever(world)

    def forgetful(queries):
        """A search that knows no town."""
        towns = {world.name(town) for town in world.of_kind("town")}
        return [[passage for passage in found if passage["title"] not in towns] for found in find(queries)]

    demonstrations = make_demonstrations(world, challenger={}, solver={2: 20}, retrieve=forgetful)
    shown = " ".join(m["content"] for d in demonstrations for m in d["messages"] if m["role"] == "tool")
    assert len(demonstrations) == 20
    assert " is a town " not in shown
