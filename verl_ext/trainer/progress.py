"""A run's progress: its phases, its checkpoints, and an early end at the stop time or at a collapse."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.debug import marked_timer

from drzero.ops.artefacts import announce
from drzero.ops.notices import CHECKPOINT_KIND, STARTUP_KIND
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.stop_time import Note, Pace, describe_left, seconds_left, write_note
from drzero.ops.telemetry import Heartbeat
from verl_ext.checkpoints import prune_checkpoints, saved_step, saving, step_folder


class ProgressMixin(PPOTrainer):
    """Logs each phase, and decides after each step whether to go on. Every start makes one step."""

    _out_of_time: str | None = None  # why there is no time for another step
    _collapsed: str | None = None  # the collapse alarms that end the run
    _saved: int | None = None  # the step of this start's last checkpoint

    def __init__(self, config: DictConfig) -> None:
        self._pace = Pace()
        self._heartbeat = Heartbeat(Path(config.run.dir) / "heartbeats.jsonl")
        self._heartbeat.beat(0, "start-up")
        self._events = EventLog(Path(config.run.dir) / "logs" / EVENTS_FILE)
        with open_dict(config):
            self._checkpoints_to_keep = config.trainer.max_actor_ckpt_to_keep
            config.trainer.max_actor_ckpt_to_keep = None
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        rollout = self.config.actor_rollout_ref.rollout.name
        text = "loading the model, then starting the rollout engines"
        if rollout == "sglang" and self.config.trainer.device != "cpu":
            text += "; where flashinfer has no kernels yet, it compiles them for about two minutes"
        self._events.add(STARTUP_KIND, "trainer", text)
        super()._init_resource_pool_mgr()

    def on_init_end(self) -> None:  # noqa: D102
        text = "model and engines are up: weights go to the engines, then the first rollouts start"
        self._events.add(STARTUP_KIND, "trainer", text)
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:  # noqa: D102 - veRL's own hooks, here and below
        try:
            super().fit(agent_loop_manager)
        finally:
            # After its last step, veRL has counted on to the next.
            self._heartbeat.beat(min(self.global_steps, self.total_training_steps), "done")
        self.logger.finish()
        if "wandb" in self.config.trainer.logger:
            import wandb

            # Ray kills wandb's service with this process, before wandb's own exit hook, which would fail.
            wandb.teardown()
        if self._ends_because:
            note = Note(self.total_training_steps, self._ends_because, collapsed=bool(self._collapsed))
            write_note(Path(self.config.run.dir), note)

    @property
    def _ends_because(self) -> str | None:
        return self._collapsed or self._out_of_time

    def on_train_begin(self) -> None:  # noqa: D102
        if (left := seconds_left()) <= 0:
            self._out_of_time = f"{describe_left(left)} when the first step was to begin"
            self._end_after(self.global_steps - 1)
            return
        self._pace.begin_step()
        super().on_train_begin()

    def on_sample_begin(self) -> None:  # noqa: D102
        self._heartbeat.beat(self.global_steps, "rollout")
        super().on_sample_begin()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "log-probs")
        return super()._compute_old_log_prob(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "update")
        return super()._update_actor(batch, metrics)

    def on_step_end(self) -> None:
        """Save a last step before the weight sync, while the engine sleeps and a GPU has room."""
        self._pace.end_step()
        trainer, step = self.config.trainer, self.global_steps
        if step < self.total_training_steps:
            validates = trainer.test_freq > 0 and step % trainer.test_freq == 0
            self._out_of_time = self._pace.reason_to_stop(seconds_left(), validates)
            if self._ends_because and self._saved != step:
                with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                    self._save_checkpoint()
        self._heartbeat.beat(step, "weight-sync")
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        self._heartbeat.beat(self.global_steps, "save")
        folder, keep = Path(self.config.trainer.default_local_dir), self._checkpoints_to_keep
        with self._pace.apart("save"):
            # Make room first, but never remove the only whole checkpoint.
            prune_checkpoints(folder, max(keep - 1, 1) if keep else None)
            with saving(folder, self.global_steps):
                super()._save_checkpoint()
            prune_checkpoints(folder, keep)
        if saved_step(folder) == self.global_steps:
            path = step_folder(folder, self.global_steps)
            announce(path)
            self._events.add(CHECKPOINT_KIND, "trainer", f"checkpoint of step {self.global_steps}: {path}")
        self._saved = self.global_steps

    def on_validate_begin(self) -> None:  # noqa: D102
        if self._out_of_time is None:
            self._heartbeat.beat(self.global_steps, "validation")
            super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        """Like veRL's, but empty when time has run out. The next start validates instead."""
        if self._out_of_time is not None:
            return {}
        with self._pace.apart("validation"):
            return super()._validate()

    def _end_after(self, step: int) -> None:
        """End veRL's loop after `step` as if it were the last, so that trackers and Ray shut down."""
        print(f"step {step} is the last of this start: {self._ends_because}", flush=True)
        if self._out_of_time:
            self._heartbeat.beat(step, "out-of-time")
        self.total_training_steps = step
