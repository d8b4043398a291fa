"""Services on Modal: what `modal_search.py` and `modal_agent.py` ask for, and what their containers run."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import unused_port
from modal_checkout import PLANTED, SHARED, make_checkout
from search_parts import wait_for

from drzero.agent.compose import compose_agent
from drzero.launch import agent_service, search_service
from drzero.launch.agent_service import IDLE_S, REQUEST_S, price_lines
from drzero.launch.errors import LaunchError
from drzero.launch.service import PORT, START_S, read_service_file
from drzero.recipe.compose import compose_stage, resolve, write_resolved

ROOT = Path(__file__).parents[2]
SERVICES = ("search", "agent")


def deploy(plane, checkout, service, **environment):
    return plane.modal("deploy", f"modal_{service}.py", cwd=checkout, env={**SHARED, **environment})


def agent_as_shipped(**environment):
    file = "config/runs/agent.yaml"
    return agent_service.described(read_service_file(str(ROOT / file)), file, environment)


# --- requests to Modal ---


def test_a_deployed_search_is_one_machine_with_the_corpus_that_stays(plane, checkout):
    done = deploy(plane, checkout, "search").succeeded()
    assert "https://search.modal.invalid" in done.stdout
    spec = plane.functions["search"]
    assert (spec.web_server_port, spec.min_containers, spec.max_containers) == (PORT, 1, 1)
    assert (spec.cpu, spec.memory, spec.gpu) == (4.0, 16384, None)
    assert {path: volume.name for path, volume in spec.volumes.items()} == {
        "/corpus": "dr-zero-corpus",
        "/cache": "dr-zero-cache",
    }
    assert not any(value in done.stdout + done.stderr for value in PLANTED.values())


@pytest.mark.parametrize(
    ("environment", "gpu", "price"),
    [({}, "A10G", "$1.74 an hour"), ({"AGENT_GPU": "l40s"}, "L40S", "$2.58 an hour")],
)
def test_a_deployed_agent_is_at_most_one_gpu_that_runs_only_when_asked(
    environment, gpu, price, plane, checkout
):
    done = deploy(plane, checkout, "agent", **environment).succeeded()
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


def test_a_run_of_the_search_is_its_preflight_and_says_what_it_costs(plane, checkout):
    plane.answer("check", lambda: 1)
    done = plane.modal("run", "modal_search.py", cwd=checkout, env=SHARED)
    plane.answer_no_more("check")
    assert "dr-zero-search: 4 cores, 16,384 MiB, $" in done.stdout
    assert done.code == 1
    assert plane.functions["search"].min_containers is None  # nothing that would be paid for is started


def test_a_run_of_the_agent_is_its_preflight_on_a_cpu(plane, checkout):
    done = plane.modal("run", "modal_agent.py", cwd=checkout, env=SHARED)
    assert done.code == 2 and "$1.74 an hour" in done.stdout
    call = plane.calls[-1]
    assert (call.function, call.spec.gpu) == ("check", None)
    assert "there is no trained solver in" in call.logs


@pytest.mark.parametrize("service", SERVICES)
def test_people_who_share_a_workspace_have_a_service_each(service, plane, checkout):
    assert deploy(plane, checkout, service, EXPERIMENTER="ada", EXPERIMENT_NAME="wiki").code == 0
    assert plane.app.name == f"dr-zero-{service}-ada-wiki"


def test_a_container_is_given_its_own_secrets_alone(plane, tmp_path):
    deploy(
        plane, make_checkout(tmp_path, dotenv=False), "search", RETRIEVAL_TOKEN="from-the-shell"
    ).succeeded()
    assert given(plane, "search") == {
        **{"RETRIEVAL_TOKEN": "from-the-shell", "HF_TOKEN": "", "CHROMA_API_KEY": ""},
        **{**SHARED, "DRZERO_SEARCH_FILE": "config/runs/search.yaml"},
    }


def given(plane, service):
    return {key: value for each in plane.functions[service].secrets for key, value in each.values.items()}


@pytest.mark.parametrize(
    ("service", "environment", "why"),
    [
        ("search", {"RETRIEVAL_TOKEN": ""}, "modal_search: RETRIEVAL_TOKEN is not set"),
        ("search", {"RETRIEVAL_TOKEN": "t", "DRZERO_SEARCH_FILE": "/x/s.yaml"}, "put it under config/"),
        ("agent", {"AGENT_TOKEN": ""}, "modal_agent: AGENT_TOKEN is not set"),
        ("agent", {"AGENT_TOKEN": "t", "AGENT_GPU": "H1000"}, "unknown GPU type 'H1000'"),
        ("agent", {"AGENT_TOKEN": "t", "AGENT_GPU": "T4"}, "T4 has no bfloat16"),
        ("agent", {"AGENT_TOKEN": "t", "DRZERO_AGENT_FILE": "../agent.yaml"}, "put it under config/"),
        ("agent", {"AGENT_TOKEN": "t", "DRZERO_AGENT_FILE": "config/runs/demo_t4.yaml"}, "a service has"),
    ],
)
def test_with_a_mistake_nothing_is_asked_for(service, environment, why, plane, tmp_path):
    before = len(plane.requests)
    done = deploy(plane, make_checkout(tmp_path, dotenv=False), service, **environment)
    assert done.code == 2 and why in done.stderr
    assert len(plane.requests) == before


@pytest.mark.parametrize(
    ("described", "file", "why"),
    [
        (search_service.described, "compute: single_h100", "compute.type is H100"),
        (search_service.described, "compute: {base: cpu, max_usd: 5}", "compute.max_usd: a service has none"),
        (
            search_service.described,
            "model: qwen2.5-3b",
            "model: a service has compute, overrides, image alone",
        ),
        (agent_service.described, "compute: 8xh100", "the agent has one GPU"),
    ],
)
def test_what_a_service_has_no_use_for_is_refused(described, file, why, tmp_path):
    path = tmp_path / "service.yaml"
    path.write_text(file)
    with pytest.raises(LaunchError, match=why):
        described(read_service_file(str(path)), str(path), {})


# --- prices ---


def test_the_prices_are_by_the_table_and_the_page_has_them():
    machine, _ = agent_as_shipped()
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


# --- in their containers ---


def test_the_agent_serves_the_last_iteration_with_sglang_and_writes_to_no_volume(tmp_path, monkeypatch):
    monkeypatch.setenv("DRZERO_MOUNT_CHECKPOINTS", str(tmp_path))
    for iteration in (1, 2):
        (tmp_path / f"solver_iter{iteration}_hf").mkdir()
    write_resolved(
        resolve(compose_stage("evaluate", [f"paths.checkpoints={tmp_path}", "solver.max_turns=3"]))
    )
    _, words = agent_as_shipped(AGENT_GPU="H100")
    config = resolve(compose_agent("serve_agent", agent_service.words_here([*words, "port=9000"])))
    assert (config.solver.engine, config.solver.model_path) == ("sglang", str(tmp_path / "solver_iter2_hf"))
    assert (config.machine.device, config.compute.type) == ("cuda", "H100")
    assert (config.paths.corpus, config.chroma.path) == ("/corpus", "/corpus/chromadb")
    assert (config.host, config.port) == ("0.0.0.0", PORT)
    assert not Path(config.run.dir).is_relative_to(tmp_path)


def test_the_searchs_address_cannot_be_changed_by_a_run_file():
    of_its_address = ["retrieval.host=0.0.0.0", f"retrieval.port={PORT}"]
    assert search_service.words_here(["retrieval.port=9000"])[-3:-1] == of_its_address


@pytest.fixture
def trained(prepared, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "solver_iter1_hf").symlink_to(prepared.model)
    write_resolved(resolve(compose_stage("evaluate", [*prepared.overrides(runs), "run.name=evaluate_iter1"])))
    return runs


@pytest.fixture
def container(request, plane, prepared, trained, tmp_path):
    service, override = request.param
    checkout = make_checkout(tmp_path / "checkout", dotenv=True)
    (checkout / f"config/runs/{service}.yaml").write_text(f"compute: cpu\noverrides: [{override}]")
    deploy(plane, checkout, service).succeeded()
    (checkout / ".env").unlink()
    port = unused_port()
    module = f"modal_{service}"
    serve = f"start({module}.{service.upper()}.command, words_here({module}.PLAN.words, {port}))"
    code = f"import {module}, time; from {module} import start, words_here; {serve}; time.sleep(600)"
    mounts = {"DRZERO_MOUNT_CORPUS": str(prepared.corpus), "DRZERO_MOUNT_CHECKPOINTS": str(trained)}
    home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    env = {**home, **mounts, **given(plane, service)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=checkout, env=env)
    yield process, port
    for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("container", "token", "path", "holds"),
    [
        (("search", "retrieval.embedder=packaged-minilm"), "RETRIEVAL_TOKEN", "/index", '"documents":60'),
        pytest.param(
            ("agent", "process_env.OMP_NUM_THREADS=1"),
            *("AGENT_TOKEN", "/v1/models", '"id":"'),
            marks=pytest.mark.slow("a model's server too; test_serve.py has the agent without a container"),
        ),
    ],
    indirect=["container"],
)
def test_it_answers_who_has_the_token_and_ends_its_container(container, token, path, holds, trained):
    process, port = container
    before = set(trained.rglob("*"))

    def asked(token="other"):
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
        except httpx.TransportError:
            return None

    wait_for(asked, 300)
    assert asked().status_code == 401
    assert holds in asked(PLANTED[token]).text
    assert set(trained.rglob("*")) == before
    (service,) = psutil.Process(process.pid).children()
    service.terminate()
    assert process.wait(60) != 0
