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


def train(config: DictConfig) -> None:
    """Train to `trainer.total_training_steps`, from the last checkpoint if there is one."""
    _join(config.trainer.device)
    torch.manual_seed(config.trainer.seed)  # which veRL 0.9.1 leaves out, so every adapter would begin anew
    SFTTrainer(config).fit()
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
