"""Fingerprints: content, whatever its place and time; any change shows."""

import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drzero.recipe.fingerprint import fingerprint, fingerprint_collection, fingerprint_model
from search.chroma.sharded_store import chroma_index
from search.embedders import EmbedderSpec
from search.errors import StoreError
from search.indexing.shards import build_index

names = st.text("abc", min_size=1, max_size=3)
trees = st.dictionaries(st.tuples(names, names).map("/".join) | names.map("x".__add__), st.binary(max_size=8))


def of_tree(tree):
    with TemporaryDirectory() as folder:
        for name, content in tree.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        return fingerprint(Path(folder))


@given(st.binary())
def test_a_files_fingerprint_is_its_sha256(content):
    with TemporaryDirectory() as folder:
        (Path(folder) / "file").write_bytes(content)
        assert fingerprint(Path(folder) / "file") == hashlib.sha256(content).hexdigest()


@given(trees, trees)
@settings(deadline=None)
def test_folders_have_the_same_fingerprint_exactly_when_names_and_contents_are_the_same(one, other):
    assert (of_tree(one) == of_tree(other)) == (one == other)


def test_the_time_of_writing_does_not_matter(tmp_path):
    (tmp_path / "file").write_text("same")
    before = fingerprint(tmp_path)
    os.utime(tmp_path / "file", (0, 0))
    assert fingerprint(tmp_path) == before


def test_a_model_folder_goes_by_content_and_one_that_is_not_there_has_no_fingerprint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint_model(str(tmp_path)) == fingerprint(tmp_path)
    with pytest.raises(FileNotFoundError):
        fingerprint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no model at"):
        fingerprint_model(str(tmp_path / "models" / "none"))


def test_a_hub_model_goes_by_its_id_and_the_revision_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    repository = tmp_path / "models--some--model"
    (repository / "snapshots" / "abc123").mkdir(parents=True)
    (repository / "snapshots" / "abc123" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert fingerprint_model("some/model") == "some/model@abc123"
    assert fingerprint_model("some/other") == "some/other"


def build(folder, text):
    folder.mkdir()
    (folder / "corpus.jsonl").write_text(json.dumps({"id": "1", "title": "Orrin", "text": text}) + "\n")
    embedder = EmbedderSpec("packaged-minilm", "cpu")
    build_index(folder / "corpus.jsonl", folder / "chromadb", "corpus", embedder)
    return folder / "chromadb"


def test_an_index_goes_by_the_documents_it_was_built_from_and_must_be_there(tmp_path):
    one, again, other = (
        fingerprint_collection(chroma_index([build(tmp_path / name, text)], "corpus"))
        for name, text in (("a", "A harbour town."), ("b", "A harbour town."), ("c", "A market town."))
    )
    assert one == again != other
    with pytest.raises(StoreError, match="no Chroma folder"):
        fingerprint_collection(chroma_index([tmp_path], "corpus"))
