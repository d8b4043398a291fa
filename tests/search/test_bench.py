"""The bench detects answers that belong to another query."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_parts import PASSAGES, SPEC

from bench import closed_loop
from bench.closed_loop import Load, Order
from bench.retrieval_truth import Truth
from bench.retrieval_world import QUERIES_FILE, Queries
from search.embedders import Embedder
from search.stored_index import passage_text

ASKED = {"what did Mara Tesk paint?": "Mara Tesk", "when did Mara Tesk finish it?": "Mara Tesk"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    records = (json.dumps({"title": title, "text": text}) for title, text in PASSAGES.items())
    (folder / "corpus.jsonl").write_text("\n".join(records))
    texts = [passage_text(title, text) for title, text in PASSAGES.items()]
    np.save(folder / "vectors.npy", Embedder(SPEC).encode_passages(texts))
    Queries(list(ASKED), list(ASKED.values())).write(folder / QUERIES_FILE)
    return folder


def answer_to(folder: Path, query: str) -> dict[str, Any]:
    """A server's answer, with scores."""
    cosines = np.load(folder / "vectors.npy") @ Embedder(SPEC).encode_queries([query])[0]
    best = np.argsort(-cosines)[: closed_loop.TOPK]
    hits = [{"document": {"title": list(PASSAGES)[place]}, "score": float(cosines[place])} for place in best]
    return {"result": [hits]}


def crossed(folder: Path, answers: list[dict[str, Any]]) -> int:
    """How many of the answers, each to the first query, the bench finds to belong to others."""
    load = Load(Order(0, 1, "same", 0, str(folder / QUERIES_FILE), ""))
    for answer in answers:
        load.record.asked.append(0)
        load._check(0, answer)
    return Truth(folder, SPEC.name).check(load.record.answers, 1).crossed


def test_an_answer_without_the_expected_passage_is_compared_with_the_vectors(world, monkeypatch):
    monkeypatch.setattr(closed_loop, "KEPT", 0)
    other = answer_to(world, "bank lending to farmers")
    # A title that stands in the query proves nothing.
    other["result"][0][-1]["document"]["title"] = "Mara"
    assert crossed(world, [answer_to(world, next(iter(ASKED))), other]) == 1


def test_answers_to_another_question_about_the_same_thing_are_detected_in_a_sample(world, monkeypatch):
    monkeypatch.setattr(closed_loop, "KEPT", 0)
    right, other = (answer_to(world, query) for query in ASKED)
    assert crossed(world, [right] * closed_loop.SAMPLED) == 0
    assert crossed(world, [other] * closed_loop.SAMPLED) == 1
