"""From recorded stacks and facts to the culprit: known hangs are distinguished, each with its evidence."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from drzero.ops.flow.snapshot import FlowPoint, Snapshot, Waiting
from drzero.ops.flow.workers import OpenCall, Worker
from drzero.ops.watchdog.collectives import position_of
from drzero.ops.watchdog.diagnosis import Diagnosis, Landmarks, ServiceFact, Situation, diagnose, loop_blocker
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


def stack(
    pid: int,
    title: str,
    *frames: str,
    component: str = "trainer",
    state: str = "S",
    more: Sequence[Thread] = (),
) -> Stack:
    return Stack(pid, component, title, state, (thread(*frames), *more) if frames else ())


def rank(number: int, *frames: str, state: str = "S") -> Stack:
    return stack(number, f"rank {number}", *frames, state=state)


def worker(pid: int, *calls: OpenCall, silent_s: float = 1.0, loop_silent_s: float = 0.5) -> Worker:
    return Worker(pid, "worker", {}, {}, calls, silent_s, loop_silent_s)


def diagnosed(
    *stacks: Stack,
    phase: str = "update",
    services: Sequence[ServiceFact] = (),
    workers: Sequence[Worker] = (),
    errors: dict[str, str] | None = None,
    disk_free_gb: float = 50.0,
    oom_kills: int = 0,
    flow: Snapshot | None = None,
    stall: Stall | None = None,
    landmarks: Landmarks = LANDMARKS,
) -> Diagnosis:
    situation = Situation(
        phase=phase,
        step=2,
        stall=stall or Stall("phase", phase, "", 70, 60),
        stacks=stacks,
        services=services,
        workers=workers,
        errors=errors or {},
        disk_free_gb=disk_free_gb,
        oom_kills=oom_kills,
        flow=flow,
    )
    return diagnose(situation, landmarks)


REDUCE = (f"all_reduce ({C10D}:3252)", WRAPPER, "forward (model.py:9)", "step (train.py:18)")
GATHER = (f"all_gather ({C10D}:4287)", WRAPPER, "backward (model.py:11)", "step (train.py:18)")
DRIVER = stack(1, "ray::TaskRunnerV1.run", *BATCH_WAIT)


# Ranks ------------------------------------------------------------------------------------------------------


def test_a_rank_that_raised_while_the_others_wait_is_named_with_its_error() -> None:
    diagnosis = diagnosed(
        rank(0, *REDUCE), rank(1, *IDLE_ACTOR), errors={"trainer": "ValueError: loss is NaN"}
    )
    assert (diagnosis.pattern, diagnosis.culprit) == ("exception on some ranks", "rank 1")
    assert any("loss is NaN" in line for line in diagnosis.evidence)
    assert any("all_reduce called by forward (model.py:9)" in line for line in diagnosis.evidence)


def test_a_rank_that_is_gone_while_the_others_wait_has_raised() -> None:
    diagnosis = diagnosed(rank(0, *REDUCE), rank(1, *REDUCE), rank(2, state="Z"))
    assert (diagnosis.pattern, diagnosis.culprit) == ("exception on some ranks", "rank 2")


def test_ranks_in_different_collectives_are_a_mismatch_and_the_minority_is_suspect() -> None:
    diagnosis = diagnosed(rank(0, *REDUCE), rank(1, *GATHER), rank(2, *REDUCE))
    assert (diagnosis.pattern, diagnosis.culprit) == ("mismatched collectives", "rank 1")


def test_the_same_collective_called_from_different_lines_is_a_mismatch() -> None:
    other = (REDUCE[0], WRAPPER, "backward (model.py:456)", "step (train.py:18)")
    assert diagnosed(rank(0, *REDUCE), rank(1, *other)).pattern == "mismatched collectives"


def test_a_rank_outside_any_collective_and_without_an_error_is_a_mismatch() -> None:
    diagnosis = diagnosed(rank(0, *REDUCE), rank(1, "log_metrics (train.py:30)", "step (train.py:20)"))
    assert (diagnosis.pattern, diagnosis.culprit) == ("mismatched collectives", "rank 1")


def test_all_ranks_at_the_same_line_of_the_same_collective_are_a_time_out() -> None:
    diagnosis = diagnosed(rank(0, *REDUCE), rank(1, *REDUCE))
    assert (diagnosis.pattern, diagnosis.culprit) == ("same-collective time-out", "all ranks")


def test_all_ranks_waiting_for_their_gpu_at_the_same_line_are_a_time_out_as_well() -> None:
    waits = ("synchronize (torch/cuda/__init__.py:1040)", "step (train.py:18)")
    assert diagnosed(rank(0, *waits), rank(1, *waits)).pattern == "same-collective time-out"
    assert diagnosed(rank(0, *waits), rank(1, *REDUCE)).pattern == "mismatched collectives"


def test_ranks_that_wait_for_their_next_task_say_nothing_about_a_starved_trainer() -> None:
    diagnosis = diagnosed(DRIVER, rank(0, *IDLE_ACTOR), rank(1, *IDLE_ACTOR), phase="rollout")
    assert diagnosis.pattern == "rollout starvation"


def test_a_rank_in_its_clean_up_while_another_receives_is_a_clean_up_deadlock() -> None:
    cleaning = (
        f"destroy_process_group ({C10D}:2290)",
        "destroy (engine.py:90)",
        "close (trainer.py:30)",
        "__exit__ (trainer.py:12)",
    )
    receiving = (
        f"recv_object_list ({C10D}:3600)",
        "_shape_inference (torch/distributed/pipelining/stage.py:1000)",
        "step (torch/distributed/pipelining/schedules.py:600)",
        "_run_train (runner.py:70)",
    )
    diagnosis = diagnosed(rank(0, *cleaning), rank(1, *receiving))
    assert (diagnosis.pattern, diagnosis.culprit) == ("clean-up deadlock", "rank 0")


def test_a_with_block_of_torchs_own_is_no_clean_up() -> None:
    inside = (
        REDUCE[0],
        "__exit__ (torch/distributed/fsdp/_fully_shard/_fsdp_state.py:4)",
        "forward (model.py:9)",
    )
    assert position_of(rank(0, *inside)).kind == "collective"


def test_a_rank_that_still_loads_while_another_joins_the_group_is_an_initialisation_deadlock() -> None:
    joining = (f"_store_based_barrier ({C10D}:990)", f"init_process_group ({C10D}:1800)", "main (train.py:5)")
    loading = (
        "load_file (safetensors/torch.py:330)",
        "from_pretrained (transformers/modeling_utils.py:4000)",
    )
    diagnosis = diagnosed(rank(0, *joining), rank(1, *loading), phase="start-up")
    assert (diagnosis.pattern, diagnosis.culprit) == ("initialisation deadlock", "rank 1")


def test_pipeline_stages_that_wait_for_each_other_disagree_on_a_shape() -> None:
    def stage(line: int) -> tuple[str, ...]:
        """One waits for a gradient and the other for its input, at two lines of the schedule."""
        return (
            "_wait_batch_p2p (torch/distributed/pipelining/schedules.py:683)",
            f"ScheduleGPipe._step_microbatches (torch/distributed/pipelining/schedules.py:{line})",
            "PipelineScheduleSingle.step (torch/distributed/pipelining/schedules.py:785)",
            "learn (train.py:18)",
        )

    diagnosis = diagnosed(rank(0, *stage(938)), rank(1, *stage(910)))
    assert diagnosis.pattern == "shape mismatch between pipeline stages"
    assert "a stage sends another shape than the next expects: rank 0, rank 1" in diagnosis.sentence


def test_idle_engines_that_wait_in_a_broadcast_are_no_ranks() -> None:
    title = "sglang::scheduler_DP0_TP1"
    waits = stack(9, title, f"broadcast ({C10D}:2800)", "recv_requests (scheduler.py:9)", component="solver")
    polls = stack(8, "sglang::scheduler_DP0_TP0", "recv_requests (scheduler.py:4)", component="solver")
    calls = [OpenCall("search", 7, 50.0, 60.0)]
    idle = stack(3, "ray::WorkerDict.actor", *IDLE_ACTOR)
    for others in ((), (idle,)):
        diagnosis = diagnosed(DRIVER, *others, waits, polls, phase="rollout", workers=[worker(7, *calls)])
        assert (diagnosis.pattern, diagnosis.culprit) == ("rollout starvation", "retrieval")
    assert LANDMARKS.role(waits) == "SGLang of solver"


def test_a_file_that_is_closed_is_no_clean_up() -> None:
    saving = ("ZipFile.close (zipfile.py:1900)", "save (model.py:9)", "step (train.py:18)")
    assert position_of(rank(0, *saving)).kind == "elsewhere"
    ending = ("Event.wait (threading.py:1)", "_python_exit (concurrent/futures/thread.py:31)")
    assert position_of(rank(0, *ending)).kind == "clean-up"


def test_ranks_that_work_are_no_pattern() -> None:
    assert diagnosed(rank(0, "matmul (torch/nn/functional.py:1)", "step (train.py:1)")).pattern == "unknown"


# Rollouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [("completion", "solver"), ("generation", "rollout engine"), ("reward", "reward workers")],
)
def test_starvation_is_blamed_on_the_process_with_open_calls(kind: str, culprit: str) -> None:
    calls = [OpenCall(kind, 7, 70.0, 600.0), OpenCall("rollout", 7, 90.0)]
    diagnosis = diagnosed(DRIVER, phase="rollout", workers=[worker(7, *calls)])
    assert (diagnosis.pattern, diagnosis.culprit) == ("rollout starvation", culprit)
    assert any(f"1 {kind} calls open, the oldest for 70 s" in line for line in diagnosis.evidence)


def test_starvation_by_a_hung_service_is_blamed_on_the_service() -> None:
    retrieval = ServiceFact("retrieval", "hung", "no answer within 4 s", 20)
    calls = [OpenCall("search", 7, 20.0, 60.0)]
    diagnosis = diagnosed(DRIVER, phase="rollout", services=[retrieval], workers=[worker(7, *calls)])
    assert (diagnosis.pattern, diagnosis.culprit) == ("rollout starvation", "retrieval")


def test_a_service_whose_index_is_away_starves_the_rollouts() -> None:
    diagnosis = diagnosed(DRIVER, phase="rollout", services=[ServiceFact("retrieval", "away", "status 424")])
    assert diagnosis.culprit == "retrieval" and "its dependency does not answer" in diagnosis.sentence


def test_failed_calls_are_summed_over_the_workers() -> None:
    workers = [Worker(pid, "w", {}, {"search": 2.0}, (), 1.0, None) for pid in (5, 6)]
    diagnosis = diagnosed(DRIVER, phase="rollout", workers=workers)
    assert "4 search calls have failed" in diagnosis.evidence


def test_starvation_without_any_rollout_under_way_is_the_workers_fault() -> None:
    assert diagnosed(DRIVER, phase="rollout").culprit == "rollout workers"


@pytest.mark.parametrize(
    ("age_s", "limit_s", "pattern"),
    [
        (70.0, None, "tool call without deadline"),
        (70.0, 30.0, "tool call without deadline"),
        (20.0, None, "rollout starvation"),
        (50.0, 60.0, "rollout starvation"),
    ],
)
def test_a_tool_call_is_without_deadline_when_it_outlives_any(
    age_s: float, limit_s: float | None, pattern: str
) -> None:
    diagnosis = diagnosed(DRIVER, phase="rollout", workers=[worker(7, OpenCall("search", 7, age_s, limit_s))])
    assert (diagnosis.pattern, diagnosis.culprit) == (pattern, "retrieval")


def test_a_worker_whose_event_loop_is_blocked_is_named_with_the_blocking_line() -> None:
    blocked = stack(7, "ray::AgentLoopWorker.run", "tokenize (agent.py:40)", "turn (agent.py:60)", *LOOP)
    diagnosis = diagnosed(DRIVER, blocked, phase="rollout", workers=[worker(7, loop_silent_s=69)])
    assert (diagnosis.pattern, diagnosis.culprit) == ("event loop blocked", "rollout worker (pid 7)")
    assert "tokenize (agent.py:40)" in diagnosis.sentence


def test_a_loop_that_turns_is_not_blocked_whatever_runs_on_it_just_now() -> None:
    busy = stack(7, "ray::AgentLoopWorker.run", "tokenize (agent.py:40)", *LOOP)
    assert diagnosed(DRIVER, busy, phase="rollout", workers=[worker(7)]).pattern == "rollout starvation"


def test_a_loop_that_waits_has_no_blocker() -> None:
    assert loop_blocker(thread("EpollSelector.select (selectors.py:468)", *LOOP)) is None
    assert loop_blocker(thread("Runner.run (asyncio/runners.py:118)", "run (uvloop/__init__.py:90)")) is None
    assert loop_blocker(thread("Condition.wait (threading.py:327)", "main (a.py:1)")) is None


def test_behind_a_blocking_call_of_the_standard_library_its_caller_is_named() -> None:
    blocker = loop_blocker(thread("socket.recv (socket.py:1)", "fetch (tool.py:3)", *LOOP))
    assert str(blocker) == "fetch (tool.py:3)"


def test_a_service_whose_loop_is_blocked_is_named_though_it_writes_no_progress() -> None:
    blocked = stack(9, "drzero: solver", "rebuild (x.py:4)", *LOOP, component="solver")
    diagnosis = diagnosed(blocked, services=[ServiceFact("solver", "hung", "no answer", 18)])
    assert (diagnosis.pattern, diagnosis.culprit) == ("event loop blocked", "solver (pid 9)")


# Where the samples are -------------------------------------------------------------------------------------


def held(*names: str, oldest_age_s: float = 80.0, **fields: Any) -> Snapshot:
    """A trainer that waits for its buffer, while these points hold something."""
    points = {name: FlowPoint(depth=4, out=9, oldest_age_s=oldest_age_s, still_s=80) for name in names}
    return Snapshot(time=80, points=points, waiting=Waiting("buffer", 3, 8, 80), **fields)


def test_both_triggers_lead_to_the_same_diagnosis() -> None:
    """By the stacks and open calls at a silent phase, or by the flow monitor's snapshot."""
    calls = [OpenCall("search", 7, 50.0, 60.0), OpenCall("rollout", 7, 90.0)]
    by_phase = diagnosed(DRIVER, phase="rollout", workers=[worker(7, *calls)])
    starved = Stall("starved", "search", "", 62, 60)
    by_flow = diagnosed(phase="rollout", flow=held("prompts", "rollout", "search"), stall=starved)
    assert (by_phase.pattern, by_phase.culprit) == ("rollout starvation", "retrieval")
    assert (by_flow.pattern, by_flow.culprit) == (by_phase.pattern, by_phase.culprit)
    assert "of the samples it waits for, 3 of 8 are there after 80 s" in by_flow.evidence


def test_prompts_without_any_rollout_are_the_workers_fault_by_the_flow_too() -> None:
    assert diagnosed(phase="rollout", flow=held("prompts")).culprit == "rollout workers"


def test_a_cause_with_stronger_evidence_goes_before_starvation_whichever_trigger_came_first() -> None:
    stopped = stack(7, "ray::AgentLoopWorker.run", "select (selectors.py:468)", state="T")
    found = diagnosed(stopped, phase="rollout", flow=held("rollout"), stall=Stall("starved", "x", "", 9, 8))
    assert (found.pattern, found.culprit) == ("stopped process", "rollout worker")


def test_a_buffer_that_the_trainer_does_not_empty_is_the_trainers_fault_with_its_stack() -> None:
    buffer = FlowPoint(depth=16, out=9, still_s=70, role="queue")
    busy = stack(1, "ray::TaskRunnerV1.run", "crunch (update.py:4)", "fit (trainer.py:9)")
    flow = Snapshot(time=80, points={"buffer": buffer})
    found = diagnosed(busy, phase="update", flow=flow)
    assert (found.pattern, found.culprit) == ("consumer not draining", "trainer")
    assert "which holds 16" in found.sentence and any("crunch" in line for line in found.evidence)


def test_a_trainer_that_stops_counting_is_named() -> None:
    silent = Stall("no counts", "trainer", "the trainer's process has written no counts for 70 s", 70, 60)
    found = diagnosed(phase="update", flow=Snapshot(time=80, silent_s=70), stall=silent)
    assert (found.pattern, found.culprit) == ("counts stopped", "trainer")


def test_a_trainer_that_stops_counting_while_it_waits_for_samples_is_named_and_not_the_rollouts() -> None:
    silent = Stall("no counts", "trainer", "the trainer's process has written no counts for 70 s", 70, 60)
    short = Snapshot(time=80, silent_s=70, waiting=Waiting("buffer", 3, 8, 10))
    found = diagnosed(phase="rollout", flow=short, stall=silent)
    assert (found.pattern, found.culprit) == ("counts stopped", "trainer")


# The rest ---------------------------------------------------------------------------------------------------


def test_a_stopped_process_explains_everything_that_waits_for_it() -> None:
    stopped = stack(7, "ray::AgentLoopWorker.run", "select (selectors.py:468)", state="T")
    diagnosis = diagnosed(DRIVER, stopped, phase="rollout")
    assert (diagnosis.pattern, diagnosis.culprit) == ("stopped process", "rollout worker")
    assert "kill -CONT 7" in diagnosis.advice


def test_a_data_loader_is_named_with_the_line_of_the_data_set_that_waits() -> None:
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


def test_a_driver_that_waits_to_end_is_a_clean_up_deadlock_and_its_threads_are_evidence() -> None:
    writer = thread("Condition.wait (threading.py:327)", "write (metrics.py:5)", name="metrics-writer")
    ending = stack(
        1, "ray::TaskRunnerV1.run", "Thread.join (threading.py:1119)", "close (t.py:2)", more=[writer]
    )
    diagnosis = diagnosed(ending, phase="done")
    assert diagnosis.pattern == "clean-up deadlock"
    assert any("metrics-writer" in line and "write (metrics.py:5)" in line for line in diagnosis.evidence)


def test_a_full_disk_goes_before_what_waits_for_it() -> None:
    assert diagnosed(DRIVER, phase="save", disk_free_gb=0.01).pattern == "disk full"
    line = "OSError: [Errno 28] No space left on device"
    diagnosis = diagnosed(DRIVER, phase="save", errors={"trainer": line})
    assert (diagnosis.pattern, diagnosis.culprit) == ("disk full", "trainer")


def test_a_kill_for_lack_of_memory_is_reported_even_without_a_line_in_any_log() -> None:
    assert diagnosed(DRIVER, phase="rollout", oom_kills=1).pattern == "out of memory"


def test_a_dead_service_is_named_with_its_first_error() -> None:
    diagnosis = diagnosed(
        DRIVER, phase="rollout", services=[ServiceFact("solver", "dead")], errors={"solver": "ValueError: x"}
    )
    assert (diagnosis.pattern, diagnosis.culprit) == ("dead process", "solver")
    assert diagnosis.evidence == ("first error: ValueError: x",)


def test_without_a_known_pattern_the_process_that_stands_apart_is_the_suspect() -> None:
    same = ("wait (a.py:1)", "main (a.py:2)")
    odd = stack(3, "c", "crunch (b.py:9)", "main (a.py:2)")
    diagnosis = diagnosed(stack(1, "a", *same), stack(2, "b", *same), odd, phase="update")
    assert diagnosis.pattern == "unknown" and "crunch (b.py:9)" in diagnosis.sentence


def test_without_any_stack_there_is_still_a_diagnosis() -> None:
    assert diagnosed().pattern == "unknown"


def test_a_line_that_only_the_recipe_writes_names_the_recipes_culprit() -> None:
    line = "search.client.SearchRequestError: http://x/retrieve is no retrieval service: it answered 'lorem'"
    diagnosis = diagnosed(errors={"trainer": line})
    assert (diagnosis.pattern, diagnosis.culprit) == ("retrieval answers garbage", "retrieval")


def test_processes_at_the_same_place_are_one_group_whatever_their_line() -> None:
    one, two = rank(0, "f (a.py:1)"), rank(1, "f (a.py:2)")
    three = rank(2, "g (a.py:1)")
    assert group_stacks([three, one, two]) == [[one, two], [three]]
    assert minorities([one, two, three]) == [three]
    assert minorities([one, three]) == []  # of two, neither is the majority
