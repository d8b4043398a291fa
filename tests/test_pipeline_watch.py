"""What the watchdog knows about the recipe, and what a stall leads to by stall action."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from omegaconf import DictConfig, OmegaConf
from test_verl_ext_checkpoints import save

from ops.process.child import Command
from ops.services.services import ServiceGroup
from ops.supervisor import Stalled
from pipeline.compose import compose_stage, process_env, resolve
from pipeline.overrides import OverrideError
from pipeline.stages import training
from pipeline.stages.services import retrieval_spec, solver_spec
from pipeline.stages.watch import LANDMARKS, watch_plan, watched_env
from verl_ext.telemetry import Phase


@pytest.fixture(scope="module")
def config() -> DictConfig:
    return resolve(compose_stage("challenger", ["hardware=cpu", "watchdog.limits.save=1200"]))


@pytest.fixture(scope="module")
def hang() -> DictConfig:
    return resolve(compose_stage("solver", ["hardware=8xh100", "debug=hang"]))


def test_the_plan_holds_the_limits_of_the_config(config: DictConfig) -> None:
    plan = watch_plan(config)
    assert (plan.stall_action, plan.native, plan.patience.cold_start_s, plan.patience.floor_s) == (
        "report",
        False,
        300,
        60,
    )
    assert plan.patience.fixed == {"start-up": 900, "done": 300, "out-of-time": 300, "save": 1200}
    assert plan.heartbeats == Path(config.run.dir) / "heartbeats.jsonl"


def test_every_phase_has_a_key_for_a_limit_of_its_own(config: DictConfig) -> None:
    assert set(config.watchdog.limits) == set(get_args(Phase))


def test_services_are_watched_by_real_work_and_only_retrieval_is_started_again(config: DictConfig) -> None:
    retrieval, solver = retrieval_spec(config), solver_spec(config)
    assert (retrieval.restarts, solver.restarts) == (3, 0)
    assert retrieval.liveness.url.endswith("/health") and retrieval.liveness.metrics_url
    assert solver.liveness.work == ("engine_generated_tokens_total",)


def test_sglang_is_asked_for_a_token(hang: DictConfig) -> None:
    solver = solver_spec(hang)
    assert solver.liveness.url.endswith("/health_generate")
    assert "--enable-metrics" in solver.command


def test_debug_hang_makes_every_component_log_more(hang: DictConfig) -> None:
    environment = process_env(hang)
    assert environment["NCCL_DEBUG"] == "INFO" and environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert environment["CUDA_LAUNCH_BLOCKING"] == "1"
    assert hang.actor_rollout_ref.nccl_timeout == 300 and watch_plan(hang).native
    for name in ("DRZERO_LOG_LEVEL", "VERL_LOGGING_LEVEL", "TQ_LOGGING_LEVEL"):
        assert environment[name] == "DEBUG"
    assert environment["RAY_BACKEND_LOG_LEVEL"] == "debug"
    assert "debug" in solver_spec(hang).command  # SGLang's --log-level


def test_a_run_that_is_not_debugged_has_none_of_it(config: DictConfig) -> None:
    assert not {"NCCL_DEBUG", "CUDA_LAUNCH_BLOCKING", "RAY_BACKEND_LOG_LEVEL"} & set(process_env(config))


def test_ranks_record_their_collectives_and_dump_them_into_the_runs_folder(hang: DictConfig) -> None:
    environment = watched_env(hang)
    assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and environment["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == f"{hang.run.dir}/flight/rank_"


def test_the_places_where_veRL_waits_are_still_there() -> None:
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
def test_a_removed_key_is_refused_with_todays_name(removed: str, today: str) -> None:
    with pytest.raises(OverrideError, match=f"is now '{today}'"):
        compose_stage("challenger", ["hardware=cpu", f"{removed}=9"])


# Stall action ----------------------------------------------------------------------------------------------


def stalled(folder: Path) -> Stalled:
    spec = Command(name="trainer", command=("true",), log_path=folder / "trainer.log")
    child: Any = SimpleNamespace(spec=spec, poll=lambda: None, first_error=None, tail=[])
    return Stalled("the run stalled", child)


@pytest.mark.parametrize(
    ("action", "stalls", "starts", "raises"),
    [("resume", 1, 2, False), ("resume", 9, 3, True), ("stop", 1, 1, True), ("report", 0, 1, False)],
)
def test_a_stalled_run_is_resumed_as_often_as_the_stall_action_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, stalls: int, starts: int, raises: bool
) -> None:
    """From the checkpoints that it has saved since, also if it was told to start elsewhere."""
    begun: list[str] = []
    modes: list[str] = []

    def run(main: Command, services: ServiceGroup, plan: Any) -> int:
        begun.append(main.env["VERL_FILE_LOGGER_PATH"])
        Path(main.env["VERL_FILE_LOGGER_PATH"]).touch()
        modes.append(config.trainer.resume_mode)
        if len(begun) <= stalls:
            save(tmp_path, len(begun))
            raise stalled(tmp_path)
        return 0

    monkeypatch.setattr(training, "run_supervised", run)
    monkeypatch.setattr(training, "write_resolved", lambda config: None)
    monkeypatch.setattr(training, "flow_monitor", lambda config: nullcontext())
    trainer = {"resume_mode": "disable", "test_freq": -1, "total_training_steps": 4, "val_only": False}
    watchdog = {"policy": action, "resumes": 2, "cold_start_s": 9, "floor_s": 9, "factor": 2}
    more = {"limits": {}, "native_stacks": False, "sample_every_s": 5}
    config = OmegaConf.create(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "trainer": trainer,
            "watchdog": watchdog | more,
            "process_env": {},
            "log_level": "INFO",
        }
    )
    with ServiceGroup([]) as services:
        if raises:
            with pytest.raises(Stalled):
                training._until_done(config, tmp_path, services)
        else:
            training._until_done(config, tmp_path, services)
    assert len(set(begun)) == starts  # each start has metrics of its own
    assert modes == ["disable", *["auto"] * (starts - 1)]
