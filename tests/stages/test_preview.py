"""The preview: a small corpus, and an endpoint that plays challenger and solver over it by a script.

One run is the real command, with a real index and retrieval service; every fifth request of it fails. The
others play questions alone. In the second tier the command is killed and run again.
"""

import asyncio
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from made_pairs import prompt, write_prompts
from scripted_endpoint import CORPUS, KEY, MODEL, RIVERS, scripted_endpoint, write_towns

from data.examples import Examples
from data.journal import Journal
from data.selection import prompts_by_index
from drzero.cli import main
from drzero.ops.records import read_json_lines
from drzero.ops.services.services import ServiceGroup
from drzero.preflight.demo_world import demo_notice, is_demo_corpus, is_demo_policy
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.overrides import OverrideError
from drzero.runs.report.trajectories import read_trajectories
from drzero.runs.run_folder import RunFolder
from drzero.stages.conversations import ConversationsFailed
from drzero.stages.models import base_of, chat_model, evaluate_overrides, preview_overrides
from drzero.stages.preview import play_questions, questions
from drzero.stages.preview_sample import sample_corpus
from drzero.stages.synthesize import missing_samples, play_samples, sample_seed
from search.sources.corpus import Corpus
from verl_ext.method.prompts import challenger_messages

ATTEMPTS, ROWS = 5, 12


@dataclass(frozen=True)
class Run:
    """A finished preview: its folder, what it printed, and what its endpoint saw."""

    folder: Path
    out: str
    requests: int
    dropped: int
    arguments: list[str]

    def lines(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def records(self):
        return self.lines("samples.jsonl")[1:]

    @property
    def report(self):
        return dict(json.loads((self.folder / "report.json").read_text()))


def arguments_for(folder, url):
    """As a user types it, with places of its own."""
    places = [f"paths.corpus={folder}/corpus", f"paths.checkpoints={folder}/runs", "run.min_free_gb=0.1"]
    sizes = [f"rows={ROWS}", "hop_ratio=[1,1]", "process_env.OMP_NUM_THREADS=1", "hardware=cpu"]
    # Rivers lead nowhere, and are asked about in two hops all the same: something is to be rejected.
    sizes += ["min_document_tokens=0", "fit_hops=false"]
    prices = ["usd_per_million_in=1", "usd_per_million_out=10"]
    return [f"source={write_towns(folder)}", f"endpoint={url}", f"model={MODEL}", *places, *sizes, *prices]


@pytest.fixture(scope="module")
def key_in_the_environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, key_in_the_environment):
    folder, out = tmp_path_factory.mktemp("previewed"), io.StringIO()
    # Not in step with five attempts at once: one of them would be dropped again and again.
    with scripted_endpoint(drop_every=7) as endpoint, redirect_stdout(out), redirect_stderr(out):
        arguments = arguments_for(folder, endpoint.url)
        code = main(["preview", *arguments])
        asked = len(endpoint.requests)
        # Again: nothing is missing, so nothing is asked.
        assert code == 0 and main(["preview", *arguments]) == 0, out.getvalue()[-3000:]
        assert len(endpoint.requests) == asked
    return Run(folder / "runs" / "preview", out.getvalue(), asked, endpoint.dropped, arguments)


def test_every_prompt_is_asked_tried_judged_and_counted_with_its_tokens(finished):
    assert sorted(record["prompt_index"] for record in finished.records) == list(range(ROWS))
    for record in finished.records:
        seed = sample_seed(42, record["prompt_index"], 1)
        right = sum((seed + number) % 3 != 0 for number in range(ATTEMPTS))
        assert len(record["attempts"]) == (ATTEMPTS if record["reward"]["integrity"] else 0)
        if record["reward"]["integrity"]:
            assert record["reward"]["k"] == right
            assert record["reward"]["difficulty"] == (ATTEMPTS - right) / (ATTEMPTS - 1)
    found = finished.lines("questions.jsonl")
    bad = [line for line in found if line["hop"] == 2 and line["doc_id"] in RIVERS]
    assert bad and [line for line in found if not line["accepted"]] == bad
    assert {reason.partition(":")[0] for line in bad for reason in line["reasons"]} == {"hops", "integrity"}
    assert len(finished.lines("rejects.jsonl")) == len(bad)
    report = finished.report
    assert report["accepted"] == ROWS - len(bad) and report["prompts"] == ROWS
    assert [rates["prompts"] for rates in report["per_hop"].values()] == [6, 6]
    assert report["per_hop"]["2"]["accepted"] == 6 - len(bad)
    for line in finished.lines("questions.jsonl"):
        if line["hop"] == 2 and line["accepted"]:
            assert line["evidence"].startswith("found: ") and line["answer"] in line["evidence"]
    assert finished.dropped == finished.requests // 7 > 10
    assert f"{finished.dropped} of {finished.requests} requests failed and were repeated" in finished.out
    assert f"{finished.dropped} requests failed: HTTP 503" in finished.out
    assert finished.report["failed"] == 0 and finished.lines("failures.jsonl")[1:] == []
    assert all(record["reward"]["valid"] for record in finished.records)
    cost = finished.report["cost"]
    # The first question is no conversation.
    assert cost["tokens_out"] == 20 * (finished.requests - finished.dropped - 1)
    assert cost["usd"] == pytest.approx((cost["tokens_in"] + 10 * cost["tokens_out"]) / 1e6)
    assert f"{cost['tokens_out']:,} written, ${cost['usd']:.2f}" in finished.out


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        (None, MODEL, "/v1/chat/completions does not answer: ConnectError"),
        ("/v1", "unheard-of", "not have the model 'unheard-of' (HTTP 404: The model unheard-of does not"),
        ("/other/v1", MODEL, "/other/v1/chat/completions does not have the model"),
    ],
)
def test_an_endpoint_is_asked_once_before_anything_is_built(
    path, model, words, tmp_path, key_in_the_environment, monkeypatch, capsys
):
    monkeypatch.setattr("verl_ext.clients.chat_endpoint._BACKOFF", lambda state: 0.0)
    with scripted_endpoint() as endpoint:
        address = "http://127.0.0.1:9/v1" if path is None else endpoint.url.replace("/v1", path)
        overrides = [*arguments_for(tmp_path, address), f"endpoint_model={model}"]
        assert main(["preview", *(word for word in overrides if not word.startswith("model="))]) == 2
        assert len(endpoint.requests) == (path == "/v1")
    error = capsys.readouterr().err
    assert words in error and error.startswith(f"drzero preview: endpoint: {address}")
    assert sorted(file.name for file in (tmp_path / "runs" / "preview").iterdir()) == ["lock"]


def test_console_and_page_show_questions_with_reasons_and_no_key(finished):
    examples = Examples.from_dict(finished.report["examples"])
    assert len(examples.accepted) == 3 and {one.hop for one in examples.accepted} == {1, 2}
    assert 0 < len(examples.rejected) <= 3
    page = (finished.folder / "report.html").read_text()
    for one in (*examples.accepted, *examples.rejected):
        assert f"{one.question} → {one.answer}" in finished.out
        assert one.reason in finished.out and one.evidence in finished.out
        assert str(one.question) in page
    assert finished.requests  # the endpoint answers no request without the key
    written = [path for path in finished.folder.parent.parent.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
    assert KEY not in finished.out
    run, unreadable = RunFolder(finished.folder), list[str]()
    shown = list(read_trajectories(run, unreadable))
    assert run.kind == "preview" and unreadable == [] and len(shown) == ROWS
    assert {len(one.attempts) for one in shown} == {0, ATTEMPTS}
    assert all(one.reasons for one in shown)


def test_the_model_need_not_be_one_that_is_known_here():
    named = ["rows=4", "endpoint=http://127.0.0.1:1/v1", "model=gpt-any"]
    assert preview_overrides(named) == [
        *("model=qwen2.5-3b", "rows=4", "endpoint=http://127.0.0.1:1/v1", "endpoint_model=gpt-any")
    ]
    assert preview_overrides(["rows=4", "model=gpt-any"]) == ["rows=4", "model=gpt-any"]
    known = ["endpoint=http://127.0.0.1:1/v1", "model=qwen3-8b", "endpoint_model=other"]
    assert preview_overrides(known) == known
    # An evaluation does the same over chat completions alone.
    assert evaluate_overrides([*named, "api=chat"]) == preview_overrides([*named, "api=chat"])
    assert evaluate_overrides(named) == named


@pytest.mark.parametrize(
    ("arguments", "embedder"),
    [
        (["source=x", "hardware=cpu", "endpoint=http://127.0.0.1:1/v1"], "packaged-minilm"),
        (["source=x", "hardware=cpu", "model=qwen2.5-3b"], "packaged-minilm"),
        (["source=x", "hardware=cpu", "retrieval.embedder=own"], "own"),
        (["source=x", "hardware=single_gpu", "model=qwen2.5-3b"], "intfloat/e5-large-v2"),
        (["hardware=cpu", "model=qwen2.5-3b"], "intfloat/e5-large-v2"),  # the index of prepare-data
    ],
)
def test_a_sample_is_embedded_by_the_small_embedder_on_a_cpu(arguments, embedder):
    assert compose_stage("preview", preview_overrides(arguments)).retrieval.embedder == embedder


def test_a_stage_that_trains_takes_no_endpoint_and_says_which_do():
    those = "preview, warm-start, synthesize, evaluate, ask, serve-agent, agent-bench, compare-rollouts"
    with pytest.raises(OverrideError, match=f"in challenger: it is one of {those}$"):
        compose_stage("challenger", ["hardware=cpu", "endpoint=http://127.0.0.1:1/v1"])


@pytest.mark.parametrize(
    ("address", "base"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1/v1"),
        ("https://api.example.com/v1/", "https://api.example.com/v1"),
        ("https://api.example.com/v1/chat/completions", "https://api.example.com/v1"),
        ("https://api.example.com/v1/completions", "https://api.example.com/v1"),
        ("https://example.com/v1beta/openai", "https://example.com/v1beta/openai"),
    ],
)
def test_an_address_may_be_written_in_any_usual_form(address, base):
    assert base_of(address) == base


@pytest.fixture
def config(tmp_path):
    stage = resolve(
        compose_stage("preview", preview_overrides(arguments_for(tmp_path, "http://127.0.0.1:1")))
    )
    stage.solver.concurrency = 1
    return stage


def library(request):
    """Finds the one passage that a query names."""
    found = [[p for p in CORPUS if p["title"] == query] for query in request["queries"]]
    return {"result": [[{**p, "contents": f"{p['title']}\n{p['text']}"} for p in some] for some in found]}


def rows_about_towns():
    """Prompts of both hop counts, in the words for a capable model."""
    rows = []
    for index, passage in enumerate(CORPUS[:6]):
        document = "{title}\n{text}".format(**passage)
        row = prompt(index, 1 + index % 2, document)
        rows.append(row | {"prompt": challenger_messages(document, 1 + index % 2, "full")})
    return rows


def play(config, endpoint, start_peer, folder):
    """Play what the journal lacks; returns what failed, the journal's records, and what was lost."""
    config.endpoint, config.endpoint_model = endpoint.url, config.endpoint_model
    config.retrieval.port = urlsplit(start_peer("/retrieve", library).url).port
    rows, model = rows_about_towns(), chat_model(config)
    with Journal(folder / "samples.jsonl", {}) as journal, Journal(folder / "lost.jsonl", {}) as lost:
        done = {record["prompt_index"] for record in journal.records}
        missing = [sample for sample in questions(config, rows) if sample.prompt_index not in done]
        playing = play_questions(
            config, model, prompts_by_index(rows), missing, journal, lost, ServiceGroup([])
        )
        failed = asyncio.run(playing)
        return failed, journal.records, lost.records


def told(records):
    """What was said, whatever its time."""
    return sorted((r["prompt_index"], json.dumps(r["trajectory"]), r["reward"]["k"]) for r in records)


def test_a_preview_cut_short_resumes_with_what_is_missing_and_ends_like_an_uncut_one(
    config, start_peer, tmp_path, key_in_the_environment, monkeypatch
):
    with scripted_endpoint() as endpoint:
        _, uncut, _ = play(config, endpoint, start_peer, tmp_path / "uncut")
        whole = len(endpoint.requests)
    with scripted_endpoint(refuse_from=whole // 2) as endpoint:
        with pytest.raises(ConversationsFailed, match="the key in the environment variable OPENAI_API_KEY"):
            play(config, endpoint, start_peer, tmp_path / "cut")
        kept = (tmp_path / "cut" / "samples.jsonl").read_bytes()
        endpoint.refuse_from = 0
        before = len(endpoint.requests)
        _, records, _ = play(config, endpoint, start_peer, tmp_path / "cut")
        assert 0 < len(endpoint.requests) - before < whole
    assert 1 < len(kept.splitlines()) < 7
    assert (tmp_path / "cut" / "samples.jsonl").read_bytes().startswith(kept)
    assert told(records) == told(uncut)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("sk-of-another", r"does not let us in.*OPENAI_API_KEY is not accepted"),
        ("", r"there is no key in the environment variable OPENAI_API_KEY; set it"),
    ],
)
def test_a_refused_key_ends_it_at_the_first_request(config, start_peer, tmp_path, monkeypatch, key, expected):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with scripted_endpoint() as endpoint:
        with pytest.raises(ConversationsFailed, match=expected) as refused:
            play(config, endpoint, start_peer, tmp_path / "refused")
        assert len(endpoint.requests) == 1
    assert "sk-of-another" not in str(refused.value)


def test_what_an_endpoint_cuts_short_is_lost_and_counted_not_scored(
    config, start_peer, tmp_path, key_in_the_environment
):
    with scripted_endpoint() as endpoint:
        # The first question takes 11 requests, the challenger's part of the second two more; from there on
        # every conversation is refused as if by a filter.
        endpoint.refuse_from, endpoint.refusal = 14, 422
        with pytest.raises(ConversationsFailed, match="refuses the conversation"):
            play(config, endpoint, start_peer, tmp_path / "lost")
    kept, lost = (read_json_lines(tmp_path / "lost" / f"{name}.jsonl")[1:] for name in ("samples", "lost"))
    assert [record["prompt_index"] for record in kept] == [0]
    assert lost and lost[0]["tokens_out"] > 0 and "HTTP 422" in lost[0]["reason"]
    assert all(record["reward"]["valid"] for record in kept)


def test_synthesize_samples_from_an_endpoint_too(start_peer, tmp_path, key_in_the_environment):
    overrides = ["hardware=cpu", "model=qwen2.5-3b", f"paths.checkpoints={tmp_path}", "samples=2"]
    config = resolve(compose_stage("synthesize", overrides))
    config.retrieval.port = urlsplit(start_peer("/retrieve", library).url).port
    rows = rows_about_towns()
    with scripted_endpoint() as endpoint, Journal(tmp_path / "samples.jsonl", {}) as journal:
        config.endpoint = endpoint.url
        missing = missing_samples(config, rows, [])
        sampling = play_samples(config, chat_model(config), missing, journal, ServiceGroup([]))
        assert asyncio.run(sampling) == []
    assert len(journal.records) == 12
    assert all(record["tokens_out"] for record in journal.records)


def test_a_sample_has_what_prompts_are_about_and_what_that_names(tmp_path):
    corpus = Corpus(write_towns(tmp_path))
    whole = sample_corpus(corpus, size=12, about=3, seed=1)
    assert (len(whole.corpus.ids), len(whole.about), whole.total) == (12, 12, 12)
    sample = sample_corpus(corpus, size=6, about=3, seed=1)
    assert len(sample.corpus.ids) == 6 and len(sample.about) == 3 and sample.about <= sample.corpus.ids
    read = [document for _, document in sample.corpus.read()]
    assert {document.id for document in read} == sample.corpus.ids
    rivers = {
        word.strip(".") for document in read if document.id in sample.about for word in document.text.split()
    } & set(RIVERS)
    assert rivers - sample.about <= sample.corpus.ids and sample.named == len(rivers - sample.about)
    assert sample_corpus(corpus, size=6, about=3, seed=1) == sample


def test_a_document_named_in_a_text_without_spaces_is_sampled(tmp_path):
    texts = {f"城{n}": "这座城很小。" for n in "一二三四五六七八九"}
    records = [{"id": title, "title": title, "text": text} for title, text in texts.items()]
    records.append({"id": "书", "title": "书", "text": "它讲述奥林天文台的故事。"})
    records.append({"id": "台", "title": "奥林天文台", "text": "它建于一座山上。"})
    (tmp_path / "zh.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    corpus = Corpus(tmp_path / "zh.jsonl")
    samples = (sample_corpus(corpus, size=2, about=1, seed=seed) for seed in range(60))
    taken = [sample for sample in samples if "书" in sample.about]
    assert taken and all("台" in sample.corpus.ids and sample.named == 1 for sample in taken)


def test_the_demo_policy_on_another_corpus_gets_one_plain_line(tmp_path):
    policy = tmp_path / "demo-policy"
    policy.mkdir()
    assert not is_demo_policy(str(policy))
    (policy / "made_from").write_text("file.gguf template adapter")
    assert is_demo_policy(str(policy))
    assert is_demo_corpus(["town-orrin", "person-mor-vell"]) and not is_demo_corpus(["town-orrin", "Oslo"])
    for name, doc_id in (("own", "Oslo"), ("demo", "town-orrin")):
        write_prompts(tmp_path / f"{name}.parquet", [prompt(doc_id=doc_id)])
    assert "only the demo's invented world" in str(demo_notice(str(policy), tmp_path / "own.parquet"))
    assert demo_notice(str(policy), tmp_path / "demo.parquet") is None
    assert demo_notice("org/other-model", tmp_path / "own.parquet") is None
