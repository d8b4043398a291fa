"""veRL's supervised trainer (`verl.trainer.sft_trainer`, veRL 0.9.1) on rows of token ids.

    torchrun --nproc-per-node 8 -m verl_ext.trainer.supervised outputs/checkpoints/warm_start/sft.yaml

veRL's own dataset would render the conversations again. Here they are already the ids of a rollout.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
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
from drzero.ops.records import HEARTBEATS
from drzero.ops.stop_time import Pace, seconds_left
from drzero.ops.telemetry import Heartbeat, Phase


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


@dataclass(frozen=True)
class _Seen:
    """A loader whose batches are announced before they are used."""

    loader: Iterable[Any]
    announce: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.announce()
            yield batch


class Progress:
    """Shows a trainer's phases to the watchdog, and ends it in time.

    veRL 0.9.1 has no hooks for that, so it takes the places of the loaders and of the checkpoint handler.
    `test_veRLs_supervised_trainer_still_has_no_hooks` fails when it need not.
    """

    def __init__(self, trainer: Any, folder: Path) -> None:
        self._trainer, self._step, self._pace = trainer, trainer.resume_global_step, Pace()
        self._out_of_time: str | None = None
        self._handler = trainer.ckpt_handler
        self._heartbeat = Heartbeat(folder / HEARTBEATS) if dist.get_rank() == 0 else None
        trainer.ckpt_handler = self
        trainer.train_dataloader = _Seen(trainer.train_dataloader, self._begin_step)
        if trainer.val_dataloader is not None:
            trainer.val_dataloader = _Seen(trainer.val_dataloader, lambda: self.beat("validation"))

    def beat(self, phase: Phase) -> None:
        """Log that the phase begins, or that its next batch does."""
        if self._heartbeat:
            self._heartbeat.beat(self._step, phase)

    def save_checkpoint(self, step: int) -> None:
        """Save as the handler does."""
        self.beat("save")
        with self._pace.apart("save"):
            self._handler.save_checkpoint(step=step)

    def _begin_step(self) -> None:
        """Raises OutOfTime after the step that the stop time left as the last. That one is saved."""
        if self._out_of_time:
            raise OutOfTime(self._out_of_time)
        if self._step > self._trainer.resume_global_step:
            self._pace.end_step()
        else:
            self._pace.begin_step()
        # This step takes its time before the next one does.
        left = seconds_left() - self._pace.step_s
        self._out_of_time = _agreed(self._pace.reason_to_stop(left, validates=False))
        if self._out_of_time:
            self._trainer.save_freq = 1
        self._step += 1
        self.beat("update")


def _agreed(reason: str | None) -> str | None:
    """The first rank's reason: clocks differ, and all must end at the same step."""
    reasons = [reason]
    dist.broadcast_object_list(reasons, src=0)
    return reasons[0]


def train(config: DictConfig) -> None:
    """Train to `trainer.total_training_steps` or the stop time, from the last checkpoint if there is one."""
    _join(config.trainer.device)
    torch.manual_seed(config.trainer.seed)  # which veRL 0.9.1 leaves out, so every adapter would begin anew
    trainer = SFTTrainer(config)
    progress = Progress(trainer, Path(config.trainer.default_local_dir).parent)
    try:
        trainer.fit()
    except OutOfTime as reason:
        print(reason, flush=True)
    progress.beat("done")
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
