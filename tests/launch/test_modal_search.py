"""The retrieval service on Modal: what `modal_search.py` asks for, and what its container runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Prepared, unused_port
from modal_checkout import PLANTED, SHARED, make_checkout
from modal_plane import ControlPlane
from search_parts import wait_for

from drzero.launch.errors import LaunchError
from drzero.launch.search_service import described, words_here
from drzero.launch.service import PORT, read_service_file
from search.index_info import ServedIndex, ServiceAway, ask_index

ROOT = Path(__file__).parents[2]
FILE = "config/runs/search.yaml"


# --- requests to Modal ---


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=True)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


def test_a_deployed_service_is_one_machine_with_the_corpus_that_stays(plane, checkout):
    done = plane.modal("deploy", "modal_search.py", cwd=checkout, env=SHARED)
    assert done.code == 0, done.stdout + done.stderr
    assert "https://search.modal.invalid" in done.stdout
    spec = plane.functions["search"]
    assert (spec.web_server_port, spec.min_containers, spec.max_containers) == (PORT, 1, 1)
    assert (spec.cpu, spec.memory, spec.gpu) == (4.0, 16384, None)
    assert {path: volume.name for path, volume in spec.volumes.items()} == {
        "/corpus": "dr-zero-corpus",
        "/cache": "dr-zero-cache",
    }
    assert not any(value in done.stdout + done.stderr for value in PLANTED.values())


def test_a_run_of_it_is_its_preflight_and_says_what_it_costs(plane: ControlPlane, checkout: Path) -> None:
    plane.answer("check", lambda: 1)
    done = plane.modal("run", "modal_search.py", cwd=checkout, env=SHARED)
    assert "dr-zero-search: 4 cores, 16,384 MiB, $" in done.stdout
    assert done.code == 1
    assert plane.functions["search"].min_containers is None  # nothing that would be paid for is started


def test_its_container_can_import_the_file_with_what_it_gets(plane: ControlPlane, tmp_path: Path) -> None:
    own = {**SHARED, "RETRIEVAL_TOKEN": "from-the-shell"}
    folder = make_checkout(tmp_path / "without", dotenv=False)
    done = plane.modal("deploy", "modal_search.py", cwd=folder, env=own)
    assert done.code == 0, done.stdout + done.stderr
    given = {key: value for each in plane.functions["search"].secrets for key, value in each.values.items()}
    assert given == {
        **{"RETRIEVAL_TOKEN": "from-the-shell", "HF_TOKEN": "", "CHROMA_API_KEY": ""},
        **{**SHARED, "DRZERO_SEARCH_FILE": FILE},
    }
    env = {"PATH": os.environ["PATH"], **given}
    subprocess.run([sys.executable, "-c", "import modal_search"], cwd=folder, env=env, check=True)


def test_people_who_share_a_workspace_have_a_service_each(plane: ControlPlane, checkout: Path) -> None:
    who = {"EXPERIMENTER": "ada", "EXPERIMENT_NAME": "wiki"}
    assert plane.modal("deploy", "modal_search.py", cwd=checkout, env=who).code == 0
    assert plane.app.name == "dr-zero-search-ada-wiki"


def test_a_run_file_that_its_container_would_not_have_is_refused(plane, checkout, tmp_path):
    (tmp_path / "search.yaml").write_text("compute: cpu\n")
    own = {**SHARED, "DRZERO_SEARCH_FILE": str(tmp_path / "search.yaml")}
    done = plane.modal("deploy", "modal_search.py", cwd=checkout, env=own)
    assert done.code == 2
    assert "put it under config/" in done.stderr


def test_without_a_token_nothing_is_asked_for(plane: ControlPlane, tmp_path: Path) -> None:
    before = len(plane.requests)
    own = {**SHARED, "RETRIEVAL_TOKEN": ""}
    done = plane.modal("deploy", "modal_search.py", cwd=make_checkout(tmp_path, dotenv=False), env=own)
    assert done.code == 2
    assert "modal_search: RETRIEVAL_TOKEN is not set" in done.stderr
    assert len(plane.requests) == before


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("compute: single_h100", "compute.type is H100"),
        ("compute: {base: cpu, max_usd: 5}", "compute.max_usd: a service has none"),
        ("model: qwen2.5-3b", "model: a service has compute, overrides, image alone"),
    ],
)
def test_what_a_service_has_no_use_for_is_refused(file, why, tmp_path):
    path = tmp_path / "search.yaml"
    path.write_text(file)
    with pytest.raises(LaunchError, match=why):
        described(read_service_file(str(path)), str(path), {})


# --- in its container ---


@pytest.fixture
def container(prepared: Prepared, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that starts the service and waits, like a container. Yields it and its port."""
    port, (_, words) = unused_port(), described(read_service_file(str(ROOT / FILE)), FILE, {})
    words = [*words, "retrieval.embedder=packaged-minilm"]  # as the demo's index
    start = (
        "from drzero.launch.search_service import words_here; from drzero.launch.service import start; "
        f"start('serve-search', words_here({words!r}, {port}))"
    )
    code = f"import time; {start}; time.sleep(600)"
    env = {**os.environ, "RETRIEVAL_TOKEN": "token", "DRZERO_MOUNT_CORPUS": str(prepared.corpus)}
    env["TMPDIR"] = str(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)
    yield process, port
    for child in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait()


def served(port: int) -> ServedIndex | None:
    try:
        return ask_index(f"http://127.0.0.1:{port}")
    except ServiceAway:
        return None


def test_it_serves_the_index_of_the_volume_and_ends_its_container_when_it_ends(
    container: tuple[subprocess.Popen[bytes], int], prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, port = container
    monkeypatch.setenv("RETRIEVAL_TOKEN", "token")
    wait_for(lambda: served(port), 300)
    index = served(port)
    assert index is not None and index.documents == len(prepared.documents)
    (service,) = psutil.Process(process.pid).children()
    service.terminate()
    assert process.wait(60) != 0


def test_its_address_cannot_be_changed_by_a_run_file() -> None:
    of_its_address = ["retrieval.host=0.0.0.0", f"retrieval.port={PORT}"]
    assert words_here(["retrieval.port=9000"])[-3:-1] == of_its_address
