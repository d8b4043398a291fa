"""The supervised training: veRL's own trainer on the chosen rows, the same on a laptop and on GPUs."""

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from drzero.ops.console import say
from drzero.ops.errors import OutOfTime
from drzero.ops.files import atomic_path, atomic_write
from drzero.ops.process.child import Command
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.services.services import ServiceGroup
from drzero.ops.stop_time import describe_left, require_time, seconds_left
from drzero.ops.supervisor import run_supervised
from drzero.recipe.compose import verl_config, verl_env
from drzero.recipe.errors import CheckError
from drzero.recipe.fingerprint import fingerprint_model
from drzero.recipe.metrics import MetricsTail, read_metrics
from drzero.stages.warm_start.choose import Chosen, Demonstration
from drzero.stages.warm_start_report import CHECKS
from drzero.stages.watch import watch_plan, watched_env
from verl_ext.checkpoints import saved_step, step_folder

WORK = "training"  # the trainer's folder below the run's
_MADE_FROM = "made_from.json"
_SAVES = 5  # checkpoints of a run, so that a kill costs at most a fifth of it
_TELL_EVERY_S = 30.0
_DIVERGED_NATS = 1.0  # batches differ by less
_START_S = 60.0  # with less time left, nothing is started


def train(config: DictConfig, chosen: Chosen) -> Path:
    """Train to the last step, or resume. Returns the folder with its checkpoints.

    Call `check_same` first. Raises CheckError if the training diverged, OutOfTime, Stalled or ChildFailed.
    """
    folder, work = Path(config.run.dir), Path(config.run.dir) / WORK
    rows, held_out = chosen.of("train"), chosen.of("held_out")
    batch, steps = batch_and_steps(config, len(rows))
    if saved_step(work) < steps:
        require_time(config.run.name, _START_S)
        _begin(config, chosen, work)
        _tidy(work)
        train_path, held_out_path = folder / "train.parquet", folder / "held_out.parquet"
        # All epochs as one: veRL 0.9.1 skips a whole epoch if it resumes at the end of one.
        _write_rows(train_path, [rows[place % len(rows)] for place in range(steps * batch)])
        _write_rows(held_out_path, held_out)
        # veRL drops an incomplete batch, so fewer rows than a batch have no loss.
        val = held_out_path if len(held_out) >= batch else None
        write_config(config, work, train_path, val, batch, steps)
        log = f"log: {folder}/logs/trainer.log"
        say("training", f"{steps} steps of {batch} on {len(rows)} demonstrations, {log}")
        events = EventLog(folder / "logs" / EVENTS_FILE)
        plan = replace(watch_plan(config), writing_phases={"save": f"{WORK}/global_step_*"})
        with _telling(folder, steps), ServiceGroup([], events=events) as services:
            run_supervised(_command(config, folder, work), services, plan=plan)
        if (done := saved_step(work)) < steps:
            left = describe_left(seconds_left())
            raise OutOfTime(
                f"out of time after {done} of {steps} steps, which are kept: {left}; rerun to resume"
            )
    check_learnt(folder)
    return work


def batch_and_steps(config: DictConfig, rows: int) -> tuple[int, int]:
    """How many rows an update has, and how many updates there are. Every GPU gets as many rows."""
    gpus = config.machine.gpus
    batch = min(config.batch_size, max(1, rows // gpus) * gpus)
    return batch, max(1, round(config.epochs * rows / batch))


def check_learnt(folder: Path) -> None:
    """Refuse a training whose loss is no number, or has grown."""
    unlearnt = f"choose a lower learning_rate= and another run.name, or remove {folder / WORK}"
    steps = {step: data for step, data in read_metrics(folder).items() if "train/lr" in data}
    lost = [step for step, data in steps.items() if not {"train/loss", "train/grad_norm"} <= data.keys()]
    if lost:
        raise CheckError(
            f"the training diverged: in step {lost[0]}, loss or gradients are no number: {unlearnt}"
        )
    found = losses(folder)
    first, last = found["first_train"], found["last_train"]
    if first is not None and last is not None and last > first + _DIVERGED_NATS:
        raise CheckError(f"the training diverged: its loss grew from {first:.2f} to {last:.2f}: {unlearnt}")


def losses(folder: Path) -> dict[str, float | None]:
    """The first and last training loss, and the held-out losses, as the run logged them."""
    steps, found = read_metrics(folder), dict[str, float | None]()
    for name, key in (("train", "train/loss"), ("held_out", "val/loss")):
        values: list[float | None] = [step[key] for step in steps.values() if key in step] or [None]
        found |= {f"first_{name}": values[0], f"last_{name}": values[-1]}
    return found


def _made_from(config: DictConfig, rows: Sequence[Demonstration]) -> dict[str, Any]:
    text = json.dumps([(one.example.ids_T, one.example.own_T) for one in rows])
    return {
        "demonstrations": hashlib.sha256(text.encode()).hexdigest(),
        "base_model": fingerprint_model(str(config.base_model)),
        **{name: config[name] for name in ("epochs", "batch_size", "learning_rate", "lora_rank")},
        "data.seed": config.data.seed,
        "machine.gpus": config.machine.gpus,
    }


def check_same(config: DictConfig, chosen: Chosen) -> None:
    """Raise CheckError if the run's folder holds a training on other demonstrations or with other values."""
    work = Path(config.run.dir) / WORK
    if not (work / _MADE_FROM).is_file():
        return
    was = json.loads((work / _MADE_FROM).read_text(encoding="utf-8"))
    made_from = _made_from(config, chosen.of("train"))
    if changed := [name for name in made_from if was.get(name) != made_from[name]]:
        raise CheckError(
            f"{work} holds a training with other {', '.join(changed)}: set another run.name, or remove the "
            "folder to start over"
        )


def _begin(config: DictConfig, chosen: Chosen, work: Path) -> None:
    """Say what a new training is made from. What a removed one has left would be taken for its own."""
    if (work / _MADE_FROM).is_file():
        return
    shutil.rmtree(work.parent / "metrics", ignore_errors=True)
    (work.parent / CHECKS[1]).unlink(missing_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    atomic_write(work / _MADE_FROM, json.dumps(_made_from(config, chosen.of("train")), indent=1))


def _tidy(work: Path) -> None:
    """Remove checkpoints other than the recorded one: a kill has cut them off, or they are older."""
    last = step_folder(work, saved_step(work))
    for folder in work.glob("global_step_*"):
        if folder != last:
            shutil.rmtree(folder)


def _write_rows(path: Path, rows: Sequence[Demonstration]) -> None:
    table = pa.table(
        {
            "ids": pa.array([one.example.ids_T for one in rows], pa.list_(pa.int64())),
            "own": pa.array([[int(own) for own in one.example.own_T] for one in rows], pa.list_(pa.int64())),
        }
    )
    with atomic_path(path) as partial:
        pq.write_table(table, partial)


def write_config(
    config: DictConfig, work: Path, train: Path, held_out: Path | None, batch: int, steps: int
) -> None:
    """Compose veRL's `sft_trainer_engine` with this run's values into `work`/sft.yaml."""
    with initialize_config_dir(urlsplit(verl_config()).path, version_base=None):
        composed = compose("sft_trainer_engine")
    on_cpu, every = config.machine.device == "cpu", -(-steps // _SAVES)
    ours = {
        "data": {
            "train_files": str(train),
            "val_files": None if held_out is None else str(held_out),
            "train_batch_size": batch,
            "micro_batch_size_per_gpu": 1,
            # Rows of a GPU's micro-batch are packed. On a CPU every packed token would attend to all others.
            "use_dynamic_bsz": not on_cpu,
            "max_token_len_per_gpu": max(8192, config.solver.max_context_tokens),
            "num_workers": 0,
            "custom_cls": {"path": "pkg://verl_ext.trainer.supervised", "name": "DemonstrationRows"},
        },
        "model": {
            "path": str(config.base_model),
            "lora_rank": config.lora_rank,
            "lora_alpha": 2 * config.lora_rank,
            "enable_gradient_checkpointing": not on_cpu,
            "override_config": {"attn_implementation": "sdpa" if on_cpu else "drzero_packed"},
        },
        "engine": {
            "strategy": "fsdp2",
            "use_torch_compile": False,
            "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        },
        "optim": {"lr": config.learning_rate, "lr_warmup_steps": min(10, steps // 2), "weight_decay": 0.0},
        "trainer": {
            "default_local_dir": str(work),
            "project_name": "drzero",
            "experiment_name": config.run.name,
            "device": config.machine.device,
            "nnodes": 1,
            "n_gpus_per_node": config.machine.gpus,
            "logger": ["file"],
            "total_epochs": 1,
            "total_training_steps": steps,
            "save_freq": every,
            "test_freq": every if held_out else -1,
            # With one, veRL would remove the last before it writes the next.
            "max_ckpt_to_keep": 2,
            "seed": config.data.seed,
        },
    }
    with open_dict(composed):
        merged = OmegaConf.merge(composed, ours)
    atomic_write(work / "sft.yaml", OmegaConf.to_yaml(merged, resolve=True))


def _command(config: DictConfig, folder: Path, work: Path) -> Command:
    program = ("verl_ext.trainer.supervised", str(work / "sft.yaml"))
    several = ("torch.distributed.run", "--standalone", f"--nproc-per-node={config.machine.gpus}", "-m")
    launcher = several if config.machine.gpus > 1 else ()
    return Command(
        name="trainer",
        command=(sys.executable, "-m", *launcher, *program),
        log_path=folder / "logs" / "trainer.log",
        env={**watched_env(config), **verl_env(config)},
    )


@contextmanager
def _telling(folder: Path, steps: int) -> Iterator[None]:
    """Say now and then how far the trainer is."""
    ended, tail = threading.Event(), MetricsTail(folder)

    def tell() -> None:
        while not ended.wait(_TELL_EVERY_S):
            said = [(step, data["train/loss"]) for step, data in tail.stream() if "train/loss" in data]
            if said:
                say("training", f"step {said[-1][0]} of {steps}, loss {said[-1][1]:.3f}")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
