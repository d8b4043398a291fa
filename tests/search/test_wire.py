"""The wire format against a client of Search-R1's kind, request and answer written out from its description.

Such a client posts the queries of a whole batch with `topk` and `return_scores`, and takes from each item of
`result` the document's `contents`: the first line is the title, the rest the text. Its corpora are JSON lines
of `id` and `contents`, with the title in quotes on the first line.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from search_parts import COLLECTION, PASSAGES, SPEC, NearEncoders

from search.chroma.store import Store, open_collection
from search.embedders import Embedder
from search.indexing.shards import build_index
from search.serving.app import RetrievalApp
from search.serving.metrics import Metrics
from search.serving.service import Retrieval

Parts = tuple[Store, Embedder]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """An open collection that was made from a corpus in Search-R1's form, and its embedder."""
    folder = tmp_path_factory.mktemp("wire")
    records = (
        json.dumps({"id": str(number), "contents": f'"{title}"\n{text}'})
        for number, (title, text) in enumerate(PASSAGES.items())
    )
    (folder / "corpus.jsonl").write_text("\n".join(records))
    build_index(folder / "corpus.jsonl", folder / "chroma", COLLECTION, SPEC)
    with open_collection(folder / "chroma", COLLECTION) as store:
        yield store, Embedder(SPEC)


def post(parts: Parts, body: bytes) -> httpx.Response:
    """The app's answer to a body as it is, bytes for bytes."""

    async def ask() -> httpx.Response:
        store, embedder = parts
        app = RetrievalApp(Retrieval(store, NearEncoders(embedder), Metrics()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})

    return asyncio.run(ask())


def passages_to_string(hits: list[dict[str, Any]]) -> str:
    """What such a client shows its model."""
    shown = ""
    for number, item in enumerate(hits, start=1):
        title, *lines = item["document"]["contents"].split("\n")
        text = "\n".join(lines)
        shown += f"Doc {number}(Title: {title}) {text}\n"
    return shown


def test_request_with_scores_is_answered_as_such_a_client_reads_it(parts):
    queries = b'["who painted The Blue Gate?", "caf\\u00e9 by the Vell"]'
    answer = post(parts, b'{"queries": %b, "topk": 2, "return_scores": true}' % queries).json()
    assert [len(hits) for hits in answer["result"]] == [2, 2]
    first = passages_to_string(answer["result"][0]).splitlines()[0]
    assert first == f"Doc 1(Title: Mara Tesk) {PASSAGES['Mara Tesk']}"


def test_answer_with_scores_written_out(parts):
    response = post(parts, b'{"queries": ["chemist violet dye"], "topk": 1, "return_scores": true}')
    assert response.headers["content-type"] == "application/json"
    text = PASSAGES["Nara Dunn"]
    before, score = response.text.removesuffix("}]]}").split(',"score":')
    assert before == (
        f'{{"result":[[{{"document":{{"title":"Nara Dunn","text":"{text}","contents":"Nara Dunn\\n{text}",'
        f'"id":"10"}}'
    )
    assert 0.3 < float(score) <= 1.0


def test_answer_without_scores_written_out(parts):
    text = PASSAGES["Nara Dunn"]
    response = post(parts, b'{"queries": ["chemist violet dye"], "topk": 1, "return_scores": false}')
    assert response.text == (
        f'{{"result":[[{{"title":"Nara Dunn","text":"{text}","contents":"Nara Dunn\\n{text}","id":"10"}}]]}}'
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"return_scores": false, "topk": 3, "queries": ["salt"]}',
        b'{"queries": ["salt"], "topk": 3}',
        b'{"queries": ["salt"]}',
        b'{"queries": ["salt"], "topk": null}',
        b'{"queries": ["salt"], "retriever": "e5"}',
    ],
    ids=["other order", "no return_scores", "only queries", "topk null", "a field of somebody else's"],
)
def test_order_is_free_and_all_but_the_queries_may_be_left_out(parts, body):
    expected = post(parts, b'{"queries": ["salt"], "topk": 3, "return_scores": false}').json()
    assert post(parts, body).json() == expected
    assert len(expected["result"][0]) == 3
