"""Training steps by veRL's own actor worker over gloo on the CPU.

    python tests/parts/gloo_step.py FOLDER RANKS [RANKS ...]

`steps.pt` in FOLDER has the config and the cases, each with the rows of a batch. For each number of ranks and
each case, this restores the weights and makes one update of the whole batch by SGD with a rate of 1, so that
a weight moves by its gradient. `moved_RANKS.pt` has the moves, the metrics, and the log-probabilities before
the update.
"""

import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from verl_ext.rollout.cpu_worker import CpuActorRolloutRefWorker


def rank_of(folder: Path, rank: int, world: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # never used: the group's store is a file
    }
    if world > 1:  # a lone worker makes its own group
        store = dist.FileStore(str(folder / f"store_{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    steps = torch.load(folder / "steps.pt", weights_only=False)
    config = OmegaConf.create(steps["config"])
    worker = CpuActorRolloutRefWorker(config=config, role="actor")
    worker.init_model()
    weights = dict(worker.actor.engine.module.named_parameters())
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    results = {}
    for name, case in steps["cases"].items():
        with torch.no_grad():
            for key, weight in weights.items():
                weight.copy_(start[key])
        actor = OmegaConf.merge(config.actor, case["actor"])
        worker.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(actor)))
        log_probs = score(worker, rows_of(case["rows"], rank, world)) if case.get("score") else None
        data = rows_of(case["rows"], rank, world)
        metrics = update(worker, data, case, actor.entropy_coeff)
        moved = {key: (start[key] - weight.detach()).full_tensor() for key, weight in weights.items()}
        results[name] = {"moved": moved, "metrics": metrics, "log_probs": log_probs}
    if rank == 0:
        torch.save(results, folder / f"moved_{world}.pt")


def rows_of(rows: list[dict[str, torch.Tensor]], rank: int, world: int) -> TensorDict:
    share = len(rows) // world
    own = rows[rank * share : (rank + 1) * share]
    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([row[name] for row in own], layout=torch.jagged)
        for name in own[0]
    }
    return TensorDict(columns, batch_size=share)


def score(worker: Any, data: TensorDict) -> list[torch.Tensor]:
    """The log-probability of every token but the first, per row."""
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False, temperature=1.0)
    log_probs = tu.get(worker.compute_log_prob(data), "log_probs")
    return [row_T[:-1] for row_T in log_probs.unbind()]


def update(worker: Any, data: TensorDict, case: dict[str, Any], entropy: float) -> dict[str, Any]:
    rows = len(case["rows"])
    # Micro-batches by tokens, or of so many rows.
    by = (
        {"max_token_len_per_gpu": case["tokens"]}
        if "tokens" in case
        else {"micro_batch_size_per_gpu": case["micro_batch"]}
    )
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz="tokens" in case,
        **by,
        calculate_entropy=entropy != 0.0,
        global_batch_size=rows,
        mini_batch_size=rows,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
    metrics: dict[str, Any] = tu.get(worker.actor.train_mini_batch(data), "metrics")
    return metrics


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Forked, so that every rank shares this process's imports.
    context = multiprocessing.get_context("fork")
    for world in map(int, sys.argv[2:]):
        ranks = [
            context.Process(target=rank_of, args=(Path(sys.argv[1]), rank, world)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if failed := [process.exitcode for process in ranks if process.exitcode]:
            sys.exit(f"{len(failed)} of {world} ranks failed")
