"""From recorded stacks and facts to the culprit."""

import re
from typing import Any

import pytest

from drzero.ops.flow.snapshot import FlowPoint, Snapshot, Waiting
from drzero.ops.flow.workers import OpenCall, Worker
from drzero.ops.watchdog.collectives import position_of
from drzero.ops.watchdog.diagnosis import (
    ALIKE,
    GONE,
    Diagnosis,
    ServiceFact,
    Situation,
    diagnose,
    loop_blocker,
)
from drzero.ops.watchdog.movement import Stall
from drzero.ops.watchdog.stacks import Frame, Stack, Thread, group_stacks, minorities
from drzero.stages.watch import LANDMARKS

C10D = "torch/distributed/distributed_c10d.py"
WRAPPER = "_exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)"
IDLE_ACTOR = ("Worker.main_loop (ray/_private/worker.py:1025)", "<module> (default_worker.py:322)")
BATCH_WAIT = (
    "ReplayBuffer._wait_for_next_poll (verl/trainer/ppo/v1/replay_buffer.py:401)",
    "ReplayBuffer.sample (verl/trainer/ppo/v1/replay_buffer.py:516)",
    "PPOTrainer.fit (verl/trainer/ppo/v1/trainer_base.py:480)",
)
LOOP = (
    "BaseEventLoop._run_once (asyncio/base_events.py:1922)",
    "BaseEventLoop.run_forever (asyncio/base_events.py:607)",
    "run (asyncio/runners.py:190)",
)


def thread(*frames: str, name: str = "MainThread") -> Thread:
    parsed = [re.fullmatch(r"(.+) \((.+):(\d+)\)", frame) for frame in frames]
    return Thread(name, tuple(Frame(m[1], m[2], int(m[3])) for m in parsed if m))


def stack(pid: int, title: str, *frames: str, component: str = "trainer", state: str = "S") -> Stack:
    return Stack(pid, component, title, state, (thread(*frames),) if frames else ())


def rank(number: int, *frames: str, state: str = "S") -> Stack:
    return stack(number, f"rank {number}", *frames, state=state)


def worker(pid: int, *calls: OpenCall, silent_s: float = 1.0, loop_silent_s: float = 0.5) -> Worker:
    return Worker(pid, "worker", {}, {}, calls, silent_s, loop_silent_s)


def diagnosed(*stacks: Stack, phase: str = "update", **facts: Any) -> Diagnosis:
    known = {"stall": Stall("phase", phase, "", 70, 60), "disk_free_gb": 50.0, **facts}
    return diagnose(Situation(phase=phase, step=2, stacks=stacks, **known), LANDMARKS)


def check(found: Diagnosis, pattern: str, culprit: str, *words: str) -> None:
    """Compare a diagnosis, and look for words in its sentence, advice and evidence."""
    assert (found.pattern, found.culprit) == (pattern, culprit)
    said = "\n".join([found.sentence, found.advice, *found.evidence])
    assert all(word in said for word in words)


REDUCE = (f"all_reduce ({C10D}:3252)", WRAPPER, "forward (model.py:9)", "step (train.py:18)")
GATHER = (f"all_gather ({C10D}:4287)", WRAPPER, "backward (model.py:11)", "step (train.py:18)")
DRIVER = stack(1, "ray::TaskRunnerV1.run", *BATCH_WAIT)


OTHER_REDUCE = (REDUCE[0], WRAPPER, "backward (model.py:456)", "step (train.py:18)")
GPU_WAIT = ("synchronize (torch/cuda/__init__.py:1040)", "step (train.py:18)")
CLEANING = (
    f"destroy_process_group ({C10D}:2290)",
    "destroy (engine.py:90)",
    "close (trainer.py:30)",
    "__exit__ (trainer.py:12)",
)
RECEIVING = (
    f"recv_object_list ({C10D}:3600)",
    "_shape_inference (torch/distributed/pipelining/stage.py:1000)",
    "step (torch/distributed/pipelining/schedules.py:600)",
    "_run_train (runner.py:70)",
)
JOINING = (f"_store_based_barrier ({C10D}:990)", f"init_process_group ({C10D}:1800)", "main (train.py:5)")
LOADING = ("load_file (safetensors/torch.py:330)", "from_pretrained (transformers/modeling_utils.py:4000)")


def pipeline(line: int) -> tuple[str, ...]:
    """A stage that waits at this line of the schedule for a gradient or an input."""
    return (
        "_wait_batch_p2p (torch/distributed/pipelining/schedules.py:683)",
        f"ScheduleGPipe._step_microbatches (torch/distributed/pipelining/schedules.py:{line})",
        "PipelineScheduleSingle.step (torch/distributed/pipelining/schedules.py:785)",
        "learn (train.py:18)",
    )


# Ranks ------------------------------------------------------------------------------------------------------


RANKS = {
    "one rank raised": ([REDUCE, IDLE_ACTOR], "exception on some ranks", "rank 1"),
    "a rank is gone": ([REDUCE, REDUCE, ()], "exception on some ranks", "rank 2"),
    "two collectives": ([REDUCE, GATHER, REDUCE], "mismatched collectives", "rank 1"),
    "one collective, two lines": ([REDUCE, OTHER_REDUCE], "mismatched collectives", "rank 1"),
    "outside any collective": ([REDUCE, ("step (train.py:20)",)], "mismatched collectives", "rank 1"),
    "GPU and collective": ([GPU_WAIT, REDUCE], "mismatched collectives", "rank 1"),
    "same line": ([REDUCE, REDUCE], "same-collective time-out", "all ranks"),
    "GPUs": ([GPU_WAIT, GPU_WAIT], "same-collective time-out", "all ranks"),
    "clean-up": ([CLEANING, RECEIVING], "clean-up deadlock", "rank 0"),
    "one still loads": ([JOINING, LOADING], "initialisation deadlock", "rank 1"),
    "at work": ([("matmul (torch/nn/functional.py:1)", "step (train.py:1)")], "unknown", "rank 0"),
    "pipeline": ([pipeline(938), pipeline(910)], "shape mismatch between pipeline stages", "rank 0, rank 1"),
}
FACTS = {
    "one rank raised": {"errors": {"trainer": "ValueError: loss is NaN"}},
    "one still loads": {"phase": "start-up"},
}
WORDS = {
    "one rank raised": ["loss is NaN", "all_reduce called by forward (model.py:9)"],
    "pipeline": ["a stage sends another shape than the next expects: rank 0, rank 1"],
}


@pytest.mark.parametrize("name", RANKS)
def test_waiting_ranks_are_compared(name):
    ranks, pattern, culprit = RANKS[name]
    stacks = [rank(number, *frames, state="S" if frames else "Z") for number, frames in enumerate(ranks)]
    check(diagnosed(*stacks, **FACTS.get(name, {})), pattern, culprit, *WORDS.get(name, ()))


def test_ranks_that_wait_for_their_next_task_say_nothing_about_a_starved_trainer():
    diagnosis = diagnosed(DRIVER, rank(0, *IDLE_ACTOR), rank(1, *IDLE_ACTOR), phase="rollout")
    assert diagnosis.pattern == "rollout starvation"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((REDUCE[0], "__exit__ (torch/distributed/fsdp/_fully_shard/_fsdp_state.py:4)"), "collective"),
        (("ZipFile.close (zipfile.py:1900)", "save (model.py:9)", "step (train.py:18)"), "elsewhere"),
        (("Event.wait (threading.py:1)", "_python_exit (concurrent/futures/thread.py:31)"), "clean-up"),
    ],
    ids=["torch's own with block", "closing a file", "the interpreter ends"],
)
def test_only_real_clean_ups_count_as_clean_up(frames, kind):
    assert position_of(rank(0, *frames)).kind == kind


def test_idle_engines_that_wait_in_a_broadcast_are_no_ranks():
    title = "sglang::scheduler_DP0_TP1"
    waits = stack(9, title, f"broadcast ({C10D}:2800)", "recv_requests (scheduler.py:9)", component="solver")
    polls = stack(8, "sglang::scheduler_DP0_TP0", "recv_requests (scheduler.py:4)", component="solver")
    calls = [OpenCall("search", 7, 50.0, 60.0)]
    idle = stack(3, "ray::WorkerDict.actor", *IDLE_ACTOR)
    for others in ((), (idle,)):
        found = diagnosed(DRIVER, *others, waits, polls, phase="rollout", workers=[worker(7, *calls)])
        check(found, "rollout starvation", "retrieval")
    assert LANDMARKS.role(waits) == "SGLang of solver"


# Rollouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [("completion", "solver"), ("generation", "rollout engine"), ("reward", "reward workers")],
)
def test_starvation_is_blamed_on_the_process_with_open_calls(kind, culprit):
    calls = [OpenCall(kind, 7, 70.0, 600.0), OpenCall("rollout", 7, 90.0)]
    found = diagnosed(DRIVER, phase="rollout", workers=[worker(7, *calls)])
    check(found, "rollout starvation", culprit, f"1 {kind} calls open, the oldest for 70 s")


@pytest.mark.parametrize(
    ("service", "word"),
    [
        (ServiceFact("retrieval", "hung", "no answer within 4 s", 20), "is hung"),
        (ServiceFact("retrieval", "away", "status 424"), "its dependency does not answer"),
    ],
)
def test_starvation_is_blamed_on_a_service_that_does_not_work(service, word):
    calls = [OpenCall("search", 7, 20.0, 60.0)]
    found = diagnosed(DRIVER, phase="rollout", services=[service], workers=[worker(7, *calls)])
    check(found, "rollout starvation", "retrieval", word)


def test_failed_calls_are_summed_over_the_workers():
    workers = [Worker(pid, "w", {}, {"search": 2.0}, (), 1.0, None) for pid in (5, 6)]
    diagnosis = diagnosed(DRIVER, phase="rollout", workers=workers)
    assert "4 search calls have failed" in diagnosis.evidence


@pytest.mark.parametrize(
    ("age_s", "limit_s", "pattern"),
    [
        (70.0, None, "tool call without deadline"),
        (70.0, 30.0, "tool call without deadline"),
        (20.0, None, "rollout starvation"),
        (50.0, 60.0, "rollout starvation"),
    ],
)
def test_a_tool_call_without_a_working_deadline_is_named(age_s, limit_s, pattern):
    calls = [worker(7, OpenCall("search", 7, age_s, limit_s))]
    check(diagnosed(DRIVER, phase="rollout", workers=calls), pattern, "retrieval")


def test_a_worker_with_a_blocked_event_loop_is_named_with_the_blocking_line():
    blocked = stack(7, "ray::AgentLoopWorker.run", "tokenize (agent.py:40)", "turn (agent.py:60)", *LOOP)
    found = diagnosed(DRIVER, blocked, phase="rollout", workers=[worker(7, loop_silent_s=69)])
    check(found, "event loop blocked", "rollout worker (pid 7)", "tokenize (agent.py:40)")
    # While the loop turns, whatever runs on it is fine.
    busy = stack(7, "ray::AgentLoopWorker.run", "tokenize (agent.py:40)", *LOOP)
    assert diagnosed(DRIVER, busy, phase="rollout", workers=[worker(7)]).pattern == "rollout starvation"


@pytest.mark.parametrize(
    ("frames", "blocker"),
    [
        (("EpollSelector.select (selectors.py:468)", *LOOP), None),
        (("Runner.run (asyncio/runners.py:118)", "run (uvloop/__init__.py:90)"), None),
        (("Condition.wait (threading.py:327)", "main (a.py:1)"), None),
        # The caller of a blocking function of the standard library.
        (("socket.recv (socket.py:1)", "fetch (tool.py:3)", *LOOP), "fetch (tool.py:3)"),
    ],
)
def test_the_blocker_of_a_loop_is_the_callers_own_line(frames, blocker):
    found = loop_blocker(thread(*frames))
    assert (found and str(found)) == blocker


def test_a_service_with_a_blocked_loop_is_named_although_it_writes_no_progress():
    blocked = stack(9, "drzero: solver", "rebuild (x.py:4)", *LOOP, component="solver")
    found = diagnosed(blocked, services=[ServiceFact("solver", "hung", "no answer", 18)])
    check(found, "event loop blocked", "solver (pid 9)")


# Where the samples are -------------------------------------------------------------------------------------


def held(*names: str) -> Snapshot:
    """A trainer that waits for its buffer, while these points hold something."""
    points = {name: FlowPoint(depth=4, out=9, oldest_age_s=80.0, still_s=80) for name in names}
    return Snapshot(time=80, points=points, waiting=Waiting("buffer", 3, 8, 80))


def test_a_silent_phase_and_a_still_flow_get_the_same_diagnosis():
    calls = [OpenCall("search", 7, 50.0, 60.0), OpenCall("rollout", 7, 90.0)]
    by_phase = diagnosed(DRIVER, phase="rollout", workers=[worker(7, *calls)])
    starved = Stall("starved", "search", "", 62, 60)
    by_flow = diagnosed(phase="rollout", flow=held("prompts", "rollout", "search"), stall=starved)
    check(by_phase, "rollout starvation", "retrieval")
    check(by_flow, "rollout starvation", "retrieval")
    assert "of the samples it waits for, 3 of 8 are there after 80 s" in by_flow.evidence


def test_without_any_rollout_under_way_the_workers_are_at_fault():
    assert diagnosed(DRIVER, phase="rollout").culprit == "rollout workers"
    assert diagnosed(phase="rollout", flow=held("prompts")).culprit == "rollout workers"


def test_a_buffer_that_the_trainer_does_not_empty_is_the_trainers_fault():
    buffer = FlowPoint(depth=16, out=9, still_s=70, role="queue")
    busy = stack(1, "ray::TaskRunnerV1.run", "crunch (update.py:4)", "fit (trainer.py:9)")
    found = diagnosed(busy, phase="update", flow=Snapshot(time=80, points={"buffer": buffer}))
    check(found, "consumer not draining", "trainer", "which holds 16", "crunch")


@pytest.mark.parametrize(
    ("phase", "waiting"),
    [("update", None), ("rollout", Waiting("buffer", 3, 8, 10))],
    ids=["busy", "waiting for samples"],
)
def test_a_trainer_that_stops_counting_is_named(phase, waiting):
    silent = Stall("no counts", "trainer", "the trainer's process has written no counts for 70 s", 70, 60)
    found = diagnosed(phase=phase, flow=Snapshot(time=80, silent_s=70, waiting=waiting), stall=silent)
    check(found, "counts stopped", "trainer")


# The rest ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts", [{}, {"flow": held("rollout"), "stall": Stall("starved", "x", "", 9, 8)}], ids=["phase", "flow"]
)
def test_a_stopped_process_goes_before_the_starvation_it_causes(facts):
    stopped = stack(7, "ray::AgentLoopWorker.run", "select (selectors.py:468)", state="T")
    found = diagnosed(DRIVER, stopped, phase="rollout", **facts)
    check(found, "stopped process", "rollout worker", "kill -CONT 7")


def test_a_data_loader_is_named_with_the_data_sets_line():
    loading = stack(
        1,
        "ray::TaskRunnerV1.run",
        "read_row (rows.py:12)",
        "Rows.__getitem__ (rows.py:30)",
        "_MapDatasetFetcher.fetch (torch/utils/data/_utils/fetch.py:54)",
        "_SingleProcessDataLoaderIter._next_data (torch/utils/data/dataloader.py:788)",
    )
    diagnosis = diagnosed(loading, phase="weight-sync")
    assert diagnosis.pattern == "data loader stuck" and "read_row (rows.py:12)" in diagnosis.sentence


def test_a_driver_that_waits_to_end_is_a_clean_up_deadlock():
    writer = thread("Condition.wait (threading.py:327)", "write (metrics.py:5)", name="metrics-writer")
    joins = ("Thread.join (threading.py:1119)", "close (t.py:2)")
    ending = Stack(1, "trainer", "ray::TaskRunnerV1.run", threads=(thread(*joins), writer))
    diagnosis = diagnosed(ending, phase="done")
    assert diagnosis.pattern == "clean-up deadlock"
    assert any("metrics-writer" in line and "write (metrics.py:5)" in line for line in diagnosis.evidence)


KILLED = "the kernel killed pid 7 for lack of memory"
RAY_KILLED = {
    "trainer": "(raylet) node_manager.cc:2: 1 Workers (tasks / actors) killed due to memory pressure (OOM), "
    "0 Workers crashed due to other reasons at node (ID: x) over the last time period."
}
CRASHED = {
    "trainer": "(raylet) 0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed "
    "due to other reasons at node (ID: x) over the last time period."
}
SHORT = "the machine is out of memory (largest other programs: chrome 9.0 GiB)"
GPU_FULL = {"trainer": "torch.OutOfMemoryError: CUDA out of memory"}
BUS = {"trainer": "(raylet) *** SIGBUS received at time=1795740443 on cpu 1 ***"}
NCCL = {"trainer": "Error while creating shared memory segment /dev/shm/nccl-x: No space left on device (28)"}
LOADER = {"trainer": "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error."}
NO_SPACE = {"trainer": "OSError: [Errno 28] No space left on device"}
GARBAGE = {"trainer": "search.client.SearchRequestError: http://x is no retrieval service: it answered 'x'"}


@pytest.mark.parametrize(
    ("facts", "pattern", "culprit"),
    [
        ({"phase": "save", "disk_free_gb": 0.01}, "disk full", "trainer"),
        ({"phase": "save", "errors": NO_SPACE}, "disk full", "trainer"),
        ({"killed": KILLED}, "the machine is out of memory", "this machine's memory"),
        ({"errors": RAY_KILLED}, "the machine is out of memory", "this machine's memory"),
        ({"errors": GPU_FULL}, "out of memory", "trainer"),
        *(({"errors": error}, "no shared memory", "/dev/shm") for error in (BUS, NCCL, LOADER)),
        ({"errors": GARBAGE}, "retrieval answers garbage", "retrieval"),
    ],
)
def test_known_causes_go_first(facts, pattern, culprit):
    check(diagnosed(*([] if "phase" not in facts else [DRIVER]), **facts), pattern, culprit)


@pytest.mark.parametrize(
    ("facts", "culprit", "said"),
    [
        ({"errors": RAY_KILLED}, "this machine's memory", ["close other", SHORT, "killed due"]),
        ({"killed": KILLED}, "this machine's memory", [SHORT, KILLED]),
        ({"errors": CRASHED}, "rollout worker (pid 7)", ["worker died"]),
        ({"errors": GPU_FULL}, "rollout worker (pid 7)", ["GPU"]),
        ({"errors": NO_SPACE}, "rollout worker (pid 7)", ["disk full", "make room"]),
        ({"errors": BUS}, "/dev/shm", ["no shared memory", "--shm-size"]),
        ({}, "rollout worker (pid 7)", ["read trainer.log"]),
    ],
    ids=["Ray's kill", "the kernel's", "a crash", "GPU", "disk", "shared memory", "unknown"],
)
def test_a_worker_that_ended_is_named_with_the_reason(facts, culprit, said):
    who = "rollout worker (pid 7)"
    gone = Stall("gone", who, f"{who} ended, and nothing replaces it", 20, 15)
    found = diagnosed(DRIVER, phase="rollout", stall=gone, others="chrome 9.0 GiB", **facts)
    check(found, GONE, culprit, "rollout worker (pid 7) ended", *said)
    assert (SHORT in found.sentence) == (culprit == "this machine's memory")


def test_groups_that_score_alike_are_no_starvation():
    alike = Stall("alike", "buffer", "0 of 8 are there after 99 s, and 80 scored alike", 99, 0)
    check(diagnosed(DRIVER, phase="rollout", stall=alike), ALIKE, "the tasks or the model", "80 scored alike")


def test_a_dead_service_is_named_with_its_first_error():
    dead, errors = [ServiceFact("solver", "dead")], {"solver": "ValueError: x"}
    found = diagnosed(DRIVER, phase="rollout", services=dead, errors=errors)
    check(found, "dead process", "solver")
    assert found.evidence == ("first error: ValueError: x",)


def test_without_a_known_pattern_the_odd_process_is_the_suspect():
    same = ("wait (a.py:1)", "main (a.py:2)")
    odd = stack(3, "c", "crunch (b.py:9)", "main (a.py:2)")
    diagnosis = diagnosed(stack(1, "a", *same), stack(2, "b", *same), odd, phase="update")
    assert diagnosis.pattern == "unknown" and "crunch (b.py:9)" in diagnosis.sentence
    assert diagnosed().pattern == "unknown"  # without any stack


def test_processes_at_the_same_place_are_one_group_whatever_their_line():
    one, two, three = rank(0, "f (a.py:1)"), rank(1, "f (a.py:2)"), rank(2, "g (a.py:1)")
    assert group_stacks([three, one, two]) == [[one, two], [three]]
    assert minorities([one, two, three]) == [three]
    assert minorities([one, three]) == []  # of two, neither is the majority
