"""veRL's supervised trainer (`verl.trainer.sft_trainer`, veRL 0.9.1) on rows of token ids.

    torchrun --nproc-per-node 8 -m verl_ext.trainer.supervised outputs/checkpoints/warm_start/sft.yaml

veRL's own dataset would render the conversations again. Here they are already the ids of a rollout.
"""

import os
import sys
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils.device import get_nccl_backend
from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

from drzero.ops.errors import OutOfTime
from verl_ext.stop_time import Pace, seconds_left


class DemonstrationRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of `ids` and `own` (1 for the model's own tokens), as veRL's `data.custom_cls`."""

    def __init__(self, parquet_files: str, **_: Any) -> None:
        """Read the rows. veRL also passes a tokenizer and its config."""
        self._rows: list[dict[str, list[int]]] = pq.read_table(parquet_files).to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids_T, own_T = (torch.tensor(self._rows[place][name]) for name in ("ids", "own"))
        return {"input_ids": ids_T, "position_ids": torch.arange(len(ids_T)), "loss_mask": own_T}


class StoppingTrainer(SFTTrainer):
    """veRL's trainer, which saves and raises OutOfTime when the stop time leaves no other step."""

    _pace: Pace | None = None
    _reason: str | None = None

    def _get_batch_seqlens(self, data: Any) -> Any:
        """As veRL's, which calls it as each step begins."""
        if self._reason:
            raise OutOfTime(self._reason)
        if self._pace:
            self._pace.end_step()
        else:
            self._pace = Pace()
        # This step takes its time before the next one does.
        left = seconds_left() - self._pace.step_s
        self._reason = _agreed(self._pace.reason_to_stop(left, validates=False))
        if self._reason:
            self.save_freq = 1
        return super()._get_batch_seqlens(data)


def _agreed(reason: str | None) -> str | None:
    """The first rank's reason: clocks differ, and all must end at the same step."""
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=0)
    return reasons[0]


def train(config: DictConfig) -> None:
    """Train to `trainer.total_training_steps` or the stop time, from the last checkpoint if there is one."""
    _join(config.trainer.device)
    torch.manual_seed(config.trainer.seed)  # which veRL 0.9.1 leaves out, so every adapter would begin anew
    try:
        StoppingTrainer(config).fit()
    except OutOfTime as reason:
        print(reason, flush=True)
    destroy_global_process_group()


def _join(device: str) -> None:
    """Start the process group. veRL's would name the CPU's backend twice, which torch refuses."""
    if device == "cpu":
        from verl_ext.rollout import cpu_worker  # noqa: F401 - registers the engine
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        initialize_global_process_group()
        return
    # With torch's TCP store, a lone process would listen on every interface.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    loaded = OmegaConf.load(sys.argv[1])
    assert isinstance(loaded, DictConfig)
    train(loaded)
