"""When a run counts as stalled, and how its processes are read."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from search_parts import wait_for

from drzero.ops.flow.snapshot import FlowPoint, Snapshot, Waiting
from drzero.ops.flow.workers import finished, read_workers
from drzero.ops.process.child import Child, Command
from drzero.ops.process.logs import EventLog
from drzero.ops.process.tree import descendants
from drzero.ops.records import read_json_lines
from drzero.ops.resources.cgroup import OomWatch
from drzero.ops.resources.gpu import Gpus
from drzero.ops.resources.sampler import Sampler
from drzero.ops.services.services import ServiceGroup
from drzero.ops.telemetry import Progress
from drzero.ops.watchdog import stacks
from drzero.ops.watchdog.diagnosis import Landmarks, Situation, diagnose
from drzero.ops.watchdog.movement import NewLines, Patience, PhaseClock, RollCall, Stall
from drzero.ops.watchdog.report import last_line, stall_report
from drzero.ops.watchdog.stacks import dump_stacks, parse_dump, why_unreadable
from drzero.ops.watchdog.watchdog import Watchdog, WatchPlan

PATIENCE = Patience(cold_start_s=300, floor_s=60, factor=2, fixed={"start-up": 900})


def beats(path: Path, *entries: tuple[float, int, str], cut_off: str = "") -> None:
    lines = [json.dumps({"time": t, "step": step, "phase": phase}) + "\n" for t, step, phase in entries]
    with path.open("a") as file:
        file.write("".join(lines) + cut_off)


# Phases and limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "durations", "silences", "limit"),
    [
        ("update", [], [], 300),
        ("update", [10.0], [10.0], 60),
        ("update", [100.0, 40.0, 100.0], [100.0, 40.0, 100.0], 200),
        ("update", [1000.0, 10.0, 12.0], [1000.0, 10.0, 12.0], 60),
        ("update", [1000.0], [45.0], 90),
        ("start-up", [1.0], [1.0], 900),
    ],
    ids=["the first time", "short", "usual", "one slow start", "long with counters", "a fixed limit"],
)
def test_a_phase_may_be_silent_for_twice_its_usual_time(phase, durations, silences, limit):
    assert PATIENCE.phase_limit_s(phase, durations, silences) == limit


def test_the_clock_follows_the_phases_and_the_movement_in_them(tmp_path):
    path = tmp_path / "heartbeats.jsonl"
    beats(path, (-9, 7, "update"))  # of an earlier start
    clock = PhaseClock(path, PATIENCE, started=0.0)
    clock.read()
    assert (clock.beat.phase, clock.limit_s(), clock.silent_s(50)) == ("start-up", 900, 50)
    assert clock.beat.step == 0
    beats(path, (100, 1, "rollout"), cut_off='{"time": 200, "st')
    clock.read()
    clock.moved(130)
    clock.moved(150)
    assert (clock.beat.phase, clock.limit_s(), clock.silent_s(160)) == ("rollout", 300, 10)
    with path.open("a") as file:
        file.write('ep": 1, "phase": "update"}\n{"time": 210, "step": null, "phase": "spoiled"}\n')
    beats(path, (220, 2, "rollout"))
    clock.read()
    # The first rollout took 100 s and was silent for 50 s at most.
    assert (clock.beat.step, clock.limit_s(), clock.entered) == (2, 100, {"rollout", "update"})


WORKERS = {1: "rollout worker", 2: "rollout worker", 3: "reward worker"}


@pytest.mark.parametrize(
    ("later", "missing"),
    [
        (WORKERS, []),
        ({1: "rollout worker", 3: "reward worker"}, [2]),
        ({1: "rollout worker", 3: "reward worker", 9: "rollout worker"}, []),
        ({3: "reward worker", 9: "rollout worker"}, [2]),
        ({}, [1, 2, 3]),
    ],
    ids=["all there", "one ended", "replaced", "one replaced", "all"],
)
def test_a_worker_that_ended_without_a_replacement_is_a_stall(later, missing):
    roll = RollCall()
    roll.take(WORKERS, 100.0)
    roll.take(later, 105.0)
    assert list(roll.missing) == missing and roll.stall(119.9) is None
    assert bool(found := roll.stall(120.0)) == bool(missing)
    assert found is None or f"(pid {missing[0]})" in found.text
    roll.take(WORKERS | later, 125.0)
    assert roll.stall(150.0) is None, "back again"


def test_a_repeated_line_is_not_new(tmp_path):
    log = tmp_path / "trainer.log"
    log.write_text("of an earlier start\n")
    lines, warning = NewLines(log), "(autoscaler) No available node can run this"
    logged = [(warning, True), (warning, False)]
    logged += [(f"Loading shards: {n}/5 [00:0{n}<00:04]", True) for n in (1, 2)]
    with log.open("a") as file:
        for second, (text, is_new) in enumerate(logged):
            file.write(f"2026-05-01 10:00:{second:02d},123 {text}\r")
            file.flush()
            assert lines.have_come() == is_new
    assert not lines.have_come()


@pytest.fixture
def watchdog(tmp_path):
    # One that polls only when the test does, on a run in the first step's save.
    (tmp_path / "logs").mkdir()
    plan = WatchPlan(
        folder=tmp_path,
        heartbeats=tmp_path / "heartbeats.jsonl",
        progress=tmp_path / "progress",
        patience=Patience(cold_start_s=300, floor_s=60),
        writing_phases={"save": "global_step_*"},
        recorder=tmp_path / "recorder",
        flight=tmp_path / "flight",
    )
    command = Command(name="trainer", command=("sleep", "600"), log_path=tmp_path / "logs" / "trainer.log")
    with ServiceGroup([]) as services:
        main = Child(command, 1)
        watching = Watchdog(plan, services, main, EventLog(tmp_path / "events.jsonl"))
        watching.close()
        yield watching
        main.stop()


def test_a_growing_checkpoint_is_movement(tmp_path, watchdog):
    began = time.time()
    beats(tmp_path / "heartbeats.jsonl", (began, 1, "save"))
    (tmp_path / "global_step_1" / "actor").mkdir(parents=True)
    for megabytes in (1, 2):
        (tmp_path / "global_step_1" / "actor" / "rank_0.pt").write_bytes(b"x" * (megabytes << 20))
        watchdog.poll(began + 290 * megabytes)
        assert watchdog.movement.clock.silent_s(began + 290 * megabytes) == 0
    watchdog.poll(began + 590)
    assert watchdog.movement.clock.silent_s(began + 590) == pytest.approx(10)


@pytest.mark.parametrize("flow", [None, Snapshot(time=1, waiting=Waiting("buffer", 3, 8, 3600))])
def test_time_in_which_the_machine_was_suspended_does_not_count(tmp_path, watchdog, flow):
    began = time.time()
    beats(tmp_path / "heartbeats.jsonl", (began, 1, "update"))
    watchdog.movement.signs = replace(watchdog.plan, flow=lambda: flow)
    watchdog.poll(began + 2)
    watchdog._poll_ended = began + 2
    watchdog.poll(began + 3602)
    assert watchdog.diagnosis is None and watchdog.movement.clock.silent_s(began + 3602) == pytest.approx(2)


def test_a_lasting_stall_is_reported_every_ten_minutes_and_ends_with_the_next_movement(tmp_path, watchdog):
    began = time.time()
    beats(tmp_path / "heartbeats.jsonl", (began, 1, "update"))
    for seconds in (301, 303, 899, 902):
        watchdog.poll(began + seconds)
        assert watchdog.diagnosis is not None
    pages = sorted(path.name for path in (tmp_path / "logs").glob("stall_*.md"))
    assert pages == ["stall_001.md", "stall_002.md"]
    beats(tmp_path / "heartbeats.jsonl", (began + 903, 2, "rollout"))
    watchdog.poll(began + 907)
    assert watchdog.diagnosis is None


def test_at_a_stall_the_ranks_are_asked_for_their_collectives_which_are_kept(tmp_path, watchdog):
    (tmp_path / "recorder").mkdir()
    os.mkfifo(tmp_path / "recorder" / "rank_0.pipe")
    pipe = os.open(tmp_path / "recorder" / "rank_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "recorder" / "rank_0").write_text("collectives")
    began = time.time()
    beats(tmp_path / "heartbeats.jsonl", (began, 1, "update"))
    watchdog.poll(began + 301)
    assert os.read(pipe, 9)
    os.close(pipe)
    assert [path.read_text() for path in (tmp_path / "flight").iterdir()] == ["collectives"]


def test_a_flow_that_stands_still_is_reported_once_though_the_phase_has_patience_left(tmp_path, watchdog):
    began = time.time()
    beats(tmp_path / "heartbeats.jsonl", (began, 1, "rollout"))
    flow: list[Snapshot] = []
    plan = replace(watchdog.plan, flow=lambda: flow[-1] if flow else None)
    marks = replace(plan.landmarks, waits_on={"buffer": ("search",)}, answered_by={"search": "retrieval"})
    watchdog.plan = replace(plan, landmarks=marks)
    watchdog.movement.signs, watchdog.movement._waits_on = watchdog.plan, marks.waits_on
    search = FlowPoint(depth=4, out=9, oldest_age_s=70, still_s=70)
    flow.append(Snapshot(time=1, points={"search": search}, waiting=Waiting("buffer", 3, 8, 70)))
    for seconds in (71, 73, 310):  # at 310 s the phase's limit of 300 s has passed as well
        watchdog.poll(began + seconds)
    [event] = [e for e in read_json_lines(tmp_path / "events.jsonl") if e["kind"] == "stall"]
    assert (event["pattern"], event["component"]) == ("rollout starvation", "retrieval")
    assert (event["silent_s"], event["limit_s"]) == (70, 60)
    assert len(list((tmp_path / "logs").glob("stall_*.md"))) == 1
    flow.append(Snapshot(time=2, points={"search": replace(search, still_s=0)}))
    beats(tmp_path / "heartbeats.jsonl", (began + 311, 1, "update"))
    watchdog.poll(began + 312)
    assert watchdog.diagnosis is None


def test_a_poll_that_does_not_end_is_reported_once(capsys, watchdog):
    watchdog._poll_began = time.monotonic() - 61
    watchdog.warn_if_stuck()
    watchdog.warn_if_stuck()
    assert capsys.readouterr().out.count("can no longer watch the run") == 1


# Progress ---------------------------------------------------------------------------------------------------


def test_a_workers_file_shows_what_is_done_failed_and_open(tmp_path):
    progress = Progress(tmp_path / f"{os.getpid()}.json")
    with progress.waiting("search", limit_s=60):
        pass
    with pytest.raises(ValueError, match="no"), progress.waiting("completion"):
        raise ValueError("no")
    progress.poll("token", lambda: 17)
    with progress.waiting("search", limit_s=60):

        def whole():
            return [w for w in read_workers(tmp_path, time.time()) if w.calls and "token" in w.done]

        wait_for(whole, 20)
        [worker] = whole()
    assert (worker.done, worker.failed) == ({"search": 1, "token": 17}, {"completion": 1})
    [call] = worker.calls
    assert (call.kind, call.limit_s, call.pid) == ("search", 60, os.getpid())
    assert worker.silent_s < 5 and worker.loop_silent_s is None


def test_a_blocked_event_loop_shows_in_the_file(tmp_path):
    code = """
        import asyncio, time
        from drzero.ops.telemetry import waiting
        async def main():
            with waiting("rollout"):
                time.sleep(600)
        asyncio.run(main())
    """
    environment = {**os.environ, "DRZERO_PROGRESS_DIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=environment)

    def is_silent():
        found = read_workers(tmp_path, time.time(), [process.pid])
        return any(worker.loop_silent_s and worker.loop_silent_s >= 2 for worker in found)

    try:
        wait_for(is_silent, 30)
    finally:
        process.kill()
        process.wait()


def test_counting_works_without_a_file(tmp_path):
    progress = Progress(None)
    with progress.waiting("search"):
        assert progress.snapshot()["open"][0][0] == "search"
    assert progress._thread is None
    (tmp_path / "progress").write_text("a file in place of the folder")
    progress = Progress(tmp_path / "progress" / "1.json")
    with progress.waiting("search"):
        pass
    assert progress.snapshot()["done"] == {"search": 1}


def test_a_half_written_file_is_left_out(tmp_path):
    (tmp_path / "1.json").write_text('{"time": 1, "pid"')
    assert read_workers(tmp_path, 10.0) == [] and finished([]) == {}


# Processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    code = "import time\ndef stand_here():\n    print('up', flush=True); time.sleep(600)\nstand_here()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"up\n"
    yield process  # type: ignore[misc]
    process.kill()
    process.wait()


def until(process: "subprocess.Popen[bytes]", status: str) -> None:
    """Wait until the system says that the process is in this state."""
    wait_for(lambda: psutil.Process(process.pid).status() == status, 10)


def test_a_stack_is_read_without_touching_the_process_even_when_it_is_stopped(sleeper):
    for state, status in (("S", psutil.STATUS_SLEEPING), ("T", psutil.STATUS_STOPPED)):
        if state == "T":
            sleeper.send_signal(signal.SIGSTOP)
        until(sleeper, status)
        [process] = descendants([sleeper.pid])[sleeper.pid]
        [stack] = dump_stacks([("main", process)])
        if stack.failure:
            pytest.skip(f"this machine does not allow it: {stack.failure}")
        assert stack.state == state and stack.main[0].name == "stand_here"


def test_a_failed_dump_is_noted_and_is_no_error():
    process = subprocess.Popen(["sleep", "600"])
    [known] = descendants([process.pid])[process.pid]
    assert dump_stacks([("main", known)])[0].failure is None  # no Python runs there
    [own] = [p for p in descendants([os.getpid()])[os.getpid()] if p.pid == os.getpid()]
    process.kill()
    process.wait()
    assert "no time left" in (dump_stacks([("main", own)], deadline_s=0)[0].failure or "")


def test_a_machine_without_py_spy_is_reported_before_a_run(monkeypatch):
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    assert why_unreadable() == "py-spy is not installed"


def test_the_tree_has_descendants_with_their_use(sleeper):
    tree = descendants([os.getpid(), sleeper.pid])
    assert [process.pid for process in tree[sleeper.pid]] == [sleeper.pid]
    assert sleeper.pid not in [process.pid for process in tree[os.getpid()]]  # it counts for the nearer root
    [process] = tree[sleeper.pid]
    assert process.rss_bytes > 1 << 20 and process.is_python and "stand_here" in process.title
    assert descendants([2**22 + 1]) == {2**22 + 1: []}


def test_py_spys_json_becomes_frames():
    frame = {"name": "f", "filename": "/x/a.py", "short_filename": "a.py", "line": 3}
    record = {"thread_name": "MainThread", "active": True, "frames": [frame]}
    [thread] = parse_dump(json.dumps([record]))
    assert (thread.name, thread.active, str(thread.frames[0])) == ("MainThread", True, "f (a.py:3)")


def test_samples_are_a_line_a_component_and_one_of_the_host(tmp_path, sleeper):
    sampler = Sampler(tmp_path / "samples.jsonl")
    for now in (10.0, 15.0):
        sampler.sample({"retrieval": sleeper.pid}, now)
    records = read_json_lines(tmp_path / "samples.jsonl")
    assert [record["component"] for record in records] == ["retrieval", "host"] * 2
    assert records[2]["rss_mb"] > 1 and records[2]["cpu_share"] >= 0 and records[3]["disk_free_gb"] > 0


def test_a_machine_without_nvml_has_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus().read() == []


def test_gpus_are_read_through_nvml_and_a_lost_one_is_left_out(monkeypatch):
    def handle(index: int) -> int:
        if index == 1:
            raise RuntimeError("GPU is lost")
        return index

    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetName=lambda gpu: "NVIDIA H200",
        nvmlDeviceGetCudaComputeCapability=lambda gpu: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=3 << 30, total=80 << 30),
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=97),
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [SimpleNamespace(pid=5, usedGpuMemory=1 << 30)],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    [gpu] = Gpus().read()
    assert (gpu.used_mb, gpu.total_mb, gpu.busy_percent, gpu.memory_mb_of) == (3072, 81920, 97, {5: 1024})
    assert (gpu.name, gpu.capability) == ("NVIDIA H200", (9, 0))


# Out of memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("membership", "counter"),
    [
        ("0::/run/job", "run/job/memory.events"),
        ("4:memory:/job\n0::/", "memory/job/memory.oom_control"),
        ("4:cpu,memory:/host/only", "memory/memory.oom_control"),
    ],
    ids=["version 2", "version 1", "version 1 in a container"],
)
def test_kills_are_counted_from_the_cgroup(tmp_path, membership, counter):
    (tmp_path / "membership").write_text(membership)
    path = tmp_path / counter
    path.parent.mkdir(parents=True)
    path.write_text("oom_kill_disable 0\noom_kill 2\n")
    watch = OomWatch(tmp_path, tmp_path / "no log", tmp_path / "membership")
    assert watch.explain({1}) is None
    path.write_text("oom_kill_disable 0\noom_kill 3\n")
    explained = "the kernel has killed 1 process(es) of this cgroup for lack of memory meanwhile"
    assert watch.explain({1}) == explained


def test_a_kill_in_the_kernels_log_is_explained_by_pid(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,2,-;Memory cgroup out of memory: Killed process 17 (python) total-vm:1kB\n"
        "6,1,2,-;Out of memory: Killed process 18 (ray)\n"
    )
    watch = OomWatch(tmp_path, log)
    assert watch.explain({3, 17}) == "the kernel killed pid 17 for lack of memory"
    assert watch.explain({99}) is None
    watch.close()


def test_a_kernel_log_that_cannot_be_read_is_given_up(tmp_path):
    (tmp_path / "folder").mkdir()
    watch = OomWatch(tmp_path, tmp_path / "folder")  # it opens, and every read fails
    assert watch.explain({1}) is None


def test_events_outlive_a_full_disk_and_a_line_that_was_cut_off(tmp_path):
    EventLog(Path("/dev/full/x")).add("crash", "retrieval", "died")
    EventLog(None).add("crash", "retrieval", "died")
    log = EventLog(tmp_path / "logs" / "events.jsonl")
    log.add("crash", "retrieval", "died", code=-9)
    with (tmp_path / "logs" / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "ki')
    [event] = read_json_lines(tmp_path / "logs" / "events.jsonl")
    assert (event["kind"], event["component"], event["code"]) == ("crash", "retrieval", -9)


def test_a_page_has_the_last_line_of_what_others_write_about_the_run(tmp_path):
    stream = tmp_path / "flow.jsonl"
    stream.write_text('{"depth": 1}\n{"depth": 7}\n{"dep')
    assert last_line(stream) == '{"depth": 7}' and last_line(tmp_path / "none") == ""
    situation = Situation(phase="rollout", step=2, stall=Stall("phase", "rollout", "", 70, 60))
    diagnosis, marks = diagnose(situation, Landmarks()), Landmarks()
    page = stall_report(situation, diagnosis, marks, {}, {"flow": last_line(stream)}, 1)
    assert '## flow\n\n```\n{"depth": 7}\n```' in page
