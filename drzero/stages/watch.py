"""The watchdog's knowledge of this recipe: phases, flow points, who answers them, where veRL waits."""

import os
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from drzero.ops.causes import Cause
from drzero.ops.flow.monitor import FlowMonitor
from drzero.ops.records import FLOW_FILE
from drzero.ops.watchdog.diagnosis import Landmarks
from drzero.ops.watchdog.movement import Patience
from drzero.ops.watchdog.watchdog import WatchPlan
from drzero.recipe.compose import process_env
from drzero.recipe.metrics import metrics_path
from drzero.stages.flight_recorder import FLIGHT, recorder_folder
from drzero.stages.nodes import read_elsewhere

PROGRESS = "progress"

WAITS_ON = {
    "buffer": ("prompts",),
    "prompts": ("rollout",),
    "validation": ("rollout",),
    "rollout": ("generation", "search", "environment", "reward"),
    "reward": ("completion", "search"),
    "completion": ("solver queue", "search"),
    "search": ("retrieval queue",),
}
"""The points each flow point waits on. The trainer waits on the buffer; a rollout ends with its reward."""

CAUSES: tuple[Cause, ...] = (
    Cause(
        "retrieval answers garbage",
        r"is no retrieval service: it answered|answered \d+ of \d+ queries",
        "something else listens at retrieval.port or retrieval.url, or the index is broken: query it "
        "with curl, restart it",
        culprit="retrieval",
    ),
    Cause(
        "solver fails",
        r"the solver server at \S+ failed|SolverServerError",
        "read solver.log; if the server ran out of memory, lower solver.mem_fraction_static or "
        "solver.max_batch_size",
        culprit="solver",
    ),
    Cause(
        "retrieval does not answer",
        r"SearchUnavailable|/retrieve did not answer",
        "read retrieval.log (with retrieval.url, on its machine); to make room raise retrieval.encoders, "
        "retrieval.max_queue or retrieval.deadline_s",
        culprit="retrieval",
    ),
    Cause(
        "a process of SGLang's ended",
        r"Subprocess \S+ \(pid=\d+\) crashed with exit code",
        "exit code -9 mostly means out of memory: lower actor_rollout_ref.rollout.gpu_memory_utilization, "
        "then rerun to resume",
        culprit="rollout engine",
    ),
    Cause(
        "a process of vLLM's ended",
        r"EngineDeadError|EngineCore encountered a fatal error",
        "the traceback above it says why; out of memory, lower "
        "actor_rollout_ref.rollout.gpu_memory_utilization, then rerun to resume",
        culprit="rollout engine",
    ),
    Cause(
        "too many spoiled rollouts",
        r"TooManyFailures",
        "the message names the first causes; rerun to resume once the service is up (run.max_failed_share)",
    ),
)

LANDMARKS = Landmarks(
    batch_wait=(
        ("_wait_for_next_poll", "verl/trainer/ppo/v1/replay_buffer.py"),
        ("sample", "verl/trainer/ppo/v1/replay_buffer.py"),
        ("wait_for_sampleable", "verl/trainer/ppo/v1/replay_buffer.py"),
    ),
    data_fetch=(
        ("_fetch_one_gen_batch", "verl/trainer/ppo/v1/trainer_base.py"),
        ("__getitem__", "verl/utils/dataset/rl_dataset.py"),
    ),
    waits_on=WAITS_ON,
    answered_by={
        "retrieval queue": "retrieval",
        "search": "retrieval",
        "solver queue": "solver",
        "completion": "solver",
        "generation": "rollout engine",
        "environment": "the environment's own code",
        "reward": "reward workers",
        "rollout": "rollout workers",
    },
    tools=frozenset({"search", "environment"}),
    driver="trainer",
    roles=(
        (r"ray::TaskRunner", "the trainer's driver"),
        (r"ray::\w*ActorRolloutRef|ray::WorkerDict", "training rank"),
        (r"ray::AgentLoopWorker", "rollout worker"),
        (r"ray::RewardLoopWorker", "reward worker"),
        (r"ray::ReferenceServer|ray::SGLang|ray::vLLM", "rollout engine"),
        (r"sglang::", "SGLang of {component}"),
        (r"VLLM::", "vLLM of {component}"),
        (r"ray::(SimpleStorage|TransferQueue)", "replay buffer's store"),
        (r"/raylet/raylet |/gcs/gcs_server ", "Ray itself"),
        (r"drzero: retrieval", "retrieval"),
        (r"drzero: solver", "solver"),
    ),
    lasting=frozenset(
        {
            "the trainer's driver",
            "training rank",
            "rollout worker",
            "reward worker",
            "rollout engine",
            "replay buffer's store",
            "Ray itself",
        }
    ),
    ranks=r"ray::\w*ActorRolloutRef\w*|ray::WorkerDict\w*|\brank \d+",
    # A replica's other ranks always wait in the broadcast by which the engine distributes requests.
    engines=r"sglang::|ray::SGLang|VLLM::|ray::vLLM",
    causes=CAUSES,
    end_phases=frozenset({"done", "out-of-time"}),
)


def watch_plan(config: DictConfig, flow: FlowMonitor | None = None) -> WatchPlan:
    """The plan for one start of a training run, from `watchdog` in a resolved config."""
    watchdog, folder = config.watchdog, Path(config.run.dir)
    fixed = {str(phase): float(limit) for phase, limit in watchdog.limits.items() if limit is not None}
    return WatchPlan(
        folder=folder,
        heartbeats=folder / "heartbeats.jsonl",
        progress=folder / PROGRESS,
        patience=Patience(
            cold_start_s=watchdog.cold_start_s,
            floor_s=watchdog.floor_s,
            factor=watchdog.patience_factor,
            fixed=fixed,
        ),
        flow=flow.snapshot if flow else lambda: None,
        # Finished work counts only there: asynchronous rollouts go on while an update may hang.
        counted_phases=frozenset({"rollout", "validation"}),
        # A large checkpoint takes longer than any limit on silence, so growth counts as movement.
        writing_phases={"save": "global_step_*"},
        landmarks=LANDMARKS,
        stall_action=watchdog.policy,
        native=watchdog.native_stacks,
        sample_every_s=watchdog.sample_every_s,
        streams=(folder / FLOW_FILE,),
        recorder=recorder_folder(folder),
        flight=folder / FLIGHT,
        elsewhere=partial(read_elsewhere, config.machine.ray_address, process_env(config)),
        must_begin=not OmegaConf.select(config, "trainer.val_only", default=False),
    )


def watched_env(config: DictConfig) -> dict[str, str]:
    """The environment of any trainer: it finds our code, and lets the watchdog see into its processes."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_FILE_LOGGER_PATH": str(metrics_path(Path(config.run.dir))),
        "DRZERO_PROGRESS_DIR": str(Path(config.run.dir) / PROGRESS),
        # Tracebacks of all threads when C code crashes.
        "PYTHONFAULTHANDLER": "1",
        # Ends a rank whose NCCL thread hangs, so that the others fail too.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",
        # Ends the process at an error instead of waiting for NCCL, which may never return.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    }
