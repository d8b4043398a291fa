"""One question through real services: every probe is printed, and a broken one names its component."""

import asyncio
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from conftest import unused_port
from stage_run import RUN_LIMIT_S

from drzero.cli import main
from drzero.labs.check_services import (
    ProbeFailed,
    ProbeQuestion,
    Probes,
    choose_question,
    probe_stage,
    run_check_services,
    run_probes,
    split_question,
    split_stage,
)
from drzero.labs.check_trainer import read_hops
from drzero.ops.services.services import ServiceDied, ServiceSpec
from drzero.ops.telemetry import Progress
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from verl_ext.method.challenger_reward import has_integrity
from verl_ext.method.search_calls import render_tool_call

ASKED = ProbeQuestion("Who came?", "Vell", "Town\nVell came to town.")
PASSAGE = {"title": "Town", "text": "Vell came.", "contents": "Town\nVell came."}
PROBES = ["search", "solver turn", "tool call", "answer", "reward"]
CALL, RIGHT = render_tool_call(["town"]), "<answer>Vell</answer>"


def retrieve(body):
    return {"result": [[PASSAGE] for _ in body["queries"]]}


@pytest.fixture
def config(prepared, tmp_path):
    """The demo's challenger, whose services are somewhere else."""
    made = resolve(compose_stage("challenger", [*prepared.overrides(tmp_path), "solver.attempts=2"]))
    made.solver.deadline_s, made.retrieval.deadline_s = 20, 2
    return made


@pytest.fixture
def use(config, start_peer):
    """Let peers stand in for both services; gives the retrieval one."""

    def serve(search=retrieve, solver=lambda body: 500):
        peers = start_peer("/retrieve", search), start_peer("/v1/completions", solver)
        for service, peer in zip(("retrieval", "solver"), peers, strict=True):
            config[service].port = int(peer.url.rsplit(":", 1)[1])
        return peers[0]

    return serve


def scripted(*texts):
    """A solver that says these in turn."""
    left = list(texts)
    return lambda body: {"choices": [{"text": left.pop(0), "finish_reason": "stop"}]}


def probed(config, stage="challenger"):
    probes = Probes()
    asyncio.run(probe_stage(config, stage, ASKED, probes))
    return probes


def test_a_question_goes_from_the_search_to_the_reward(config, use):
    config.solver.concurrency = 1
    use(solver=scripted(CALL, RIGHT, "<answer>Orrin</answer>"))
    probes = probed(config)
    assert [probe.name for probe in probes.done] == PROBES
    search, turn, tool, answer, reward = probes.done
    assert search.component == "retrieval" and "1 passages" in search.outcome
    assert "3 turns of 2 attempts" in turn.outcome and "1 of 1 were searches" in tool.outcome
    assert "2 of 2 attempts gave one: 'Vell', 'Orrin'" in answer.outcome
    assert reward.outcome.startswith("1.500: 1 of 2 right, difficulty 1.00, format 1.00")
    assert all(probe.ok and probe.seconds >= 0 for probe in probes.done)


def test_if_the_solver_makes_no_search_the_tool_is_probed_all_the_same(config, use):
    retrieval = use(solver=scripted(RIGHT, RIGHT))
    probes = probed(config)
    assert [probe.name for probe in probes.done] == PROBES
    assert "this command wrote the call" in probes.done[2].outcome
    assert [request["queries"] for request in retrieval.requests] == [[ASKED.text], [ASKED.text]]


@pytest.mark.parametrize(
    ("searches", "solver", "said"),
    [
        (0, lambda body: 500, "probe 'search' failed at retrieval .*HTTP 500.*retrieval.log"),
        (9, lambda body: 500, "probe 'solver turn' failed at solver .*HTTP 500.*solver.log"),
        (9, lambda body: 404, "probe 'solver turn' failed at solver .*HTTP 404"),
        # A search that fails in an attempt is not the solver's fault.
        (1, lambda body: scripted(CALL)(body), "probe 'tool call' failed at retrieval: .*HTTP 500"),
    ],
)
def test_a_service_that_fails_is_named_with_its_answer_and_what_to_do(config, use, searches, solver, said):
    answers = iter([retrieve({"queries": [""]})] * searches)
    use(lambda body: next(answers, 500), solver)
    probes = Probes()
    with pytest.raises(ProbeFailed, match=f"(?s){said}"):
        asyncio.run(probe_stage(config, "challenger", ASKED, probes))
    assert [probe.ok for probe in probes.done] == [*[True] * min(searches, 1), False]


def test_an_answer_that_stands_in_the_question_is_no_question_to_reward(config, use):
    use(solver=scripted(RIGHT, RIGHT))
    with pytest.raises(ProbeFailed, match=r"no integrity.*question="):
        asyncio.run(probe_stage(config, "challenger", ProbeQuestion("Who is Vell?", "Vell", "d"), Probes()))


def test_the_solver_stage_has_no_served_model_to_ask(config, use):
    use()
    probes = probed(config, "solver")
    assert [probe.name for probe in probes.done] == ["search", "tool call", "reward"]


# A service that dies under the first search.
DIES = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        print("ValueError: lost my index", flush=True); os._exit(3)
http.server.HTTPServer(("127.0.0.1", int(os.sys.argv[1])), Handler).serve_forever()
"""


def test_a_retrieval_service_that_dies_is_named_with_its_last_words(config, tmp_path):
    config.retrieval.port, config.retrieval.deadline_s = unused_port(), 30
    spec = ServiceSpec(
        name="retrieval",
        command=(sys.executable, "-c", DIES, str(config.retrieval.port)),
        log_path=tmp_path / "retrieval.log",
        health_url=f"http://127.0.0.1:{config.retrieval.port}/health",
    )
    with pytest.raises(ServiceDied, match=r"(?s)service 'retrieval' died: exit code 3.*lost my index"):
        run_probes(config, [spec], ASKED, "challenger")


def test_a_probe_that_fails_is_what_a_diagnosis_names(config, tmp_path):
    config.retrieval.port = unused_port()
    spec = ServiceSpec(
        name="retrieval",
        command=(sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(config.retrieval.port)),
        log_path=tmp_path / "logs" / "retrieval.log",
        health_url=f"http://127.0.0.1:{config.retrieval.port}/",
    )
    with pytest.raises(ProbeFailed):
        run_probes(config, [spec], ASKED, "challenger")
    death = examine(tmp_path)
    assert (death.state, death.culprit) == ("failed", "retrieval")
    assert "probe 'search' failed" in death.sentence


# The question -----------------------------------------------------------------------------------------------


def test_the_question_is_made_of_the_first_document_or_given_with_its_answer_and_not_without(config):
    question = choose_question(config)
    assert question.document.startswith(question.answer)
    assert has_integrity(question.text, question.answer)
    given, overrides = split_question(["+question='Who?'", "hardware=cpu", "answer=Vell"])
    question = choose_question(config, **given)
    assert (question.text, question.answer, overrides) == ("Who?", "Vell", ["hardware=cpu"])
    with pytest.raises(CheckError, match="both"):
        choose_question(config, question="Who?")


@pytest.mark.parametrize(
    ("arguments", "stage", "overrides"),
    [
        ([], "challenger", []),
        (["hardware=cpu"], "challenger", ["hardware=cpu"]),
        (["+question=Who"], "challenger", ["+question=Who"]),
        (["solver", "iteration=2"], "solver", ["iteration=2"]),
        (["paths.corpus=c", "solver", "iteration=2"], "solver", ["paths.corpus=c", "iteration=2"]),
    ],
)
def test_the_stage_is_the_first_word_if_any(arguments, stage, overrides):
    assert split_stage(arguments) == (stage, overrides)


def test_another_stage_is_refused_and_a_question_next_to_the_trainer():
    with pytest.raises(CheckError, match="challenger, solver, not of 'merge'"):
        split_stage(["merge"])
    with pytest.raises(CheckError, match="takes a row of the stage"):
        run_check_services(["solver", "--with-trainer", "question=Who?", "answer=Vell"])


# With the trainer -------------------------------------------------------------------------------------------


def trainer_wrote(folder, *, failed=0):
    """What a validation of one prompt leaves: heartbeats, counters, a worker's file, veRL's dump."""
    (folder / "progress").mkdir(parents=True)
    (folder / "check").mkdir()
    beats = [(100.0, "start-up"), (160.0, "validation"), (170.0, "done")]
    lines = [json.dumps({"time": at, "step": 0, "phase": phase}) for at, phase in beats]
    (folder / "heartbeats.jsonl").write_text("\n".join(lines) + "\n")
    points = {"validation": {"depth": 0, "out": 0 if failed else 1}}
    counters = {"time": 170.0, "points": points, "about": {"listed_s": 0.004, "sampled_s": 8.0}}
    (folder / "flow_counters.json").write_text(json.dumps(counters))
    progress = Progress(None)
    for kind in ("rollout", "generation", "generation", "search", "reward"):
        with progress.waiting(kind):
            pass
    for _ in range(failed):
        with pytest.raises(RuntimeError), progress.waiting("search"):
            raise RuntimeError
    record = progress.snapshot() | {"seconds": {"rollout": 5.0, "generation": 3.0, "reward": 0.5}}
    record["done"]["token"] = 96
    (folder / "progress" / "1.json").write_text(json.dumps(record))
    (folder / "check" / "0.jsonl").write_text(json.dumps({"score": 1.0}) + "\n")


def test_each_hop_of_the_prompt_has_its_time(tmp_path):
    trainer_wrote(tmp_path)
    hops = {hop.name: hop for hop in read_hops(tmp_path)}
    assert list(hops) == ["start-up", "queue", "rollout", "generation", "search", "reward", "buffer"]
    assert (hops["start-up"].seconds, hops["generation"].seconds) == (60.0, 1.5)
    assert "2 answered, 96 tokens" in hops["generation"].outcome
    assert "reward 1.000" in hops["reward"].outcome
    assert "2.5 s after its reward" in hops["buffer"].outcome
    assert all(hop.ok for hop in hops.values())


def test_a_hop_that_failed_is_named(tmp_path):
    trainer_wrote(tmp_path, failed=2)
    bad = [hop for hop in read_hops(tmp_path) if not hop.ok]
    assert [hop.component for hop in bad] == ["retrieval", "replay buffer"]
    assert "2 failed" in bad[0].outcome and bad[1].outcome == "none came"


@pytest.mark.slow("a start of the trainer; the hops are read above from what one leaves")
@pytest.mark.matrix
@pytest.mark.timeout(RUN_LIMIT_S)
def test_one_prompt_goes_through_the_challengers_own_trainer_and_nothing_is_updated(
    prepared, speaking_model, tmp_path
):
    overrides = [*prepared.overrides(tmp_path, speaking_model), "process_env.OMP_NUM_THREADS=1"]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["check-services", "challenger", "--with-trainer", *overrides, "run.name=check"])
    assert (code, err.getvalue()) == (0, "")
    hops = {hop.name for hop in read_hops(tmp_path / "check")}
    assert {"start-up", "queue", "rollout", "generation", "reward", "buffer"} <= hops
    assert all(hop in out.getvalue() for hop in hops)
    assert examine(tmp_path / "check").state == "finished"
    assert list((tmp_path / "check").glob("global_step_*")) == []
