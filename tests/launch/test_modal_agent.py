"""The trained agent on Modal: what `modal_agent.py` asks for, its prices, and what its container runs."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import unused_port
from modal_checkout import PLANTED, SHARED, make_checkout
from modal_plane import ControlPlane
from search_parts import wait_for

from drzero.agent.compose import compose_agent
from drzero.launch.agent_service import IDLE_S, REQUEST_S, described, price_lines, words_here
from drzero.launch.errors import LaunchError
from drzero.launch.service import PORT, START_S, read_service_file
from drzero.recipe.compose import compose_stage, resolve, write_resolved

ROOT = Path(__file__).parents[2]
FILE = "config/runs/agent.yaml"


def machine_and_words(**environment):
    return described(read_service_file(str(ROOT / FILE)), FILE, environment)


# --- requests to Modal ---


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=True)


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


def deploy(plane, checkout, **environment):
    return plane.modal("deploy", "modal_agent.py", cwd=checkout, env={**SHARED, **environment})


@pytest.mark.parametrize(
    ("environment", "gpu", "price"),
    [({}, "A10G", "$1.74 an hour"), ({"AGENT_GPU": "l40s"}, "L40S", "$2.58 an hour")],
)
def test_a_deployed_agent_is_at_most_one_gpu_that_runs_only_when_asked(
    environment, gpu, price, plane, checkout
):
    done = deploy(plane, checkout, **environment)
    assert done.code == 0, done.stdout + done.stderr
    first, *_ = done.stdout.splitlines()
    assert gpu in first and price in first and "https://agent.modal.invalid" in done.stdout
    spec = plane.functions["agent"]
    assert (spec.gpu, spec.cpu, spec.memory) == ((gpu, 1), 8.0, 32768)
    assert (spec.min_containers, spec.max_containers, spec.web_server_port) == (None, 1, PORT)
    assert (spec.timeout, spec.startup_timeout) == (REQUEST_S, START_S)
    assert {path: volume.name for path, volume in spec.volumes.items()} == {
        "/corpus": "dr-zero-corpus",
        "/checkpoints": "dr-zero-checkpoints",
        "/cache": "dr-zero-cache",
    }
    assert not any(value in done.stdout + done.stderr for value in PLANTED.values())


def test_people_who_share_a_workspace_have_an_agent_each(plane, checkout):
    assert deploy(plane, checkout, EXPERIMENTER="ada", EXPERIMENT_NAME="wiki").code == 0
    assert plane.app.name == "dr-zero-agent-ada-wiki"


def test_a_run_of_it_is_its_preflight_on_a_cpu(plane, checkout):
    done = plane.modal("run", "modal_agent.py", cwd=checkout, env=SHARED)
    assert done.code == 2 and "$1.74 an hour" in done.stdout
    (call,) = plane.calls
    assert (call.function, call.spec.gpu) == ("check", None)
    assert "there is no trained solver in" in call.logs


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"AGENT_TOKEN": ""}, "AGENT_TOKEN is not set"),
        ({"AGENT_TOKEN": "t", "AGENT_GPU": "H1000"}, "unknown GPU type 'H1000'"),
        ({"AGENT_TOKEN": "t", "AGENT_GPU": "T4"}, "T4 has no bfloat16"),
        ({"AGENT_TOKEN": "t", "DRZERO_AGENT_FILE": "../agent.yaml"}, "put it under config/"),
        ({"AGENT_TOKEN": "t", "DRZERO_AGENT_FILE": "config/runs/demo_t4.yaml"}, "a service has"),
    ],
)
def test_with_a_mistake_nothing_is_asked_for(environment, why, plane, tmp_path):
    before = len(plane.requests)
    done = deploy(plane, make_checkout(tmp_path, dotenv=False), **environment)
    assert done.code == 2 and why in done.stderr
    assert len(plane.requests) == before


def test_it_has_one_gpu(tmp_path):
    (tmp_path / "agent.yaml").write_text("compute: 8xh100")
    with pytest.raises(LaunchError, match="the agent has one GPU"):
        described(read_service_file(str(tmp_path / "agent.yaml")), FILE, {})


# --- prices ---


def test_the_prices_are_by_the_table_and_the_page_has_them():
    machine, _ = machine_and_words()
    hour, question, others = price_lines(machine)
    usd = machine.usd_per_hour
    assert f"${usd:.2f} an hour" in hour
    assert (
        f"${usd * 8 / 3600:.3f} for 8 s" in question and f"${usd * (120 + 8 + IDLE_S) / 3600:.2f}" in question
    )
    assert "L4 $1.43" in others and "H100 $5.73" in others and "T4" not in others
    page = " ".join((ROOT / "docs" / "modal.md").read_text().split())
    assert f"${usd:.2f} an hour" in page
    assert f"${usd * 8 / 3600:.3f}" in page and f"${usd * (120 + 8 + IDLE_S) / 3600:.2f}" in page


# --- in its container ---


def test_its_command_serves_the_last_iteration_with_sglang_and_writes_to_no_volume(tmp_path, monkeypatch):
    monkeypatch.setenv("DRZERO_MOUNT_CHECKPOINTS", str(tmp_path))
    for iteration in (1, 2):
        (tmp_path / f"solver_iter{iteration}_hf").mkdir()
    write_resolved(
        resolve(compose_stage("evaluate", [f"paths.checkpoints={tmp_path}", "solver.max_turns=3"]))
    )
    _, words = machine_and_words(AGENT_GPU="H100")
    config = resolve(compose_agent("serve_agent", words_here([*words, "port=9000"])))
    assert (config.solver.engine, config.solver.model_path) == ("sglang", str(tmp_path / "solver_iter2_hf"))
    assert (config.machine.device, config.compute.type) == ("cuda", "H100")
    assert (config.paths.corpus, config.chroma.path) == ("/corpus", "/corpus/chromadb")
    assert (config.host, config.port) == ("0.0.0.0", PORT)
    assert not Path(config.run.dir).is_relative_to(tmp_path)


@pytest.fixture
def trained(prepared, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "solver_iter1_hf").symlink_to(prepared.model)
    write_resolved(resolve(compose_stage("evaluate", [*prepared.overrides(runs), "run.name=evaluate_iter1"])))
    return runs


@pytest.fixture
def container(plane, prepared, trained, tmp_path):
    checkout = make_checkout(tmp_path / "checkout", dotenv=True)
    (checkout / FILE).write_text("compute: cpu\noverrides: [process_env.OMP_NUM_THREADS=1]")
    done = deploy(plane, checkout)
    assert done.code == 0, done.stdout + done.stderr
    (checkout / ".env").unlink()
    given = {key: value for each in plane.functions["agent"].secrets for key, value in each.values.items()}
    port = unused_port()
    serve = f"start(modal_agent.AGENT.command, words_here(modal_agent.PLAN.words, {port}))"
    code = f"import modal_agent, time; from modal_agent import start, words_here; {serve}; time.sleep(600)"
    mounts = {"DRZERO_MOUNT_CORPUS": str(prepared.corpus), "DRZERO_MOUNT_CHECKPOINTS": str(trained)}
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path), **mounts, **given}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=checkout, env=env)
    yield process, port
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait()


def test_it_answers_who_has_the_token_and_ends_its_container_when_it_ends(container, trained):
    process, port = container
    before = set(trained.rglob("*"))
    token = {"Authorization": f"Bearer {PLANTED['AGENT_TOKEN']}"}

    def models(**headers):
        return httpx.get(f"http://127.0.0.1:{port}/v1/models", headers=headers)

    def started():
        try:
            return models()
        except httpx.TransportError:
            return None

    wait_for(started, 300)
    assert models().status_code == 401
    assert models(Authorization="Bearer other").status_code == 401
    (known,) = models(**token).json()["data"]
    assert known["id"]
    assert set(trained.rglob("*")) == before
    (service,) = psutil.Process(process.pid).children()
    service.terminate()
    assert process.wait(60) != 0
