"""Which of a machine's GPUs train, and which only sample: `machine.serve_gpus`, a number or a list of ids.

veRL 0.9.1 takes numbers alone. Its training pool comes first, and Ray hands out GPUs in the order of
CUDA_VISIBLE_DEVICES, so ids are chosen by that order (tests/verl_ext/test_ray.py).
"""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

SERVE_GPUS = "machine.serve_gpus"
VISIBLE = "CUDA_VISIBLE_DEVICES"

Split = int | Sequence[int] | None


def count(serve_gpus: Split) -> int:
    """GPUs of each machine that only sample."""
    if serve_gpus is None:
        return 0
    return serve_gpus if isinstance(serve_gpus, int) else len(serve_gpus)


def training_gpus(gpus: int, serve_gpus: Split) -> int:
    """GPUs of each machine that train. At least one: `fault` names an impossible split by its own key."""
    return max(1, gpus - count(serve_gpus))


def pools(config: DictConfig) -> list[int]:
    """GPUs of each machine by pool: the training ones and, in mode=separate_async, the sampling ones."""
    rollout = config.actor_rollout_ref.rollout
    return [config.trainer.n_gpus_per_node, *([rollout.n_gpus_per_node] if rollout.nnodes else [])]


def fault(config: DictConfig) -> str | None:
    """Why a stage with a trainer cannot split its GPUs this way, and what to do; None if it can."""
    machine, serving = config.machine, config.machine.serve_gpus
    gpus, last = machine.gpus, machine.gpus - 1
    if serving is None:
        return None
    ids = list(serving) if OmegaConf.is_list(serving) else []
    if machine.device == "cpu":
        return "a CPU's processes all train and sample in turn: leave it out, or choose hardware=8xh100"
    if not count(serving):
        return "no GPU would sample: leave it out, and all train and sample in turn"
    if len(ids) > len(set(ids)):
        return "an id is given twice: name each once"
    if ids and max(ids) > last:
        fix = f"number them among those of the run, which {VISIBLE} chooses, or raise machine.gpus"
        return f"machine.gpus={gpus} are GPUs 0 to {last}, without a GPU {max(ids)}: {fix}"
    if count(serving) >= gpus:
        more = f"set it to {last} at most" if last else "it needs two GPUs or more (machine.gpus)"
        return f"none of {gpus} (machine.gpus) would be left to train: {more}"
    if ids and machine.nodes > 1:
        return f"ids are for one machine: write {SERVE_GPUS}={len(ids)}, of each of {machine.nodes}"
    if not config.trainer.v1.trainer_mode.endswith("separate_async"):
        return "only mode=separate_async has GPUs that sample alone: leave mode= out"
    return None


def visible_devices(machine: DictConfig, now: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES with the ids that serve last; None where the order is right or unknown."""
    serving = machine.get("serve_gpus")
    if not OmegaConf.is_list(serving):
        return None
    seen = now.split(",") if now else [str(index) for index in range(machine.gpus)]
    if len(seen) < machine.gpus:  # preflight reports it
        return None
    training = [index for index in range(machine.gpus) if index not in serving]
    return ",".join(seen[index] for index in (*training, *serving))
