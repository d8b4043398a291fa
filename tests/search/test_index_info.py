"""A retrieval service describes its index to clients with the token, over loopback."""

import pytest
from conftest import unused_port
from scripted_search import retrieve
from search_parts import COLLECTION, PASSAGES, SPEC, build_collection, serving_with_token

from drzero.recipe.fingerprint import fingerprint_collection
from search.chroma.sharded_store import chroma_index
from search.client import SearchRequestError
from search.index_info import ServiceAway, ServiceUnusable, ask_index
from search.server import main
from search.wire import TOKEN_VARIABLE

TOKEN = "sesame-4711"


@pytest.fixture(scope="module")
def chroma(tmp_path_factory):
    return build_collection(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(chroma):
    """A service that asks for a token."""
    with serving_with_token(chroma, TOKEN) as url:
        yield url


def test_with_the_token_it_describes_its_index_as_whoever_opens_it_would(chroma, url, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    served = ask_index(url)
    assert (served.collection, served.embedder, served.documents) == (COLLECTION, SPEC.name, len(PASSAGES))
    assert served.fingerprint == fingerprint_collection(chroma_index([chroma], COLLECTION))


@pytest.mark.parametrize(
    ("token", "advice"),
    [("", "set RETRIEVAL_TOKEN to its token"), ("wrong-0815", "another than the one there")],
)
def test_without_its_token_neither_the_index_nor_a_passage_is_shown(url, monkeypatch, token, advice):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ServiceUnusable, match=advice) as asked:
        ask_index(url)
    with pytest.raises(SearchRequestError, match=f"HTTP 401.*{advice}") as searched:
        retrieve(url, ["salt"])
    for said in (str(asked.value), str(searched.value)):
        assert TOKEN not in said and "wrong-0815" not in said


def test_what_does_not_answer_is_away_and_named():
    nobody = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(ServiceAway, match=f"no retrieval service answers at {nobody}"):
        ask_index(nobody)


def test_another_server_is_no_retrieval_service(start_peer):
    with pytest.raises(ServiceUnusable, match=r"is no retrieval service .* HTTP 404"):
        ask_index(start_peer("/retrieve", lambda _: {}).url)


def test_beyond_this_machine_a_server_listens_with_a_token_only(monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(SystemExit) as refused:
        main(["--chroma-path", "none", "--collection", COLLECTION, "--host", "0.0.0.0"])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "--host 0.0.0.0: other machines may reach it there, so set RETRIEVAL_TOKEN" in said
