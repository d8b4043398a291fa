"""Agent-bench: an agent's runs against a real server, and the faults that only they show, each named."""

import asyncio
import gc
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import bench_agents
import httpx
import openai
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from anthropic import Anthropic
from conftest import unused_port
from families import family
from scripted_endpoint import scripted_endpoint
from served_model import served_model

from drzero.cli import main
from drzero.commands.serve_model import model_name
from drzero.labs.agent_bench import choose
from drzero.labs.agents.event_loop import Pause
from drzero.labs.agents.proxy import Recorder
from drzero.labs.agents.report import by_cause, faults, unexplained
from drzero.labs.agents.runs import Bench, Plan, play
from drzero.ops.bearer import MODEL_KEY
from drzero.ops.process.lock import lock_is_held
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.stages.services import add_call_form, solver_spec
from environments.agent.load import load_agent, load_items
from environments.fault import EnvironmentUnusable

KEY = "planted-openai-c840"
NUMBERED = [{"number": number} for number in range(50)]


@pytest.fixture(scope="module")
def served(tiny_model):
    with served_model(tiny_model, "tiny", max_seq_len=2000) as served:
        yield served


@pytest.fixture(scope="module")
def url(served):
    return served[0]


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(MODEL_KEY, raising=False)


def bench(url, name, items, **plan):
    agent = load_agent(f"bench_agents:{name}", {})
    with Recorder(url) as recorder:
        return asyncio.run(play(agent, items, Plan(**{"at_once": True, **plan}), recorder))


def found(bench, max_pause_s=None):
    return list(faults(bench, max_pause_s))


def line_of(code):
    """The number of the line of `bench_agents` that has this code."""
    lines = Path(bench_agents.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if code in line)


def command(url, folder, *words):
    places = [f"paths.corpus={folder}", f"paths.checkpoints={folder}", f"endpoint={url}", "hardware=cpu"]
    return main(["agent-bench", *words, *places])


def test_the_guides_agent_runs_on_one_item_and_its_call_is_shown(url, tmp_path, capsys):
    assert command(url, tmp_path, f"{bench_agents.__file__}:MyAgent") == 0
    out = capsys.readouterr().out
    assert "List 3 countries and their capitals." in out and '"chat.completion"' in out
    assert "finished       1 of 1" in out and "no fault was seen" in out
    assert not (tmp_path / "agent_bench" / "failures.jsonl").exists()
    assert examine(tmp_path / "agent_bench").state == "finished"


@pytest.mark.parametrize(
    ("late_s", "paused_s", "limit_s", "said"),
    [
        (27.1, 0.6, 1.0, "late by 27.1 s, and no line of the agent was seen to hold it"),
        (27.1, 26.5, 1.0, None),  # a fault, with its line
        (0.9, 0.6, 1.0, None),
        (27.1, 0.6, None, None),
    ],
)
def test_a_late_event_loop_that_no_line_explains_is_said_before_no_fault_was_seen(
    late_s, paused_s, limit_s, said
):
    bench = SimpleNamespace(latest_s=late_s, pause=Pause(paused_s, "my_agent.py:11"))
    told = unexplained(cast(Bench, bench), limit_s)
    assert told is None if said is None else said in told


def test_one_item_is_played_where_a_debugger_stops_in_the_commands_own_process_and_thread(
    url, tmp_path, monkeypatch
):
    own, stopped = psutil.Process(), list[Any]()

    def hook():
        stopped.append((os.getpid(), threading.get_ident(), own.children()))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    children = own.children()
    assert command(url, tmp_path, "bench_agents:Stops") == 0
    assert stopped == [(own.pid, threading.get_ident(), children)]


def test_calls_and_tokens_are_counted_by_run_and_the_rewards_summed_up(url):
    done = bench(url, "Asks", NUMBERED[:3], group_size=2)
    assert [len(run.calls) for run in done.runs] == [1] * 6
    assert [run.item for run in done.runs] == [0, 0, 1, 1, 2, 2]
    assert done.totals.calls == 6 and done.totals.tokens_out == 12 and not done.totals.failed
    assert 1 < done.most_at_once <= 6 and found(done) == []


def test_an_agent_may_read_the_address_from_the_environment_and_leaves_it_as_it_was(url, tmp_path, capsys):
    before = dict(os.environ)
    assert command(url, tmp_path, "bench_agents.FromEnvironment", "mode=sample", "n=2") == 0
    assert "model calls    2, 1 a run" in capsys.readouterr().out
    assert command(url, tmp_path, "bench_agents:Forgets") == 0
    assert dict(os.environ) == before


def test_an_agent_that_raises_in_one_of_fifty_runs_is_found_and_named(url, tmp_path, capsys):
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in NUMBERED))
    words = ("mode=concurrent", "batch_size=50", "group_size=1", "max_pause_s=60")
    assert command(url, tmp_path, "bench_agents:Raises", f"tasks={data}", *words) == 1
    said = capsys.readouterr()
    where = f"bench_agents.py:{line_of('>= 0)')}"
    assert f"1 of 50 runs failed: KeyError: 'number' ({where})" in said.err
    (failed,) = map(json.loads, (tmp_path / "agent_bench" / "failures.jsonl").read_text().splitlines())
    assert failed["item"] == 17 and failed["data"] == {"number": 17} and "KeyError" in failed["trace"]
    (call,) = failed["calls"]
    assert call["status"] == 200 and call["request"]["max_tokens"] == 2 and "choices" in call["answer"]
    death = examine(tmp_path / "agent_bench")
    assert death.state == "failed" and "1 of 50 runs failed: KeyError: 'number'" in death.sentence


def test_an_agent_that_blocks_the_event_loop_is_found_and_its_line_named(url):
    done = bench(url, "Blocks", NUMBERED[15:20])
    assert done.pause.seconds > 2
    line = line_of("time.sleep(2.5)")
    assert found(done, 1.0) == [
        f"the event loop was blocked for {done.pause.seconds:.1f} s at bench_agents.py:{line} in judge: "
        "time.sleep(2.5)"
    ]


def test_an_agent_that_leaks_connections_is_found_and_its_runs_named(url):
    try:
        done = bench(url, "Leaks", NUMBERED[:5])
    finally:
        bench_agents.KEPT.clear()
        gc.collect()
    (fault,) = found(done)
    assert fault.startswith("5 connections to 127.0.0.1:")
    assert fault.endswith("were left open (the model's, by runs 0, 1, 2, 3, 4): close the client")


def test_runs_that_end_as_no_run_should_are_counted_by_cause(url, monkeypatch):
    monkeypatch.setenv(MODEL_KEY, KEY)
    done = bench(url, "Misbehaves", NUMBERED[:7], deadline_s=1.5, api_key=KEY)
    causes = {run.number: run.failure.cause for run in done.failed if run.failure}
    assert causes == {
        0: "SystemExit: no key",
        1: "CancelledError",
        2: "did not end within 1.5 s",
        3: "ValueError: the first",
        4: "RuntimeError: refused with ***",
    }
    assert KEY not in repr(done.failed)
    assert any("tasks were left running: sleep" in fault for fault in found(done))


def test_a_key_that_a_server_repeats_is_shown_and_kept_nowhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(MODEL_KEY, KEY)
    with scripted_endpoint() as endpoint:
        assert command(endpoint.url, tmp_path, f"{bench_agents.__file__}:MyAgent") == 1
    said, folder = capsys.readouterr(), tmp_path / "agent_bench"
    for text in (said.out, said.err, (folder / "failures.jsonl").read_text()):
        assert "Incorrect API key provided: ***" in text
    kept = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert not any(KEY in text for text in (said.out, said.err, *kept))


def test_what_is_no_reward_is_a_failure_and_no_zero(url):
    done = bench(url, "Returns", [{"returns": value} for value in (1.0, None, None, math.inf)])
    assert {cause: len(runs) for cause, runs in by_cause(done.failed).items()} == {
        "the reward is None (NoneType), not a number": 2,
        "the reward is inf": 1,
    }


def test_a_client_that_leaves_cancels_the_generation_behind_the_recorder(served):
    url, engine = served

    async def leave():
        async with httpx.AsyncClient(timeout=0.5) as http:
            with pytest.raises(httpx.ReadTimeout):
                body = {"model": "tiny", "prompt": [9], "max_tokens": 1900, "n": 8}
                await http.post(f"{recorder.url(0)}/completions", json=body)
            for _ in range(600):
                if not engine.stats().running + engine.stats().waiting:
                    return
                await asyncio.sleep(0.05)

    before = engine.stats().tokens_out
    with Recorder(url) as recorder:
        asyncio.run(leave())
        (call,) = recorder.take(0)
    assert engine.stats().tokens_out - before < 8 * 1900
    assert call.status is None and recorder.totals.failed == 1


def test_an_endless_head_is_answered_by_the_recorder_itself(url):
    with Recorder(url) as recorder:
        assert httpx.get(recorder.url(0), headers={"X": "x" * 100_000}).status_code == 431
        assert recorder.take(0) == []


def by_chat(client, url):
    asked = {"model": "tiny", "messages": ASKED, "max_tokens": 20, "stream": True}
    return list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))


def by_responses(client, url):
    return list(client.responses.create(model="tiny", input=ASKED, max_output_tokens=20, stream=True))


def by_messages(client, url):
    with Anthropic(base_url=url.removesuffix("/v1"), api_key="None") as client:
        asked = {"model": "tiny", "messages": ASKED, "max_tokens": 20}
        return list(client.messages.create(**asked, stream=True))


ASKED = [{"role": "user", "content": "Who came?"}]


@pytest.mark.parametrize("ask", [by_chat, by_responses, by_messages])
def test_a_stream_passes_the_recorder_piece_by_piece_and_its_tokens_are_counted(ask, url):
    with Recorder(url) as recorder:
        with openai.OpenAI(base_url=recorder.url(4), api_key="None", timeout=60) as client:
            assert len(ask(client, recorder.url(4))) > 3
        (call,) = recorder.take(4)
    assert (
        call.tokens_in and call.tokens_out is not None and call.tokens_out == recorder.totals.tokens_out > 0
    )
    assert not hasattr(call, "headers"), "a key is in them"


def test_an_agent_or_a_server_that_is_not_there_is_refused(url, tmp_path, capsys):
    assert command(url, tmp_path, "bench_agents:MyAgnt") == 2
    assert "no function or class 'MyAgnt'; it has ask, Asks, Blocks, Forgets" in capsys.readouterr().err
    assert command(f"http://127.0.0.1:{unused_port()}/v1", tmp_path, "bench_agents:Asks") == 2
    assert "no OpenAI-compatible server answers" in capsys.readouterr().err


def test_items_are_json_lines_or_parquet_and_a_broken_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"number": 1}\n\n{"number": 2}\n')
    pq.write_table(pa.Table.from_pylist([{"number": 1}, {"number": 2}]), tmp_path / "a.parquet")
    assert load_items(tmp_path / "a.jsonl") == load_items(tmp_path / "a.parquet")
    for text, said in (("{", "line 1: not JSON"), ("[1]", "line 1: list, not"), ("", "no items")):
        (tmp_path / "b.jsonl").write_text(text)
        with pytest.raises(EnvironmentUnusable, match=said):
            load_items(tmp_path / "b.jsonl")


def test_a_choice_of_items_is_the_seeds_and_too_few_are_taken_again():
    assert choose(50, 5, seed=1) == choose(50, 5, seed=1) != choose(50, 5, seed=2)
    assert choose(2, 5, seed=1).count(0) in (2, 3)


def test_an_environment_by_its_name_is_played_by_the_projects_own_agent(url, tiny_model, tmp_path, capsys):
    words = [f"base_model={tiny_model}", "model=wordle-policy", "mode=concurrent"]
    sizes = ["batch_size=2", "group_size=2", "max_pause_s=60"]
    assert command(url, tmp_path, "wordle", *words, *sizes) == 0
    out = capsys.readouterr().out
    assert "finished       4 of 4" in out and "reward " in out


def test_the_model_is_served_under_its_hub_id_or_its_folders_name(tmp_path):
    assert model_name("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"
    assert model_name(str(tmp_path / "smollm2-135m")) == "smollm2-135m"


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["hardware=cpu", "call_form=xlam"], "--call-form", "xlam"),
        (["hardware=8xh100", "rollout=vllm", "call_form=xlam"], "--tool-call-parser", "xlam"),
        (["hardware=8xh100", "rollout=vllm", "call_form=llama3"], "--tool-call-parser", "llama3_json"),
        (["hardware=8xh100"], "--tool-call-parser", "hermes"),
        (["hardware=8xh100", "solver.server_args.tool_call_parser=qwen25"], "--tool-call-parser", "qwen25"),
    ],
)
def test_either_engine_is_told_how_the_model_writes_calls(words, option, value, tiny_model):
    config = compose_stage("serve_model", [f"model={tiny_model}", *words])
    add_call_form(config, config.call_form)
    command = solver_spec(resolve(config), "model", "a-name").command
    assert command[command.index(option) + 1] == value
    assert command[command.index("--served-model-name") + 1] == "a-name"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "8080"


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_sglangs_parser_is_the_one_of_the_models_template(name, tmp_path, smollm2_tokenizer):
    family(smollm2_tokenizer, name).save_pretrained(tmp_path / "model")
    config = compose_stage("serve_model", [f"model={tmp_path / 'model'}", "hardware=8xh100"])
    add_call_form(config, config.call_form)
    assert config.solver.server_args.tool_call_parser == name


def test_a_form_of_calls_that_sglang_cannot_read_is_refused(tiny_model):
    words = ["hardware=8xh100", "call_form=xlam", f"model={tiny_model}"]
    with pytest.raises(CheckError, match="sglang has no parser for call_form=xlam"):
        config = compose_stage("serve_model", words)
        add_call_form(config, config.call_form)


def test_a_port_in_use_ends_serve_model_before_a_model_is_loaded(url, tiny_model, tmp_path, capsys):
    port = url.removesuffix("/v1").rpartition(":")[2]
    words = [f"model={tiny_model}", f"port={port}", "hardware=cpu", f"paths.checkpoints={tmp_path}"]
    assert main(["serve-model", *words]) == 2
    assert f"port {port} on 127.0.0.1 is taken by" in capsys.readouterr().err


def test_a_model_is_served_for_the_runs_once_the_agent_is_known_to_load(tiny_model, tmp_path, capsys):
    model = tmp_path / "tiny"
    model.symlink_to(tiny_model)
    words = [f"model={model}", "serve=true", "hardware=cpu", f"paths.checkpoints={tmp_path}"]
    words += ["solver.max_context_tokens=1024", "rollout.max_tokens_per_turn=64"]
    assert main(["agent-bench", *words, f"{bench_agents.__file__}:NoAgent"]) == 2
    assert "agent: " in (said := capsys.readouterr().err) and "NoAgent has no method run" in said
    assert main(["agent-bench", *words, f"{bench_agents.__file__}:MyAgent"]) == 0
    assert "finished       1 of 1" in capsys.readouterr().out
    assert (tmp_path / "agent_bench" / "logs" / "model.log").is_file()


@pytest.mark.slow("a server in a process of its own, and 512 runs")
def test_the_guides_agent_runs_64_times_8_at_once_against_serve_model_in_the_background(tiny_model, tmp_path):
    port = unused_port()
    words = [f"model={tiny_model}", f"port={port}", "hardware=cpu", "background=true", "served_name=tiny"]
    words += ["solver.max_context_tokens=1024", "rollout.max_tokens_per_turn=64"]
    places = [f"paths.checkpoints={tmp_path}", f"paths.corpus={tmp_path}"]
    drzero = [sys.executable, "-m", "drzero.cli"]
    started = subprocess.run(
        [*drzero, "serve-model", *words, *places], capture_output=True, text=True, timeout=300, check=True
    )
    pid = int(started.stdout.partition("it runs as pid ")[2].partition(",")[0])
    try:
        agent = [f"{bench_agents.__file__}:MyAgent", "mode=concurrent", "max_pause_s=60"]
        at = [f"endpoint=http://127.0.0.1:{port}/v1"]
        done = subprocess.run(
            [*drzero, "agent-bench", *agent, *at, *places, "hardware=cpu"],
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "finished       512 of 512" in done.stdout and "512, 1 a run" in done.stdout
        assert lock_is_held(tmp_path / f"serve_model_{port}" / "lock"), "diagnose says that it is running"
    finally:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        os.kill(pid, signal.SIGTERM)
        assert not psutil.wait_procs(tree, timeout=60)[1], "the command that it prints ends all of it"
    assert examine(tmp_path / f"serve_model_{port}").state == "finished"
