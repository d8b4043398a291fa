"""What the watchdog knows about the recipe, and what a stall leads to by stall action."""

import errno
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf
from verl_saves import save

from drzero.ops.causes import NO_HOST_MEMORY
from drzero.ops.process.child import Command
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.resources.cgroup import OomWatch
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import ChildFailed, Stalled
from drzero.ops.telemetry import Phase
from drzero.ops.watchdog.diagnosis import ALIKE, GONE
from drzero.ops.watchdog.post_mortem import examine
from drzero.recipe.compose import compose_stage, process_env, resolve
from drzero.recipe.overrides import OverrideError
from drzero.runs.diagnose import run_diagnose
from drzero.stages import training
from drzero.stages.flight_recorder import flight_recorder
from drzero.stages.services import retrieval_spec, solver_spec
from drzero.stages.watch import LANDMARKS, watch_plan
from verl_ext.rollout.platforms import NO_RECORDER


@pytest.fixture(scope="module")
def config():
    return resolve(compose_stage("challenger", ["hardware=cpu", "watchdog.limits.save=1200"]))


@pytest.fixture(scope="module")
def hang():
    return resolve(compose_stage("solver", ["hardware=8xh100", "debug=hang"]))


def test_the_plan_holds_the_configured_limits_for_every_phase(config, hang):
    plan = watch_plan(config)
    patience = plan.patience.cold_start_s, plan.patience.floor_s
    assert (plan.stall_action, plan.native, *patience) == ("report", False, 300, 60)
    # A laptop's cores have other work as well: a slow update there is no stall.
    assert (plan.patience.factor, watch_plan(hang).patience.factor) == (5, 2)
    assert plan.patience.fixed == {"start-up": 900, "done": 300, "out-of-time": 300, "save": 1200}
    assert plan.heartbeats == Path(config.run.dir) / "heartbeats.jsonl"
    assert set(config.watchdog.limits) == set(get_args(Phase))


def test_services_are_watched_by_real_work_and_not_debugged_by_default(config):
    retrieval, solver = retrieval_spec(config), solver_spec(config)
    assert (retrieval.restarts, solver.restarts) == (3, 0)
    assert retrieval.liveness.url.endswith("/health") and retrieval.liveness.metrics_url
    assert solver.liveness.work == ("engine_generated_tokens_total",)
    assert not {"NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "RAY_BACKEND_LOG_LEVEL"} & set(process_env(config))


def test_debug_hang_makes_every_component_log_more_and_sglang_is_asked_for_a_token(hang):
    solver = solver_spec(hang)
    assert solver.liveness.url.endswith("/health_generate")
    assert "--enable-metrics" in solver.command
    environment = process_env(hang)
    assert environment["NCCL_DEBUG"] == "INFO" and environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert environment["CUDA_LAUNCH_BLOCKING"] == "1"
    assert hang.actor_rollout_ref.nccl_timeout == 300 and watch_plan(hang).native
    for name in ("DRZERO_LOG_LEVEL", "VERL_LOGGING_LEVEL", "TQ_LOGGING_LEVEL"):
        assert environment[name] == "DEBUG"
    assert environment["RAY_BACKEND_LOG_LEVEL"] == "debug"
    assert "debug" in solver_spec(hang).command  # SGLang's --log-level
    for spec in (solver_spec(hang), retrieval_spec(hang)):
        assert not spec.env.keys() & NO_RECORDER.keys()


# The ranks' recorder ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder; the machine's temporary one is next to it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def dump(environment, rank, text="collectives"):
    """What torch writes for a rank."""
    path = Path(f"{environment['TORCH_FR_DUMP_TEMP_FILE']}{rank}")
    path.write_text(text)
    return path


def test_ranks_record_on_the_temporary_disk_and_their_dumps_are_kept_with_the_run(run):
    with pytest.raises(RuntimeError), flight_recorder(run) as environment:
        assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert environment["TORCH_FR_BUFFER_SIZE"] == environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
        os.mkfifo(environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe")
        place = dump(environment, 0).parent
        plan = watch_plan(resolve(compose_stage("challenger", ["hardware=cpu", f"run.dir={run}"])))
        assert not place.is_relative_to(run) and plan.recorder == place
        raise RuntimeError("a collective timed out")
    assert [path.name for path in run.rglob("*") if path.name.startswith("rank_")] == ["rank_0"]
    assert (run / "flight" / "rank_0").read_text() == "collectives"
    assert not place.exists()


def test_a_folder_without_fifos_costs_the_pipes_alone(run, monkeypatch, capsys):
    """torch would make one in a thread that catches nothing, and each rank would abort."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "mkfifo", refuse)
    with flight_recorder(run) as environment:
        dump(environment, 3)
        assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in environment
        assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "takes no pipes (Operation not permitted)" in capsys.readouterr().out
    assert (run / "flight" / "rank_3").is_file()


def test_the_dumps_of_a_killed_start_are_found_and_kept_by_the_next(run, capsys):
    run_diagnose([str(run)])
    assert "torchfrtrace" not in capsys.readouterr().out
    killed = flight_recorder(run)
    left = dump(killed.__enter__(), 1)
    run_diagnose([str(run)])
    assert f"torchfrtrace {left.parent} -p rank_" in capsys.readouterr().out
    with flight_recorder(run):
        assert not left.exists()
        run_diagnose([str(run)])
    assert f"torchfrtrace {run}/flight -p rank_" in capsys.readouterr().out


def test_the_places_where_veRL_waits_are_still_there():
    """A release that renames them would leave starvation unread."""
    import inspect

    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    for places, module in ((LANDMARKS.batch_wait, replay_buffer), (LANDMARKS.data_fetch[:1], trainer_base)):
        for name, file in places:
            assert f"def {name}(" in inspect.getsource(module)
            assert str(inspect.getsourcefile(module)).endswith(file)


@pytest.mark.parametrize(
    ("removed", "today"), [("flow.patience_s", "watchdog.floor_s"), ("flow.tell_every_s", "flow.log_every_s")]
)
def test_a_removed_key_is_refused_with_todays_name(removed, today):
    with pytest.raises(OverrideError, match=f"is now '{today}'"):
        compose_stage("challenger", ["hardware=cpu", f"{removed}=9"])


# Stall action ----------------------------------------------------------------------------------------------


def stalled(folder, pattern):
    spec = Command(name="trainer", command=("true",), log_path=folder / "trainer.log")
    child: Any = SimpleNamespace(spec=spec, poll=lambda: None, first_error=None, tail=[])
    return Stalled("the run stalled", child, pattern)


@pytest.fixture
def bare(monkeypatch):
    """Starts of a trainer without a resolved config, and without a monitor of its flow."""
    monkeypatch.setattr(training, "write_resolved", lambda config: None)
    monkeypatch.setattr(training, "flow_monitor", lambda config: nullcontext())


def watched(folder, policy):
    trainer = {"resume_mode": "disable", "test_freq": -1, "total_training_steps": 4, "val_only": False}
    watchdog = {"policy": policy, "resumes": 2, "cold_start_s": 9, "floor_s": 9, "patience_factor": 2}
    more = {"limits": {}, "native_stacks": False, "sample_every_s": 5}
    return OmegaConf.create(
        {
            "run": {"dir": str(folder), "name": "run"},
            "trainer": trainer,
            "watchdog": watchdog | more,
            "machine": {"device": "cpu", "nodes": 1, "ray_address": None},
            "actor_rollout_ref": {"rollout": {"name": "reference"}},
            "process_env": {},
            "log_level": "INFO",
        }
    )


@pytest.mark.parametrize(
    ("action", "pattern", "stalls", "starts", "raises"),
    [
        ("resume", "unknown", 1, 2, False),
        ("resume", "unknown", 9, 3, True),
        ("resume", ALIKE, 9, 1, True),
        ("stop", "unknown", 1, 1, True),
        ("stop", GONE, 1, 1, True),
        ("report", "unknown", 0, 1, False),
        ("report", GONE, 1, 2, False),
        ("report", NO_HOST_MEMORY, 9, 2, True),
    ],
)
def test_a_stalled_run_is_resumed_as_often_as_the_stall_action_allows(
    tmp_path, monkeypatch, bare, action, pattern, stalls, starts, raises
):
    """From the checkpoints that it has saved since, also if it was told to start elsewhere."""
    begun, modes = list[str](), list[str]()

    def run(main, services, plan, nodes):
        begun.append(main.env["VERL_FILE_LOGGER_PATH"])
        Path(main.env["VERL_FILE_LOGGER_PATH"]).touch()
        modes.append(config.trainer.resume_mode)
        if len(begun) <= stalls:
            save(tmp_path, len(begun))
            raise stalled(tmp_path, pattern)
        return 0

    monkeypatch.setattr(training, "run_supervised", run)
    config = watched(tmp_path, action)
    with ServiceGroup([]) as services, pytest.raises(Stalled) if raises else nullcontext():
        training._until_done(config, tmp_path, services)
    assert len(set(begun)) == starts  # each start has metrics of its own
    assert modes == ["disable", *["auto"] * (starts - 1)]


TRAINER = """
import os, sys, time
folder, said, code, failures = sys.argv[1:]
with open(f"{folder}/starts", "a+") as file:
    file.write("s")
    starts = file.tell()
if starts > int(failures):
    with open(f"{folder}/heartbeats.jsonl", "a") as file:
        file.write('{"time": %f, "phase": "rollout", "step": 1}\\n' % time.time())
    sys.exit(0)
print(said, flush=True)
os.kill(os.getpid(), 9) if code == "-9" else sys.exit(int(code))
"""
RAYLET = "(raylet) node_manager.cc:3303: 2 Workers (tasks / actors) killed due to memory pressure (OOM), "
RAY_ERROR = "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory."
RAY_TASK = "ray.exceptions.RayTaskError(OutOfMemoryError): \x1b[36mray::TaskRunnerV1.run()\x1b[39m (pid=1)"
DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
CRASH = "(raylet) 0 Workers (tasks / actors) killed due to memory pressure (OOM), 1 Workers crashed due to "
GROUP = "the kernel has killed 1 process(es) of this cgroup for lack of memory meanwhile"


@pytest.mark.parametrize(
    ("policy", "said", "code", "killed", "failures", "starts"),
    [
        ("report", RAY_ERROR, 1, None, 1, 2),
        ("report", RAY_ERROR, 1, None, 9, 2),
        ("resume", RAY_ERROR, 1, None, 9, 3),
        ("stop", RAY_ERROR, 1, None, 9, 1),
        ("report", f"{RAY_TASK}\n{RAY_ERROR}", 1, None, 9, 2),
        ("report", f"{DIED}\n{RAYLET}", 1, None, 9, 2),
        ("report", "", -9, "the kernel killed pid 7 for lack of memory", 9, 2),
        ("report", "", -9, GROUP, 9, 2),
        ("resume", "", -9, None, 9, 1),
        ("resume", DIED, 1, None, 9, 1),
        ("resume", f"{DIED}\n{CRASH}", 1, None, 9, 1),
        ("resume", "torch.OutOfMemoryError: CUDA out of memory", 1, None, 9, 1),
        ("resume", f"ValueError: no such key\n{RAYLET.replace('2 W', '0 W')}", 1, None, 9, 1),
        ("resume", "drzero: error: the index has another embedder", 2, None, 9, 1),
    ],
    ids=[
        *("Ray", "twice", "resume", "stop", "its task", "raylet later", "the kernel", "its cgroup"),
        *("SIGKILL", "died", "a crash", "GPU", "another cause", "a refusal"),
    ],
)
def test_a_trainer_that_ends_is_resumed_only_after_a_kill_for_lack_of_memory(
    tmp_path, monkeypatch, bare, policy, said, code, killed, failures, starts
):
    monkeypatch.setattr(OomWatch, "explain", lambda self, pids: killed)
    command = (sys.executable, "-c", TRAINER, str(tmp_path), said, str(code), str(failures))
    trainer = Command(name="trainer", command=command, log_path=tmp_path / "logs" / "trainer.log")
    monkeypatch.setattr(training, "trainer_command", lambda config, folder, recorder: trainer)
    ends_well = failures < starts
    with (
        ServiceGroup([], events=EventLog(tmp_path / "logs" / EVENTS_FILE)) as services,
        nullcontext() if ends_well else pytest.raises(ChildFailed) as failed,
    ):
        training._until_done(watched(tmp_path, policy), tmp_path, services)
    assert len((tmp_path / "starts").read_text()) == starts
    death = examine(tmp_path)
    assert death.state == ("finished" if ends_well else "failed")
    if starts > 1 and not ends_well:
        assert NO_HOST_MEMORY in str(failed.value) and death.culprit == "this machine's memory"
