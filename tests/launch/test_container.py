"""A launch inside its container: real stages as children, and volumes that copy committed files."""

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drzero.launch.arguments import parse
from drzero.launch.commits import Commits
from drzero.launch.container import MARGIN_S, _Job, run_job, run_module
from drzero.launch.errors import LaunchError
from drzero.launch.request import Request, resolve
from drzero.launch.spend import Spend
from drzero.launch.volumes import launch_folder, place


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    for kind in ("corpus", "checkpoints", "cache"):
        (tmp_path / kind).mkdir()
        monkeypatch.setenv(f"DRZERO_MOUNT_{kind.upper()}", str(tmp_path / kind))
    return tmp_path


def request_of(*command: str, **compute) -> Request:
    request = resolve(parse(["--action", "merge", "--iteration", "1"]))
    machine = dataclasses.replace(request.compute, **compute)
    return dataclasses.replace(request, command=command, compute=machine)


class DiskVolume:
    """A volume as a container has it: a commit copies its files, then calls `meanwhile` with its number.

    What that raises is raised by the commit, which has persisted.
    """

    def __init__(self, kind: str, meanwhile: Callable[[int], None] = lambda commits: None) -> None:
        self.kind, self.meanwhile = kind, meanwhile
        self.commits = 0
        self.persisted: dict[str, bytes] = {}

    def commit(self) -> None:
        self.commits += 1
        folder = place(self.kind)
        files = [path for path in (folder / "launches").rglob("*") if path.is_file()]
        self.persisted = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        self.meanwhile(self.commits)

    def read_file(self, path: str) -> Iterator[bytes]:
        yield self.persisted[path]

    @property
    def state(self) -> dict[str, object]:
        outcome: dict[str, object] = json.loads(self.persisted["launches/merge_iter1/state.json"])["outcome"]
        return outcome


class LosingVolume(DiskVolume):
    """A volume that persists nothing in these commits, counted from 1."""

    def __init__(self, kind: str, losing: set[int]) -> None:
        super().__init__(kind)
        self.losing = losing

    def commit(self) -> None:
        kept = dict(self.persisted)
        super().commit()
        if self.commits in self.losing:
            self.persisted = kept
            raise RuntimeError("the service is not available")


def volumes(**replaced: DiskVolume) -> dict[str, DiskVolume]:
    return {kind: replaced.get(kind) or DiskVolume(kind) for kind in ("checkpoints", "corpus", "cache")}


def test_a_stage_that_ends_well_is_finished_and_committed(mounts):
    checkpoints = DiskVolume("checkpoints")
    outcome = run_job(request_of("list-models"), volumes(checkpoints=checkpoints))
    assert (outcome.state, outcome.exit_code) == ("finished", 0)
    assert checkpoints.state["state"] == "finished"
    folder = launch_folder("merge_iter1")
    assert "qwen2.5-3b" in (folder / "console.log").read_text()
    assert "list-models" in (folder / "request.yaml").read_text()


def test_a_script_of_the_users_own_gets_what_drzero_train_would_get(mounts, monkeypatch):
    (mounts / "train_mine.py").write_text("import sys; print('words:', *sys.argv[1:])")
    monkeypatch.setattr("drzero.launch.container.ROOT", mounts)
    request = dataclasses.replace(request_of("train", "env=mine", "steps=3"), script="train_mine.py")
    assert run_job(request, volumes()).state == "finished"
    folders = [f"paths.{kind}={mounts / kind}" for kind in ("corpus", "checkpoints")]
    console = (launch_folder("merge_iter1") / "console.log").read_text()
    assert " ".join(["words:", *folders, "env=mine", "steps=3"]) in console


def test_a_call_that_had_ended_is_not_repeated_and_a_new_launch_of_the_run_is_run(mounts):
    request, console = request_of("list-models"), launch_folder("merge_iter1") / "console.log"
    first = run_job(request, volumes())
    size = console.stat().st_size
    assert run_job(request, volumes()) == first and console.stat().st_size == size
    run_job(dataclasses.replace(request, id="another"), volumes())
    assert console.stat().st_size > size


def test_a_stage_that_fails_is_an_error_that_modal_sees_and_its_retry_is_run(mounts):
    request, checkpoints = request_of("merge", "no.such.key=1"), DiskVolume("checkpoints")
    for _ in range(2):
        with pytest.raises(LaunchError, match="exit code 2"):
            run_job(request, volumes(checkpoints=checkpoints))
        assert checkpoints.state["state"] == "failed"
    assert len(Spend(launch_folder("merge_iter1")).calls) == 2


STALLED = """
import sys
from pathlib import Path
from drzero.ops.process.logs import EventLog
run = Path(sys.argv[2].partition("=")[2], "merge_iter1")
events = EventLog(run / "logs" / "events.jsonl")
events.add("start", "trainer", "starting", log="x", offset=0)
stall = {"phase": "update", "step": 2, "silent_s": 61.0, "limit_s": 60.0, "advice": "see flight/"}
events.add("stall", "rank 1", "rank 1 is late", report=str(run / "logs" / "stall_001.md"), **stall)
events.add("end", "trainer", "the run stalled and was stopped")
sys.exit("Error: the run stalled")
"""


def test_a_call_whose_run_a_stall_has_ended_fails_with_its_verdict_in_one_line(mounts, monkeypatch, capfd):
    (mounts / "stalls.py").write_text(STALLED)
    monkeypatch.setattr("drzero.launch.container.ROOT", mounts)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    checkpoints = DiskVolume("checkpoints")
    said = (
        "merge_iter1 stalled and was stopped: rank 1 is late (culprit: rank 1). see flight/. "
        "The page: --action download merge_iter1/logs/stall_001.md"
    )
    with pytest.raises(LaunchError) as failed:
        run_job(
            dataclasses.replace(request_of("merge"), script="stalls.py"), volumes(checkpoints=checkpoints)
        )
    assert str(failed.value) == checkpoints.state["message"] == said
    assert f"[launch] {said}; $" in capfd.readouterr().out


def fast_clock() -> Callable[[], float]:
    """Advances by more than a minute at each reading, so that a commit is always due."""
    polls = itertools.count()
    return lambda: time.time() + 61 * next(polls)


def preempting_clock(checkpoints: DiskVolume) -> Callable[[], float]:
    """Interrupts once, like a preemption: at its first reading while the stage is followed."""
    readings = itertools.count()

    def clock() -> float:
        # After the commit before the start: is there money left, when was the last line, and then each poll.
        if checkpoints.commits and next(readings) == 2:
            raise KeyboardInterrupt
        return time.time()

    return clock


def test_a_preempted_call_is_recorded_as_interrupted_and_can_be_repeated(mounts):
    request, checkpoints = request_of("list-models"), DiskVolume("checkpoints")
    with pytest.raises(KeyboardInterrupt):
        run_job(request, volumes(checkpoints=checkpoints), preempting_clock(checkpoints))
    assert checkpoints.state["state"] == "interrupted"
    assert run_job(request, volumes()).state == "finished"


def test_a_commit_that_persisted_and_could_not_reload_counts(mounts, capfd):
    # As Modal's does while the stage has files of the volume open.

    def reload(commits: int) -> None:
        raise RuntimeError("there are open files preventing the operation")

    kinds = ("checkpoints", "corpus")
    busy = {kind: DiskVolume(kind, reload) for kind in kinds}
    assert run_job(request_of("list-models"), volumes(**busy), fast_clock()).state == "finished"
    assert "could not be committed" not in capfd.readouterr().out
    assert Spend(launch_folder("merge_iter1")).calls[-1].failed_commits == 0


def test_the_launcher_has_no_file_of_a_volume_open_during_a_commit(mounts):
    held: list[str] = []

    def look(commits: int) -> None:
        opened = (Path(link).readlink() for link in Path("/proc/self/fd").iterdir() if link.exists())
        held.extend(str(path) for path in opened if path.is_relative_to(mounts))

    run_job(request_of("list-models"), volumes(checkpoints=DiskVolume("checkpoints", look)), fast_clock())
    assert held == []


def test_checkpoints_are_committed_first_and_whatever_happens_to_other_volumes(mounts, capfd):
    corpus, checkpoints = LosingVolume("corpus", {1, 2}), DiskVolume("checkpoints")
    with pytest.raises(LaunchError, match="corpus"):
        run_job(request_of("list-models"), volumes(corpus=corpus, checkpoints=checkpoints))
    assert (checkpoints.commits, corpus.commits) == (1, 1)
    assert run_job(request_of("list-models"), volumes(checkpoints=checkpoints)).state == "finished"


def test_a_failed_commit_ends_no_stage_and_is_counted(mounts, capfd):
    checkpoints = LosingVolume("checkpoints", {2})
    run_job(request_of("list-models"), volumes(checkpoints=checkpoints), fast_clock())
    assert "the checkpoints volume could not be committed (1 in all)" in capfd.readouterr().out
    assert Spend(launch_folder("merge_iter1")).calls[-1].failed_commits == 1
    assert checkpoints.state["state"] == "finished"


def test_results_that_cannot_be_committed_are_an_error(mounts, monkeypatch):
    monkeypatch.setattr("drzero.launch.commits.RETRY_S", 0.0)
    with pytest.raises(LaunchError, match="what was written since its last commit is lost"):
        run_job(
            request_of("list-models"), volumes(checkpoints=LosingVolume("checkpoints", set(range(2, 99))))
        )


def test_a_run_is_accounted_for_and_stopped_during_a_long_commit(mounts):
    busy, released, seen = threading.Event(), threading.Event(), list[float]()

    def wait(commits: int) -> None:
        if commits == 2:
            busy.set()
            released.wait(60)
            busy.clear()

    clock = fast_clock()

    def watched_clock() -> float:
        if busy.is_set():
            (call,) = Spend(launch_folder("merge_iter1")).calls
            seen.append(call.until - call.began)
            if len(seen) > 2:
                released.set()
        return clock()

    request = request_of("flow-test", timeout=600, max_usd=None)
    with pytest.raises(LaunchError):
        run_job(request, volumes(checkpoints=DiskVolume("checkpoints", wait)), watched_clock)
    assert seen[0] < seen[-1]


def test_a_run_that_may_not_resume_is_not_continued(mounts):
    # It would start from the beginning in every call, as long as there is money.
    no_resume = request_of("demo-data", "trainer.resume_mode=disable", timeout=180, max_usd=None)
    with pytest.raises(LaunchError, match="another call would start from the beginning"):
        run_job(no_resume, volumes())


def test_a_call_of_a_day_leaves_a_quarter_of_an_hour_for_its_last_commit(mounts):
    folder = launch_folder("merge_iter1")
    folder.mkdir(parents=True)
    for timeout, margin in ((86400, 900), (600, MARGIN_S)):
        request = request_of("list-models", timeout=timeout, max_usd=None)
        commits = Commits({}, folder, mounts / "console.log")
        job = _Job(request, folder, mounts, commits, lambda: 0.0, Spend(folder), None)
        commits.close()
        assert job.stop_at == timeout - margin


def test_nothing_starts_when_the_money_is_spent(mounts):
    folder = launch_folder("merge_iter1")
    folder.mkdir(parents=True)
    spend = Spend(folder)
    spend.begin("earlier", 0, 0.0, 10.0).until = 3600.0
    spend.write()
    outcome = run_job(request_of("list-models", max_usd=10.0), volumes())
    assert outcome.state == "out of money"
    assert "raise compute.max_usd" in outcome.message
    assert not (folder / "console.log").exists()


@pytest.mark.slow("a service of its own; the loop is preempted in the first tier")
def test_a_stage_that_does_not_stop_in_time_is_stopped_and_reported(mounts, prepared, capfd):
    # A service never ends by itself. The clock runs ahead once it is up.
    seen: list[str] = []

    def clock() -> float:
        seen.append(capfd.readouterr().out)
        return time.time() + (1e6 if "ready after" in "".join(seen) else 0.0)

    words = [f"chroma.path={prepared.corpus / 'chromadb'}", "hardware=cpu"]
    with pytest.raises(LaunchError, match=r"no checkpoint within compute\.timeout=600 s"):
        run_job(request_of("serve-search", *words, timeout=600, max_usd=None), volumes(), clock)


def test_placeholders_are_replaced_by_the_volumes_folders(mounts, capfd):
    assert run_module("drzero.cli", ["diagnose", "{checkpoints}/nothing"]) == 2
    assert str(mounts / "checkpoints" / "nothing") in capfd.readouterr().err
