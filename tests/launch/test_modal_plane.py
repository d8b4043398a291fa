"""The control plane in `tests/parts/modal_plane/`, between Modal's own command line and container.

The launcher's tests rely on it. These assert the behaviour of Modal that they assume.

"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from modal_plane import ControlPlane
from modal_plane.client import Done
from modal_plane.state import App, Call, FunctionSpec
from modal_plane.volumes import Volume

SAMPLE = Path(__file__).parents[1] / "parts" / "modal_plane" / "sample" / "sample_app.py"
WANDB = {"WANDB_API_KEY": "planted-wandb-key"}

pytestmark = pytest.mark.slow("tests of a stand-in; in the first tier the launcher's own tests run on it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the client runs: a project with a `.env`."""
    folder = tmp_path_factory.mktemp("project")
    (folder / ".env").write_text("FROM_DOTENV=planted-dotenv-value\n")
    return folder


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane"), secrets={"wandb-secret": dict(WANDB)}) as plane:
        yield plane


def calls_of(plane: ControlPlane, app: App) -> list[Call]:
    return [call for call in plane.calls if call.app_id == app.id]


class TestOneCall:
    """All that is recorded of one run."""

    @pytest.fixture(scope="class")
    def done(self, plane: ControlPlane, folder: Path) -> Done:
        plane.volume("sample-corpus").put("chromadb/index", b"index")
        command = ("run", str(SAMPLE), "facts", "--iteration", "1", "+trainer.foo=1")
        return plane.modal(*command, cwd=folder, env={"ONLY_ON_THE_LAPTOP": "1"})

    @pytest.fixture(scope="class")
    def spec(self, plane: ControlPlane, done: Done) -> FunctionSpec:
        return plane.functions["facts"]

    @pytest.fixture(scope="class")
    def call(self, plane: ControlPlane, done: Done) -> Call:
        return calls_of(plane, plane.app)[0]

    def test_secrets_are_recorded_by_name_or_by_their_keys(self, spec: FunctionSpec) -> None:
        names = [(secret.name, secret.keys) for secret in spec.secrets]
        assert names == [("wandb-secret", ("WANDB_API_KEY",)), (None, ("FROM_DOTENV",)), (None, ("MODE",))]

    def test_a_container_has_the_apps_environment_and_not_the_clients(self, call: Call) -> None:
        assert call.result["laptop"] is None
        assert call.result["environment"] == {
            "GREETING": "hello there",
            "MODE": "test",
            "WANDB_API_KEY": WANDB["WANDB_API_KEY"],
            "FROM_DOTENV": "planted-dotenv-value",
        }

    def test_commits_and_reloads_reach_the_server(self, plane: ControlPlane, call: Call) -> None:
        checkpoints, corpus = plane.volumes["sample-checkpoints"], plane.volumes["sample-corpus"]
        assert [commit.at_exit for commit in checkpoints.commits if commit.call_id == call.id] == [
            False,
            True,
        ]
        assert [reload.function for reload in corpus.reloads] == ["facts"]
        assert (checkpoints.committed() / "seen").read_text() == "--iteration 1 +trainer.foo=1"


def test_a_lost_container_is_replaced_and_finds_the_last_commit(plane: ControlPlane, folder: Path) -> None:
    client = plane.start("run", str(SAMPLE), "writes", cwd=folder)
    call = plane.wait_for(lambda: [call for call in plane.calls if call.function == "writes"], "the call")[0]
    plane.wait_for(lambda: "attempt after 0" in call.logs, "the first commit")
    plane.kill(call)
    plane.wait_for(lambda: "attempt after 1" in call.logs, "the second commit")
    # Killed it lost what it had not committed; preempted it ends in order, and commits that as well.
    plane.preempt(call)
    done = client.wait(60)
    assert "written ['step0', 'step1', 'uncommitted']" in done.stdout
    assert call.attempts == 3


class TestViews:
    """A volume as several containers have it."""

    @pytest.fixture
    def volume(self, tmp_path: Path) -> Volume:
        return Volume("checkpoints", "vo-1", tmp_path, version=1)

    def test_a_container_sees_what_others_commit_only_after_a_reload(self, volume: Volume) -> None:
        one, other = volume.mount("ta-1", 0), volume.mount("ta-2", 1)
        (one / "report").write_text("done")
        assert not (volume.committed() / "report").exists()
        volume.commit("ta-1")
        assert (volume.committed() / "report").exists() and not (other / "report").exists()
        volume.reload("ta-2")
        assert (other / "report").read_text() == "done"

    def test_a_commit_leaves_what_others_have_committed(self, volume: Volume) -> None:
        volume.put("shared/old", b"old")
        one, other = volume.mount("ta-1", 0), volume.mount("ta-2", 1)
        (one / "shared" / "mine").write_text("one")
        volume.commit("ta-1")
        (other / "shared" / "old").unlink()
        volume.commit("ta-2")
        assert [path.name for path in (volume.committed() / "shared").iterdir()] == ["mine"]

    def test_a_reload_keeps_what_is_not_committed_yet(self, volume: Volume) -> None:
        volume.put("removed", b"old")
        one, other = volume.mount("ta-1", 0), volume.mount("ta-2", 1)
        (one / "new").write_text("one")
        (one / "removed").unlink()
        (other / "theirs").write_text("two")
        volume.commit("ta-2")
        volume.reload("ta-1")
        assert sorted(path.name for path in one.iterdir()) == ["new", "theirs"]
        volume.commit("ta-1")
        assert sorted(path.name for path in volume.committed().iterdir()) == ["new", "theirs"]

    def test_a_commit_includes_files_that_are_new_changed_removed_or_of_another_kind(self, volume):
        for path in ("removed/deep/file", "folder/file", "file", "changed"):
            volume.put(path, b"old")
        folder = volume.mount("ta-1", 0)
        shutil.rmtree(folder / "removed")
        shutil.rmtree(folder / "folder")
        (folder / "folder").write_text("a file now")
        (folder / "file").unlink()
        (folder / "file" / "new").mkdir(parents=True)
        (folder / "changed").write_text("new")
        (folder / "link").symlink_to("changed")
        volume.commit("ta-1")
        committed = volume.committed()
        names = sorted(path.relative_to(committed).as_posix() for path in committed.rglob("*"))
        assert names == ["changed", "file", "file/new", "folder", "link"]
        assert (committed / "folder").read_text() == "a file now"
        assert (committed / "link").read_text() == "new"


class TestWarmContainers:
    """Two calls of a function, each committing with a file open."""

    @pytest.fixture(scope="class")
    def done(self, plane: ControlPlane, folder: Path) -> Done:
        client = plane.start("run", str(SAMPLE), "holds", cwd=folder)
        plane.wait_for(lambda: "asked" in client.stdout, "both calls")
        plane.expire(calls_of(plane, plane.app)[0])
        (folder / "go").touch()
        return client.wait(60)

    @pytest.fixture(scope="class")
    def results(self, done: Done) -> list[dict[str, Any]]:
        held = [line for line in done.stdout.splitlines() if line.startswith("held")]
        return [json.loads(line.removeprefix("held ")) for line in held]

    def test_a_commit_with_an_open_file_persists_and_raises(self, results: list[dict[str, Any]]) -> None:
        first, second = results
        assert "there are open files preventing the operation" in first["refused"]
        assert set(second["found"]) - set(first["found"]) == {f"held{len(first['found'])}"}

    def test_a_result_expires(self, done: Done) -> None:
        assert "expired" in done.stdout, done.stdout + done.stderr


def test_what_modal_does_not_offer_is_refused_and_the_client_has_no_other_packages(plane, folder):
    done = plane.modal("run", str(SAMPLE), "beyond", cwd=folder)
    assert done.code == 0, done.stdout + done.stderr
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    wanted = ("cores", "MiB", "region", "retries", "timeout", "GPU Functions")
    assert len(refused) == len(wanted)
    for line, word in zip(refused, wanted, strict=True):
        assert word in line
    assert "bare No module named 'torch'" in done.stdout


def test_an_unknown_request_is_refused_by_name(plane: ControlPlane, folder: Path) -> None:
    done = plane.modal("queue", "list", cwd=folder)
    assert done.code == 1
    assert "no handler of QueueList" in done.stdout + done.stderr


def test_nothing_has_left_the_machine(plane: ControlPlane) -> None:
    assert plane.left_machine == []


def test_a_connection_elsewhere_would_be_seen(tmp_path: Path) -> None:
    with ControlPlane(tmp_path) as plane:
        script = tmp_path / "elsewhere.py"
        script.write_text(
            "import socket, modal\n"
            "s = socket.socket()\n"
            "s.settimeout(0.1)\n"
            "try:\n    s.connect(('192.0.2.1', 80))\nexcept OSError:\n    pass\n"
        )
        plane.modal("run", "elsewhere.py", cwd=tmp_path)
        assert plane.left_machine == ["192.0.2.1"]
