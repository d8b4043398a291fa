"""Checkpoints: pruned only when the new one is whole, and announced when it is."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.v1 import PPOTrainer

from verl_ext.artefacts import announce
from verl_ext.checkpoints import prune_checkpoints, saved_step, step_folder


class CheckpointMixin(PPOTrainer):
    """Prunes in veRL's place, which would remove the old checkpoint too early (`verl_ext.checkpoints`)."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            self._checkpoints_to_keep = config.trainer.max_actor_ckpt_to_keep
            config.trainer.max_actor_ckpt_to_keep = None
        super().__init__(config)

    def _save_checkpoint(self) -> None:
        folder, keep = Path(self.config.trainer.default_local_dir), self._checkpoints_to_keep
        # Make room for the new checkpoint first, but never remove the only whole one.
        prune_checkpoints(folder, max(keep - 1, 1) if keep else None)
        super()._save_checkpoint()
        prune_checkpoints(folder, keep)
        if saved_step(folder) == self.global_steps:
            announce(step_folder(folder, self.global_steps))
