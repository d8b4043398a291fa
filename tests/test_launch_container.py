"""A launch inside its container: real stages as children, a volume that counts its commits."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable

import pytest

from launch.arguments import parse
from launch.container import MARGIN_S, Outcome, _Job, run_job, run_module
from launch.errors import LaunchError
from launch.request import Request, resolve
from launch.spend import Spend
from launch.volumes import launch_folder


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    for kind in ("corpus", "checkpoints", "cache"):
        (tmp_path / kind).mkdir()
        monkeypatch.setenv(f"DRZERO_MOUNT_{kind.upper()}", str(tmp_path / kind))
    return tmp_path


def request_of(*command: str, **compute) -> Request:
    """A launch on a CPU whose stage is these words."""
    request = resolve(parse(["--action", "merge", "--iteration", "1"]))
    machine = dataclasses.replace(request.compute, **compute)
    return dataclasses.replace(request, command=command, compute=machine)


class Commits:
    """In place of the volume: records the state at each commit."""

    def __init__(self) -> None:
        self.states: list[Outcome | None] = []

    def __call__(self) -> None:
        state = json.loads((launch_folder("merge_iter1") / "state.json").read_text())
        self.states.append(state["outcome"])


def test_a_stage_that_ends_well_is_finished_and_committed(mounts):
    commits = Commits()
    outcome = run_job(request_of("list-models"), commits)
    assert (outcome.state, outcome.exit_code) == ("finished", 0)
    assert commits.states[-1]["state"] == "finished"
    folder = launch_folder("merge_iter1")
    assert "qwen2.5-3b" in (folder / "console.log").read_text()
    assert "list-models" in (folder / "request.yaml").read_text()


def test_a_call_that_had_ended_is_not_repeated(mounts):
    request = request_of("list-models")
    first = run_job(request, lambda: None)
    size = (launch_folder("merge_iter1") / "console.log").stat().st_size
    assert run_job(request, lambda: None) == first
    assert (launch_folder("merge_iter1") / "console.log").stat().st_size == size


def test_a_new_launch_of_the_same_run_is_run(mounts):
    run_job(request_of("list-models"), lambda: None)
    size = (launch_folder("merge_iter1") / "console.log").stat().st_size
    run_job(dataclasses.replace(request_of("list-models"), id="another"), lambda: None)
    assert (launch_folder("merge_iter1") / "console.log").stat().st_size > size


def test_a_stage_that_fails_is_an_error_that_modal_sees(mounts):
    commits = Commits()
    with pytest.raises(LaunchError, match="exit code 2"):
        run_job(request_of("merge", "no.such.key=1"), commits)
    assert commits.states[-1]["state"] == "failed"


def test_a_failed_call_that_is_retried_is_run(mounts):
    request = request_of("merge", "no.such.key=1")
    for _ in range(2):
        with pytest.raises(LaunchError):
            run_job(request, lambda: None)
    assert len(Spend(launch_folder("merge_iter1")).calls) == 2


def test_a_run_of_another_running_launch_is_not_started(mounts):
    """As when a user who has lost a detached run's terminal launches it a second time."""
    seen: list[str] = []

    def second_launch() -> None:
        if not seen:
            seen.append("asked")
            with pytest.raises(LaunchError, match=r"another launch of this run was running \d+ s ago"):
                run_job(dataclasses.replace(request_of("list-models"), id="second"), lambda: None)

    assert run_job(request_of("list-models"), second_launch).state == "finished"
    assert seen


class FailsAtSecond:
    """A volume whose second commit, the first while the stage runs, fails."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.commits = error, 0

    def __call__(self) -> None:
        self.commits += 1
        if self.commits == 2:
            raise self.error


def fast_clock() -> Callable[[], float]:
    """Advances by more than a minute at each reading, so that a commit is always due."""
    polls = itertools.count()
    return lambda: time.time() + 61 * next(polls)


def test_a_preempted_call_is_recorded_as_interrupted_and_can_be_repeated(mounts):
    request = request_of("list-models")
    with pytest.raises(KeyboardInterrupt):
        run_job(request, FailsAtSecond(KeyboardInterrupt()), fast_clock())
    state = json.loads((launch_folder("merge_iter1") / "state.json").read_text())
    assert state["outcome"]["state"] == "interrupted"
    assert run_job(request, lambda: None).state == "finished"


def test_a_commit_that_fails_once_does_not_end_the_stage(mounts, capfd):
    commit = FailsAtSecond(RuntimeError("there are open files preventing the operation"))
    assert run_job(request_of("list-models"), commit, fast_clock()).state == "finished"
    assert "could not be committed, next try within a minute" in capfd.readouterr().out


def test_a_run_that_may_not_resume_is_not_continued(mounts):
    """It would start from the beginning in every call, as long as there is money."""
    no_resume = request_of("demo-data", "trainer.resume_mode=disable", timeout=180, max_usd=None)
    with pytest.raises(LaunchError, match="another call would start from the beginning"):
        run_job(no_resume, lambda: None)


def test_a_call_of_a_day_leaves_a_quarter_of_an_hour_for_its_last_commit(mounts):
    folder = launch_folder("merge_iter1")
    folder.mkdir(parents=True)
    for timeout, margin in ((86400, 900), (600, MARGIN_S)):
        request = request_of("list-models", timeout=timeout, max_usd=None)
        job = _Job(request, folder, lambda: None, lambda: 0.0, Spend(folder), None)
        assert job.stop_at == timeout - margin


def test_nothing_starts_when_the_money_is_spent(mounts):
    folder = launch_folder("merge_iter1")
    folder.mkdir(parents=True)
    spend = Spend(folder)
    spend.begin("earlier", 0, 0.0, 10.0).until = 3600.0
    spend.write()
    outcome = run_job(request_of("list-models", max_usd=10.0), lambda: None)
    assert outcome.state == "out of money"
    assert "raise compute.max_usd" in outcome.message
    assert not (folder / "console.log").exists()


def test_a_stage_that_does_not_stop_in_time_is_stopped_and_reported(mounts, prepared):
    """A service never ends by itself; the clock runs ahead once it is up."""
    log = launch_folder("merge_iter1") / "console.log"

    def clock() -> float:
        is_up = log.is_file() and "ready after" in log.read_text()
        return time.time() + (1e6 if is_up else 0.0)

    words = [f"chroma.path={prepared.corpus / 'chromadb'}", "hardware=cpu"]
    with pytest.raises(LaunchError, match=r"no checkpoint within compute\.timeout=600 s"):
        run_job(request_of("serve-search", *words, timeout=600, max_usd=None), lambda: None, clock)


def test_placeholders_are_replaced_by_the_volumes_folders(mounts, capfd):
    assert run_module("pipeline.cli", ["diagnose", "{checkpoints}/nothing"]) == 2
    assert str(mounts / "checkpoints" / "nothing") in capfd.readouterr().err
