"""The train stage: GRPO in any environment, on stock veRL.

    drzero train env=wordle model=qwen2.5-3b steps=200
    drzero train env=sums hardware=cpu model=demo-policy steps=20      # environments/sums/ of your own

The environment's rows become the run's data, `verl_ext.rollout.environment_agent_loop` plays them, and their
score is the reward. The rest works like the other training stages (`drzero.stages.training`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, open_dict

from drzero.ops.files import atomic_path
from drzero.recipe.environment import load_taskset, rows_of
from drzero.stages.services import search_spec
from drzero.stages.training import LiveView, exported, finish, prepare, train
from environments.fault import EnvironmentUnusable
from environments.row import Row
from environments.taskset import Taskset

_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "reward_model": pa.struct({"ground_truth": pa.struct({"target": pa.list_(pa.string())})}),
        "extra_info": pa.struct(
            {"index": pa.int64(), "split": pa.string(), "row": pa.string(), "task": pa.string()}
        ),
        "agent_name": pa.string(),
    }
)
"""The columns veRL requires, and the environment's row as JSON."""


def run_train(config: DictConfig, view: LiveView) -> None:
    """Train to `steps`, then export and summarise. Raises PreflightFailed, else as `training.train`."""
    taskset = load_taskset(config)
    config = prepare_environment(config, taskset)
    train(config, [search_spec(config)] if taskset.needs_retrieval else [], view)
    finish(config, exported(config))


def prepare_environment(config: DictConfig, taskset: Taskset) -> DictConfig:
    """Run preflight, choose ports and write the rows. Returns the resolved config."""
    if config.environment.filter_groups is None:
        with open_dict(config):
            config.environment.filter_groups = taskset.filters_groups
    config = prepare(config, "train")
    write_rows(config, taskset)
    return config


def write_rows(config: DictConfig, taskset: Taskset) -> None:
    """Write the training rows and the held-out rows, the same at each start."""
    seed = config.data.seed
    rows = rows_of(taskset, "train", config.train_rows, seed)
    try:
        held_out = rows_of(taskset, "eval", config.val_rows, seed)
    except EnvironmentUnusable:  # preflight has warned, but veRL needs a file
        held_out = rows[:1]
    _write(Path(config.data.train_files), taskset, "train", rows)
    _write(Path(config.data.val_files), taskset, "eval", held_out)


def _write(path: Path, taskset: Taskset, split: str, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([_record(taskset, split, *each) for each in enumerate(rows)], _SCHEMA)
    with atomic_path(path) as partial:
        pq.write_table(table, partial)


def _record(taskset: Taskset, split: str, index: int, row: Row) -> dict[str, Any]:
    return {
        "data_source": taskset.name,
        # veRL requires a prompt but shows it nowhere: the episode makes its own.
        "prompt": [{"role": "user", "content": row.id}],
        "reward_model": {"ground_truth": {"target": None}},
        "extra_info": {"index": index, "split": split, "row": row.id, "task": json.dumps(dict(row.data))},
        "agent_name": "environment",
    }
