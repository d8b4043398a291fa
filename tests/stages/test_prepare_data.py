"""The prepare-data stage: what it announces, which documents no prompt shows, and when it is not begun."""

import json
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from data.errors import DataError
from data.parquet_io import read_parquet
from drzero.cli import main
from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.errors import OutOfTime
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.preflight.inputs import held_out_documents
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage
from drzero.stages import prepare_data
from drzero.stages.prepare_data import until_the_stop_time
from search.chroma.content import check_content
from search.chroma.location import connect
from search.chroma.store import get_collection, iter_documents, open_collection
from search.embedders import Embedder, EmbedderSpec
from search.indexing.adopt import is_foreign
from search.indexing.chunking import document_of


def arguments(prepared, corpus):
    """The command from a corpus file into an empty folder."""
    source = f"source={prepared.corpus / 'corpus.jsonl'}"
    return [*prepared.overrides(corpus), f"paths.corpus={corpus}", source, "rows=8", "heldout_rows=2"]


def documents_shown(corpus):
    """The ids of the documents of both prompts files."""
    files = (corpus / "data").glob("*.parquet")
    extras = (extra for file in files for extra in read_parquet(file)["extra_info"].to_pylist())
    return {document_of(extra["doc_id"]) for extra in extras}


def test_the_index_is_announced_then_the_prompts_and_none_shows_an_evaluated_document(
    prepared, tmp_path, monkeypatch
):
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "announced.jsonl"))
    corpus = tmp_path / "corpus"
    evaluated = [document["id"] for document in prepared.documents[::2]]
    chain = {"id": "a", "hop": 2, "question": "Who came?", "answer": "Vell", "doc_ids": evaluated}
    (tmp_path / "questions.jsonl").write_text(json.dumps(chain))
    # Chunks as small as they can be: most documents have several.
    chosen = [f"hold_out=[{tmp_path / 'questions.jsonl'}]", "rows=200", "min_document_tokens=0"]
    chunks = ["indexing.chunk_tokens=32", "indexing.chunk_overlap=4"]
    assert main(["prepare-data", *arguments(prepared, corpus), *chunks, *chosen]) == 0
    found = [key for key, *_ in iter_documents(corpus / "chromadb", "corpus")]
    assert documents_shown(corpus) == {document["id"] for document in prepared.documents[1::2]}
    assert {document_of(key) for key in found} == {document["id"] for document in prepared.documents}
    assert len(found) > len(prepared.documents)
    paths = [
        Path(json.loads(line)["path"]) for line in (tmp_path / "announced.jsonl").read_text().splitlines()
    ]
    prompts = [corpus / "data" / f"zero_ratio4321{part}.parquet" for part in ("", "_heldout")]
    assert paths == [corpus / "chromadb", *prompts, corpus / "data" / "quality.json"] and all(
        path.exists() for path in paths
    )
    assert not (corpus / "models").exists()  # another model was named, which it does not make


def test_a_mapped_table_is_indexed_and_its_quality_is_told_and_written(prepared, tmp_path, capsys):
    rows = [{"headword": one["title"], "definition": one["text"]} for one in prepared.documents[:12]]
    rows += [{"headword": "RF", "definition": "Radio."}, {"headword": "none", "definition": " "}]
    rows += [{**rows[0], "definition": rows[0]["definition"].replace(" ", "  ")}]
    source = tmp_path / "my corpus (old)" / "words.jsonl"
    source.parent.mkdir()
    source.write_text("\n".join(map(json.dumps, rows)))
    words = [
        *("prepare-data", "hardware=cpu", "model=demo-policy", f"paths.corpus={tmp_path / 'corpus'}"),
        f"base_model={prepared.model}",  # the demo's own would be built first
        *(f"source={source}", "fields.text=definition", "fields.title=headword", "rows=8", "heldout_rows=0"),
    ]
    assert main(words) == 2
    refused = capsys.readouterr().err
    assert "words.jsonl line 14: no text: 'definition' is empty" in refused
    assert not (tmp_path / "corpus" / "chromadb").exists()
    assert main([*words, "on_bad=skip"]) == 0
    quality = json.loads((tmp_path / "corpus" / "data" / "quality.json").read_text())
    assert quality["source"]["documents"] == 13 and quality["source"]["skipped"]["total"] == 1
    assert quality["source"]["duplicates"]["count"] == 1
    assert quality["prompts"]["too_short"] == {"count": 1, "examples": ["RF Radio."]}
    told = capsys.readouterr().out
    for line in ("1 faulty records or files skipped", "1 duplicate", "1 of 13 entries too short"):
        assert line in told
    assert sum(quality["chains"].values()) == 13
    assert sum(quality["prompts"]["hops"].values()) == 8
    next_in_the_guide = preflight(compose_stage("challenger", words[1:5]), "challenger")
    assert {one.key for one in next_in_the_guide.errors} <= {"memory"}  # as little as is free here


def test_an_index_for_the_demo_policy_says_so_and_a_named_model_gets_its_own_embedder(tmp_path):
    (tmp_path / "a.md").write_text("# Orrin\nA town.")
    found = {}
    for words in (["hardware=cpu"], ["hardware=cpu", "model=qwen2.5-3b"]):
        config = compose_stage("prepare_data", [*words, f"source={tmp_path / 'a.md'}"])
        report = preflight(config, "prepare_data")
        found[config.retrieval.embedder] = [one for one in report.findings if one.key == "retrieval.embedder"]
        assert not any(one.key == "machine.gpus" for one in report.findings)
    assert list(found) == ["packaged-minilm", "intfloat/e5-large-v2"]
    assert "name its model here too (model=qwen2.5-3b)" in str(found["packaged-minilm"][0])


def of_a_large_index(prepared, corpus, monkeypatch, capsys, *words):
    """Prompts from ten entries of an index that counts as large, which is built first."""
    monkeypatch.setattr(prepare_data, "MEASURED", 10)
    built = ["prepare-data", *arguments(prepared, corpus), "min_document_tokens=0", "min_prose=0", *words]
    assert main(built) == 0
    told = capsys.readouterr().out
    assert f"10 of {len(prepared.documents)} entries were drawn at random" in told
    assert "of memory to serve and" in told and "links of documents were not counted" in told
    return [word for word in built if not word.startswith("source=")], documents_shown(corpus)


def test_of_a_large_index_no_more_is_read_than_the_prompts_need_unless_it_is_an_older_one(
    prepared, tmp_path, monkeypatch, capsys
):
    corpus = tmp_path / "corpus"
    again, drawn = of_a_large_index(prepared, corpus, monkeypatch, capsys)
    assert len(drawn) == 10
    with connect(corpus / "chromadb") as client:
        handle = get_collection(client, corpus / "chromadb", "corpus")
        handle.modify(metadata={**(handle.metadata or {}), "draws": 0})
    assert main(again) == 0
    told = capsys.readouterr().out
    assert f"reading all {len(prepared.documents)} entries: this index is too old to draw from" in told
    assert "drawn at random" not in told and documents_shown(corpus) != drawn


def test_of_a_large_faiss_index_no_more_is_read_either_whoever_built_it(
    prepared, tmp_path, monkeypatch, capsys
):
    corpus = tmp_path / "corpus"
    again, shown = of_a_large_index(prepared, corpus, monkeypatch, capsys, "index=faiss")
    (corpus / "faiss" / "drzero-faiss.json").unlink()  # as another tool leaves an index
    (corpus / "faiss" / "index.faiss").rename(corpus / "faiss" / "e5_Flat.index")
    assert main(again) == 0
    assert documents_shown(corpus) == shown


def test_a_benchmark_that_names_no_document_can_hold_none_out(tmp_path):
    chain = {"id": "a", "hop": 1, "question": "Who came?", "answer": "Vell"}
    (tmp_path / "questions.jsonl").write_text(json.dumps(chain))
    with pytest.raises(DataError, match=r"question 'a' of .* names no document"):
        held_out_documents([str(tmp_path / "questions.jsonl")])


def test_a_document_to_hold_out_that_the_index_has_not_is_named(prepared, tmp_path, capsys):
    there = prepared.documents[0]["id"]
    questions = tmp_path / "questions.csv"
    questions.write_text(f"question,answer,doc_ids\nWho came?,Vell,{there}\nWho left?,Vell,docs/b.md\n")
    words = [f"hold_out=[{questions}]", f"out_dir={tmp_path / 'data'}", "rows=8", "heldout_rows=2"]
    assert main(["prepare-data", *prepared.overrides(tmp_path), *words]) == 0
    told = capsys.readouterr().out
    assert "none shows any of the 1 documents held out for benchmarks" in told
    assert "the index lacks 1 of the 2 documents to hold out, e.g. 'docs/b.md'" in told


@pytest.mark.slow("unpacks both models of the demo")
def test_no_prompt_of_the_demo_shows_a_document_of_its_evaluation(tmp_path):
    assert main(["demo-data", f"paths.corpus={tmp_path}"]) == 0
    evaluated = held_out_documents([str(tmp_path / "chains.jsonl")])
    found = {key for key, *_ in iter_documents(tmp_path / "chromadb", "corpus")}
    shown = documents_shown(tmp_path)
    assert shown and evaluated and shown.isdisjoint(evaluated) and shown | evaluated <= found


def test_with_too_little_time_it_is_not_begun(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 100))
    assert main(["prepare-data", *arguments(prepared, tmp_path / "corpus")]) == 75
    assert "drzero prepare-data: prepare-data was not started: the stop time" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


def prompts_in(corpus):
    return [read_parquet(file).to_pylist() for file in sorted((corpus / "data").glob("*.parquet"))]


def test_an_index_in_shards_or_embedded_alone_gives_the_prompts_of_one_run(prepared, tmp_path, capsys):
    for shards in (1, 2):
        words = [*arguments(prepared, tmp_path / str(shards)), f"chroma.shards={shards}"]
        assert main(["prepare-data", *words]) == 0
    files = sorted(path.name for path in (tmp_path / "2" / "chromadb").iterdir())
    assert files == ["shard-00-of-02", "shard-01-of-02"]
    command = ["prepare-data", *arguments(prepared, tmp_path / "parts")]
    capsys.readouterr()
    assert main([*command, "indexing.embed_only=true"]) == 0
    assert "embedded and not written" in capsys.readouterr().out
    assert not (tmp_path / "parts" / "chromadb").exists() and not (tmp_path / "parts" / "data").exists()
    assert main(command) == 0
    assert "60 chunks embedded by an earlier run" in capsys.readouterr().out
    assert prompts_in(tmp_path / "1") == prompts_in(tmp_path / "2") == prompts_in(tmp_path / "parts")


def foreign_index(folder, documents, vectors):
    """A collection as another tool makes it: Chroma's own distance, texts without titles; its overrides."""
    with connect(folder, create=True) as client:
        handle = client.create_collection("theirs", embedding_function=None)
        texts = [document["text"] for document in documents]
        handle.add(ids=[document["id"] for document in documents], documents=texts, embeddings=vectors)
    return f"chroma.path={folder}"


def theirs(prepared, tmp_path, chroma):
    return [
        *prepared.overrides(tmp_path),
        *(chroma, "chroma.collection=theirs", f"out_dir={tmp_path / 'data'}", "rows=8", "heldout_rows=0"),
    ]


def test_an_index_of_another_tool_with_our_vectors_is_adopted_and_answers_with_cosines(prepared, tmp_path):
    documents, embedder = prepared.documents[:12], Embedder(EmbedderSpec("packaged-minilm", "cpu"))
    vectors = embedder.encode_passages([document["text"] for document in documents])
    words = theirs(prepared, tmp_path, foreign_index(tmp_path / "chroma", documents, vectors))
    assert main(["prepare-data", *words]) == 0
    assert (tmp_path / "data" / "zero_ratio4321.parquet").is_file()
    assert check_content(tmp_path / "chroma", "theirs")
    with open_collection(str(tmp_path / "chroma"), "theirs") as store:
        store.check_embedder(embedder)
        (found,) = store.query(vectors[3:4], 12)
    assert found[0]["document"]["contents"].endswith(documents[3]["text"])
    cosines = sorted(vectors @ vectors[3], reverse=True)
    assert [passage["score"] for passage in found] == pytest.approx(cosines, abs=1e-4)


def test_an_index_with_other_vectors_is_refused_unchanged_with_the_command_that_embeds_it_again(
    prepared, tmp_path, capsys
):
    documents = prepared.documents[:12]
    other = np.random.default_rng(0).normal(size=(12, 384))
    words = theirs(prepared, tmp_path, foreign_index(tmp_path / "chroma", documents, other))
    assert main(["prepare-data", *words]) == 2
    refused = capsys.readouterr().err
    assert not (tmp_path / "data").exists()
    with connect(tmp_path / "chroma") as client:
        assert is_foreign(get_collection(client, tmp_path / "chroma", "theirs").metadata)
    assert "of 12 records that were embedded again 0 agree" in refused
    said = re.search("`drzero (.+?)`", refused)
    assert said and main([*said[1].split(), *words]) == 0
    with open_collection(str(tmp_path / "chroma"), "theirs") as store:
        assert store.info.chunks == 12


def test_its_indexing_ends_at_the_stop_time(monkeypatch):
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 0.1))
    with pytest.raises(OutOfTime, match="rerun to resume its index"), until_the_stop_time():
        threading.Event().wait(60)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
