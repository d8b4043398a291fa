"""The evaluate stage with an endpoint that plays a script, and a stand-in for the retrieval service.

`test_evaluate_chat.py` and the launched loop run it with real parts.
"""

import json
import re
import sys
import time
from collections import Counter
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Peer, unused_port
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoTokenizer

from data.benchmarks import BenchmarkQuestion, load_benchmark
from data.errors import DataError
from drzero.ops.artefacts import LOG_VARIABLE
from drzero.ops.errors import OutOfTime, UserError
from drzero.ops.process.lock import AlreadyRunning, HeldLock
from drzero.ops.records import OUT_OF_TIME, read_json_lines
from drzero.ops.services.services import ServiceDied, ServiceSpec
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.preflight.inputs import load_questions
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.stages import conversations
from drzero.stages.evaluate import run
from drzero.stages.evaluate.benchmark_scores import PAPER_BENCHMARKS, evaluation_table, score_all
from drzero.stages.evaluate.benchmarks import answer_record
from drzero.stages.evaluate.intervals import averaged, wilson
from drzero.stages.evaluate.run import run_evaluate
from drzero.stages.models import stage_model
from drzero.stages.result import read_result
from search.embedders import EmbedderSpec
from search.indexing.shards import build_index
from verl_ext.clients.solver_agent import SolverAttempt
from verl_ext.method.search_calls import render_tool_call
from verl_ext.method.trajectory import SearchCall, Trajectory, Turn

MODELS = {"/v1/models": {"data": [{"id": "served-model"}]}}
# Healthy until it is searched.
STAND_IN = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        print("RuntimeError: lost the index", flush=True)
        os._exit(3)
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Script:
    """An endpoint that answers the demo world's questions, and what it was asked.

    `reply` gives what the model says to a question, or the HTTP status with which its server fails.
    """

    def __init__(self, start_peer, corpus, tokenizer, reply):
        self.reply = reply
        self._tokenizer = tokenizer
        questions = load_benchmark(corpus / "chains.jsonl")
        # Longest first: a question may begin like another.
        self._questions = sorted(questions, key=lambda question: -len(question.question))
        self.asked: list[str] = []
        self.peer: Peer = start_peer("/v1/completions", self._complete, MODELS)

    def says(self, reply):
        """Start again at the same address: from now on this reply counts."""
        self.reply = reply
        self.asked.clear()

    def _complete(self, body):
        prompt = self._tokenizer.decode(body["prompt"])
        question = next(question for question in self._questions if question.question in prompt)
        self.asked.append(question.key)
        reply = self.reply(question)
        if isinstance(reply, int):
            return reply
        return {"choices": [{"text": reply, "finish_reason": "stop"}]}


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return AutoTokenizer.from_pretrained(prepared.model)


@pytest.fixture
def start_script(start_peer, prepared, tokenizer):
    return lambda reply: Script(start_peer, prepared.corpus, tokenizer, reply)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A retrieval service that starts at once."""

    def spec(config):
        return ServiceSpec(
            name="retrieval",
            command=(sys.executable, "-c", STAND_IN, str(config.retrieval.port)),
            log_path=Path(config.run.dir) / "logs" / "retrieval.log",
            health_url=f"http://127.0.0.1:{config.retrieval.port}/health",
        )

    monkeypatch.setattr(run, "search_spec", spec)


@pytest.fixture(scope="module")
def composed(prepared):
    """The stage's config over the prepared world; composing takes seconds, so it is done once."""
    overrides = ["iteration=0", "questions_per_benchmark=2", "solver.concurrency=4"]
    return compose_stage("evaluate", [*prepared.overrides(prepared.corpus), *overrides])


@pytest.fixture
def compose(composed, prepared, tmp_path):
    """That config with changes, in a run folder of the test's own; the endpoint is that of a script."""

    def changed(script, *changes):
        # Ports of its own: another run that starts on this machine at the same moment must not be met.
        ports = [f"{service}.port={unused_port()}" for service in ("retrieval", "solver")]
        places = [f"paths.checkpoints={tmp_path}", f"run.dir={tmp_path / 'run'}", *ports]
        endpoint = [f"endpoint={script.peer.url}/v1", f"tokenizer={prepared.model}"] if script else []
        dots = OmegaConf.from_dotlist([*places, *endpoint, *changes])
        return cast(DictConfig, OmegaConf.merge(deepcopy(composed), dots))

    return changed


def right(question):
    return f"<answer>{question.targets[0]}</answer>"


def wrong(question):
    return "<answer>somebody else</answer>"


def report_of(config):
    return json.loads((Path(config.run.dir) / "report.json").read_text())


def answered(config):
    """The keys in the journal."""
    lines = (Path(config.run.dir) / "answers.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["key"] for line in lines]


# --- an endpoint --------------------------------------------------------------------------------------------


def test_an_endpoints_answers_are_asked_greedily_scored_per_hop_count_and_announced_before_the_result(
    start_script, compose, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "announced.jsonl"))
    script = start_script(lambda question: right(question) if question.hop in (1, 3) else wrong(question))
    config = compose(script)
    run_evaluate(config)
    benchmarks = report_of(config)["benchmarks"]
    assert {name: row["em"] for name, row in benchmarks.items()} == {
        f"demo_{hop}hop": float(hop in (1, 3)) for hop in (1, 2, 3, 4)
    }
    assert all(row["n"] == 2 and row["failed"] == 0 for row in benchmarks.values())
    assert report_of(config)["averages"]["macro average"]["em"] == 0.5
    assert re.search(r"demo_1hop +2 +1\.000 +\.342–1\.000", capsys.readouterr().out)
    assert {(body["model"], body["temperature"]) for body in script.peer.requests} == {("served-model", 0.0)}
    result = read_result(Path(config.run.dir))
    assert result.figures["demo_1hop"] == 1.0 and result.outputs["answers"].is_file()
    assert result.tokens > sum(len(body["prompt"]) for body in script.peer.requests)
    announced = [Path(line["path"]).name for line in read_json_lines(tmp_path / "announced.jsonl")]
    assert announced == ["answers.jsonl", "report.json", "result.json"]


def test_ones_own_questions_are_asked_and_scored_under_the_name_that_they_are_given(
    start_script, compose, prepared, tmp_path
):
    """The demo's questions, as somebody would have them: a csv with columns of other names."""
    known = load_benchmark(prepared.corpus / "chains.jsonl")[:2]
    rows = "".join(f'"{question.question}";"{question.targets[0]}"\n' for question in known)
    (tmp_path / "exam.csv").write_text(f"Frage;Antwort\n{rows}", encoding="utf-16")
    config = compose(start_script(right), "question_fields.question=Frage", "question_fields.answers=Antwort")
    config.benchmarks = [f"staff exam={tmp_path / 'exam.csv'}"]
    run_evaluate(config)
    assert report_of(config)["benchmarks"]["staff exam"]["em"] == 1.0
    assert sorted(answered(config)) == ["staff exam/0", "staff exam/1"]


def test_a_run_that_is_out_of_time_keeps_its_answers_and_the_next_one_asks_the_rest(
    start_script, compose, monkeypatch
):
    def until_the_third(question):
        if len(script.asked) == 3:
            monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 50))
        return right(question)

    script = start_script(until_the_third)
    config = compose(script, "solver.concurrency=1")
    with pytest.raises(OutOfTime, match="after 3 of 8 conversations"):
        run_evaluate(config)
    folder, kept = Path(config.run.dir), answered(config)
    assert kept == script.asked and len(kept) == 3
    assert read_result(folder) is None and not (folder / "report.json").exists()
    assert OUT_OF_TIME in [event["kind"] for event in read_json_lines(folder / "logs" / "events.jsonl")]
    monkeypatch.delenv(STOP_VARIABLE)
    script.says(right)
    run_evaluate(compose(script))
    assert not set(script.asked) & set(kept) and len(answered(config)) == len(set(answered(config))) == 8


def test_with_too_little_time_for_a_conversation_no_service_is_started(start_script, compose, monkeypatch):
    monkeypatch.setattr(conversations, "ServiceGroup", lambda specs: pytest.fail("a service was started"))
    monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 50))
    config = compose(start_script(right))
    with pytest.raises(OutOfTime, match="was not started: the stop time"):
        run_evaluate(config)
    assert answered(config) == []


def test_answers_are_kept_whether_more_fewer_or_the_same_questions_are_asked(
    start_script, compose, monkeypatch
):
    script = start_script(right)
    run_evaluate(compose(script))
    before, report = set(script.asked), report_of(compose(script))
    with monkeypatch.context() as patch:
        patch.setattr(run, "search_spec", lambda config: pytest.fail("a service was started"))
        run_evaluate(compose(script))
        assert report_of(compose(script)) == report
    script.says(right)
    fewer = compose(script, "questions_per_benchmark=1")
    run_evaluate(fewer)
    assert script.asked == [] and report_of(fewer)["averages"]["micro average"]["n"] == 4
    more = compose(script, "questions_per_benchmark=3")
    run_evaluate(more)
    assert len(script.asked) == 4 and not before & set(script.asked)
    assert report_of(more)["benchmarks"]["demo_2hop"]["n"] == 3


def test_a_question_that_the_server_fails_is_counted_not_scored_and_asked_again_next_time(
    start_script, compose
):
    lost: list[str] = []

    def fails_one(question):
        if question.hop == 4 and (not lost or question.key in lost):
            lost.append(question.key)
            return 503
        return right(question)

    script = start_script(fails_one)
    config = compose(script)
    run_evaluate(config)
    row = report_of(config)["benchmarks"]["demo_4hop"]
    assert (row["n"], row["failed"], row["em"]) == (1, 1, 1.0)
    assert "HTTP 503" in next(iter(report_of(config)["failures"]))
    script.says(wrong)
    run_evaluate(compose(script))
    assert set(script.asked) == set(lost)
    assert report_of(config)["benchmarks"]["demo_4hop"]["em"] == 0.5


def test_a_benchmark_whose_questions_all_failed_is_a_dash_in_the_table_and_null_in_the_files(
    start_script, compose, capsys
):
    config = compose(start_script(lambda question: 503 if question.hop == 4 else right(question)))
    run_evaluate(config)
    assert re.search(r"demo_4hop +0 +– +– +– +– +– +– +2 *\n", capsys.readouterr().out)
    for name in ("report.json", "result.json"):
        # Python writes and reads NaN, which is no JSON.
        json.loads((Path(config.run.dir) / name).read_text(), parse_constant=pytest.fail)
    assert report_of(config)["benchmarks"]["demo_4hop"]["em"] is None
    assert read_result(Path(config.run.dir)).figures["demo_4hop"] is None


def test_a_service_that_dies_is_named_with_its_last_words(start_script, compose):
    script = start_script(lambda question: render_tool_call(["Who?"]))
    with pytest.raises(ServiceDied, match=r"service 'retrieval' died: exit code 3(.|\n)*lost the index"):
        run_evaluate(compose(script, "retrieval.deadline_s=3"))


def test_answers_under_other_conditions_or_of_another_server_are_not_mixed_in(start_script, compose):
    script, other = start_script(right), start_script(right)
    run_evaluate(compose(script))
    with pytest.raises(DataError, match=r"retrieval\.topk was 2 and is 4.*another run\.name"):
        run_evaluate(compose(script, "retrieval.topk=4"))
    with pytest.raises(DataError, match=rf"model was .*is 'served as served-model at {other.peer.url}/v1'"):
        run_evaluate(compose(other))


def test_a_second_run_of_one_folder_is_refused_and_what_a_killed_run_was_writing_is_removed(
    start_script, compose
):
    script = start_script(right)
    config = compose(script)
    half = Path(config.run.dir) / ".report.json.0123.tmp"
    with HeldLock(Path(config.run.dir) / "lock"), pytest.raises(AlreadyRunning, match="in use by process"):
        run_evaluate(config)
    assert script.asked == []
    half.write_text('{"mod')
    run_evaluate(config)
    assert not half.exists()


# --- refused before anything starts -------------------------------------------------------------------------


def test_an_endpoint_that_is_not_there_is_refused_with_its_address(compose, prepared):
    dead = f"http://127.0.0.1:{unused_port()}/v1"
    with pytest.raises(CheckError, match=f"no OpenAI-compatible server answers at {dead}"):
        run_evaluate(compose(None, f"endpoint={dead}", f"tokenizer={prepared.model}"))


def test_one_of_several_models_of_an_endpoint_must_be_chosen(start_peer, compose, prepared):
    models = {"/v1/models": {"data": [{"id": "base"}, {"id": "adapter"}]}}
    peer = start_peer("/v1/completions", lambda body: 500, models)
    choices = [f"endpoint={peer.url}", f"tokenizer={prepared.model}"]
    with pytest.raises(CheckError, match="has the models base, adapter: choose one with endpoint_model="):
        stage_model(resolve(compose(None, *choices)), "solver")
    with pytest.raises(CheckError, match="base, adapter, not other"):
        stage_model(resolve(compose(None, *choices, "endpoint_model=other")), "solver")
    assert stage_model(resolve(compose(None, *choices, "endpoint_model=adapter")), "solver").name == "adapter"


def test_questions_of_one_name_are_refused(start_script, compose, prepared):
    file = prepared.corpus / "chains.jsonl"
    with pytest.raises(CheckError, match=r"questions are duplicated, e\.g\. demo_1hop/"):
        run_evaluate(compose(start_script(right), f"benchmarks=[{file},{file}]"))


OTHER_FILES = r"benchmarks=\[…\] \(in a loop: stages\.evaluate\.benchmarks=\[…\], or evaluations=false"


@pytest.mark.parametrize("files", ["", "absent.jsonl"])
def test_without_a_benchmark_the_error_says_where_to_name_one_and_how_to_do_without(compose, files):
    with pytest.raises(UserError, match=OTHER_FILES):
        load_questions(resolve(compose(None, f"benchmarks=[{files}]")))


def test_questions_about_another_corpus_are_refused_naming_both(compose, tmp_path):
    chain = {"id": "a", "hop": 1, "question": "Who came?", "answer": "Vell", "doc_ids": ["elsewhere"]}
    (tmp_path / "foreign.jsonl").write_text(json.dumps(chain) + "\n")
    config = resolve(compose(None, f"benchmarks=[{tmp_path / 'foreign.jsonl'}]"))
    with pytest.raises(CheckError, match=OTHER_FILES) as refused:
        load_questions(config)
    for part in (str(tmp_path / "foreign.jsonl"), "'corpus'", config.chroma.path, "'elsewhere'"):
        assert part in str(refused.value)


def test_questions_about_a_document_that_the_index_has_in_chunks_are_asked(compose, tmp_path):
    long = {"id": "guide.md", "text": "The harbour of the old town is on the river. " * 60}
    (tmp_path / "corpus.jsonl").write_text(json.dumps(long) + "\n")
    place = tmp_path / "chroma"
    report = build_index(tmp_path / "corpus.jsonl", place, "corpus", EmbedderSpec("packaged-minilm", "cpu"))
    assert report.info.chunks > 1
    (tmp_path / "own.csv").write_text("question,answer,doc_ids\nWhere is it?,on the river,guide.md\n")
    named = f"benchmarks=[{tmp_path / 'own.csv'}]"
    assert len(load_questions(resolve(compose(None, named, f"chroma.path={place}")))) == 1


def test_only_questions_of_the_hop_counts_named_are_asked_and_those_without_one(compose, prepared, tmp_path):
    targets = {"ground_truth": {"target": ["Vell"]}}
    row = {"data_source": "nq", "question": "Who came?", "reward_model": targets}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "own.parquet")
    files = f"benchmarks=[{prepared.corpus / 'chains.jsonl'},{tmp_path / 'own.parquet'}]"
    config = resolve(compose(None, files, "hops=[2,4]", "questions_per_benchmark=3"))
    assert Counter(q.benchmark for q in load_questions(config)) == {"demo_2hop": 3, "demo_4hop": 3, "nq": 1}
    config = resolve(compose(None, f"benchmarks=[{prepared.corpus / 'chains.jsonl'}]", "hops=[7]"))
    with pytest.raises(DataError, match=r"hops=\[7\] leaves no question to ask: .* hops 1, 2, 3, 4"):
        load_questions(config)


# --- the config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iteration", "model"), [(0, "the/base"), (2, "/runs/solver_iter2_hf")])
def test_iteration_0_evaluates_the_base_model_and_each_other_its_solver(iteration, model):
    words = ["hardware=cpu", "base_model=the/base", "paths.checkpoints=/runs", f"iteration={iteration}"]
    config = compose_stage("evaluate", words)
    assert (config.solver.model_path, Path(config.run.dir).name) == (model, f"evaluate_iter{iteration}")


def test_the_papers_models_and_the_server_get_their_settings():
    config = compose_stage("evaluate", ["hardware=8xh100", "model=qwen2.5-3b"])
    assert (config.solver.max_turns, config.retrieval.topk, config.solver.temperature) == (5, 3, 0.0)
    config, challenger = (compose_stage(stage, ["hardware=8xh100"]) for stage in ("evaluate", "challenger"))
    assert config.solver.mem_fraction_static > challenger.solver.mem_fraction_static


# --- scores -------------------------------------------------------------------------------------------------


def record(benchmark, *, right, **changes):
    numbers = {"f1": float(right), "searches": 0, "turns": 1, "truncated_turns": 0, "calls": 0}
    return {"benchmark": benchmark, "right": right, "invalid_calls": 0, **numbers, **changes}


def records_of(benchmark, right, n):
    return [record(benchmark, right=i < right) for i in range(n)]


def test_an_answer_is_recorded_with_what_led_to_it():
    calls = (
        SearchCall("…", ("Who?",), response="[1] Vell came."),
        SearchCall("{", None, error="the call is not JSON"),
    )
    trajectory = Trajectory((Turn("a", calls), Turn("<answer>The Vell</answer>", truncated=True)))
    attempt = SolverAttempt(trajectory, True, None, 30, 12, 1, 0.5, answer="The Vell")
    kept = answer_record(BenchmarkQuestion("nq", "7", "Who came?", ("Vell", "Vell Orn"), None), attempt)
    assert (kept["key"], kept["answer"], kept["right"], kept["f1"]) == ("nq/7", "The Vell", True, 1.0)
    assert (kept["turns"], kept["truncated_turns"], kept["calls"], kept["invalid_calls"]) == (2, 1, 2, 1)
    assert Trajectory.from_dict(kept["trajectory"]) == trajectory


def test_shares_are_over_turns_and_calls_and_a_benchmark_without_answers_has_no_score():
    records = [
        record("nq", right=True, searches=3, turns=4, truncated_turns=1, calls=4, invalid_calls=1),
        record("nq", right=False, searches=0, turns=1),
    ]
    score = score_all(records, {}, ["nq"])[0]["nq"]
    shares = score.em, score.searches, score.truncated_turn_share, score.invalid_call_share
    assert shares == (0.5, 1.5, 0.2, 0.25)
    assert score_all([record("nq", right=True)], {}, ["nq"])[0]["nq"].invalid_call_share is None
    records = [*records_of("nq", 1, 2), *records_of("popqa", 2, 2)]
    scores, averages = score_all(records, {"musique": 3}, ["nq", "musique", "popqa"])
    assert (scores["musique"].n, scores["musique"].em, scores["musique"].failed) == (0, None, 3)
    assert averages["macro average"].em == 0.75
    assert averages["micro average"].failed == 3


def test_averages_weigh_benchmarks_or_questions_and_have_narrower_intervals():
    records = [*records_of("nq", 10, 10), *records_of("popqa", 0, 30)]
    averages = score_all(records, {}, ["nq", "popqa"])[1]
    assert (averages["macro average"].em, averages["micro average"].em) == (0.5, 0.25)
    records = [*records_of("nq", 20, 40), *records_of("popqa", 20, 40), *records_of("musique", 20, 40)]
    scores, averages = score_all(records, {}, ["nq", "popqa", "musique"])
    for average in averages.values():
        assert width(average) < min(width(score) for score in scores.values())
    assert score_all(records_of("nq", 1, 2), {}, ["nq"])[1] == {}


def width(score):
    return float(score.em_high - score.em_low)


SHARES = st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=7)


@given(SHARES)
def test_an_averages_interval_has_a_width_holds_it_and_lies_within_its_parts_ends(drawn):
    sizes, rights = [n for n, _ in drawn], [round(share * n) for n, share in drawn]
    ends = list(map(wilson, rights, sizes))
    mean, low, high = averaged(sizes, rights, sizes)
    assert min(low for low, _ in ends) - 1e-9 <= low <= mean <= high <= max(high for _, high in ends) + 1e-9
    assert low < high, "also if all or none are right"


def printed(records, benchmarks):
    file = StringIO()
    Console(width=118, file=file).print(evaluation_table("run", *score_all(records, {}, benchmarks)))
    return file.getvalue()


def test_the_papers_figures_stand_beside_its_benchmarks_alone():
    records = [record for name in PAPER_BENCHMARKS for record in records_of(name, 1, 4)]
    table = printed(records, PAPER_BENCHMARKS)
    assert re.search(r"musique +4 +\.250 .* \.105 +\.091 +\.168 +\.104", table)
    assert re.search(r"macro average +28 +\.250 .* \.327 +\.326 +\.384 +\.372", table)
    assert "arXiv 2601.07055, table 1" in table
    table = printed([*records_of("nq", 1, 4), *records_of("popqa", 1, 4)], ["nq", "popqa"])
    assert ".397" in table and ".372" not in table
    assert "Search-R1" not in printed(records_of("demo_1hop", 1, 4), ["demo_1hop"])
