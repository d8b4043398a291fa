"""What our trainers add to veRL's: heartbeats, honest accounting, safe checkpoints, alarms, an end in time.

A mixin that overrides hooks of veRL's `PPOTrainer` and nothing else, so any of its V1 modes can carry it
(veRL 0.9.1). How rewards become advantages is the subclass's matter (`verl_ext.trainers`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainer
from verl.utils.debug import marked_timer

from verl_ext.artefacts import announce
from verl_ext.checkpoints import prune_checkpoints, saved_step, step_folder
from verl_ext.collapse import CollapseWatch, collapse_metrics
from verl_ext.flow_counters import ObservedBuffer, counters_of
from verl_ext.heartbeat import Heartbeat
from verl_ext.step_metrics import (
    progress_line,
    rollout_metrics,
    valid_rows,
    validation_line,
    validation_metrics,
)
from verl_ext.step_rows import StepRow, read_log_probs, read_rows
from verl_ext.stop_time import Note, Pace, seconds_left, told_left, write_note


class TooManyFailures(RuntimeError):
    """Failed services spoiled so many rollouts that training on the rest, or its score, would mislead."""


class ObservedTrainer(PPOTrainer):
    """Heartbeats, our metrics, our rollout dump, and a stop when services fail; the CPU worker on a CPU."""

    base_mode: str
    """veRL's own name of the mode, which its base classes branch on."""
    _out_of_time: str | None = None
    """Why the run ends after this step; None as long as it goes on."""
    _saved: int | None = None
    """The step of this start's last checkpoint."""

    def __init__(self, config: DictConfig) -> None:
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.base_mode
            # veRL would prune an old checkpoint before the new one is whole (verl_ext.checkpoints).
            self._checkpoints_to_keep = config.trainer.max_actor_ckpt_to_keep
            config.trainer.max_actor_ckpt_to_keep = None
        self._heartbeat = Heartbeat(Path(config.run.dir) / "heartbeats.jsonl")
        self._heartbeat.beat(0, "start-up")
        self._collapse_watch = CollapseWatch()
        self._pace = Pace()
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        if self.config.trainer.device == "cpu":
            import ray

            from verl_ext.cpu_worker import CpuActorRolloutRefWorker

            for role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(CpuActorRolloutRefWorker)

    # Flow ---------------------------------------------------------------------------------------------------

    def _build_replay_buffer(self) -> Any:
        """veRL's own buffer, watched."""
        self._flow = counters_of(self.config, self.base_mode)
        return ObservedBuffer(super()._build_replay_buffer(), self._flow)

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        groups = super()._submit_batch_to_rollout(batch)
        self._flow.submitted(groups)
        return groups

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        groups = super()._add_prompts_to_generate(num_prompts)
        self._flow.replaced(groups)
        return groups

    # What a method brings -----------------------------------------------------------------------------------

    def _advantages(self, batch: KVBatchMeta, metrics: dict[str, Any], rows: list[StepRow]) -> KVBatchMeta:
        """Write the advantages of a batch."""
        raise NotImplementedError

    def _group(self, row: StepRow) -> Hashable:
        """Which rows a row's reward is compared with."""
        raise NotImplementedError

    def _method_metrics(self, rows: list[StepRow]) -> dict[str, float]:
        """What a step of this method is about."""
        raise NotImplementedError

    # Phases -------------------------------------------------------------------------------------------------

    def fit(self, agent_loop_manager: Any) -> None:  # noqa: D102
        try:
            with self._flow.watched(self.config.flow.every_s):
                super().fit(agent_loop_manager)
            if self._out_of_time:
                write_note(Path(self.config.run.dir), Note(self.total_training_steps, self._out_of_time))
        finally:
            self._heartbeat.beat(self.global_steps, "done")

    def on_sample_begin(self) -> None:  # noqa: D102 - veRL's own hooks, here and below
        self._heartbeat.beat(self.global_steps, "rollout")
        super().on_sample_begin()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "log-probs")
        return super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "advantage")
        rows = read_rows(batch)
        real, good = sum(not row.padding for row in rows), sum(row.counts for row in rows)
        self._flow.judged(self._expected_rollouts, real, good)
        self._stop_on_failures(rows)
        if folder := self.config.trainer.rollout_data_dir:
            self._dump(rows, Path(folder))
        return self._advantages(batch, metrics, rows)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self._heartbeat.beat(self.global_steps, "update")
        return super()._update_actor(batch, metrics)

    def _save_checkpoint(self) -> None:
        self._heartbeat.beat(self.global_steps, "save")
        folder, keep = Path(self.config.trainer.default_local_dir), self._checkpoints_to_keep
        with self._pace.apart("save"):
            # Room for the new one first, but never without a whole one.
            prune_checkpoints(folder, max(keep - 1, 1) if keep else None)
            super()._save_checkpoint()
            prune_checkpoints(folder, keep)
        self._saved = self.global_steps
        if saved_step(folder) == self._saved:
            announce(step_folder(folder, self._saved))

    def on_step_end(self) -> None:  # noqa: D102
        self._save_if_out_of_time()
        self._heartbeat.beat(self.global_steps, "weight-sync")
        super().on_step_end()

    def on_validate_begin(self) -> None:  # noqa: D102
        if self._out_of_time is None:
            self._heartbeat.beat(self.global_steps, "validation")
            super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        """veRL's; nothing when the time is out, and the next start makes up for it."""
        if self._out_of_time is not None:
            return {}
        with self._pace.apart("validation"):
            return super()._validate()

    # Stop time ----------------------------------------------------------------------------------------------

    def on_train_begin(self) -> None:  # noqa: D102
        # However little time is left, the first step is begun: nobody knows what it takes, and a run that is
        # started again and again must get on.
        if (left := seconds_left()) <= 0:
            self._out_of_time = f"{told_left(left)} when the first step was to begin"
            self._end_after(self.global_steps - 1)
            return
        self._pace.begin_step()
        super().on_train_begin()

    def _save_if_out_of_time(self) -> None:
        """Decide whether another step fits; when none does, save this one unless veRL has just done so.

        Before the weights are synchronised, as veRL itself saves: a GPU has room for a save while the rollout
        engine sleeps.
        """
        self._pace.end_step()
        trainer, step = self.config.trainer, self.global_steps
        if step >= self.total_training_steps:
            return
        validates = trainer.test_freq > 0 and step % trainer.test_freq == 0
        self._out_of_time = self._pace.reason_to_stop(seconds_left(), validates)
        if self._out_of_time and self._saved != step:
            with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                self._save_checkpoint()

    def _end_after(self, step: int) -> None:
        """Let veRL's loop end after `step` as after a last one: the trackers and Ray shut down in order."""
        print(f"step {step} is the last of this start: {self._out_of_time}", flush=True)
        self._heartbeat.beat(step, "out-of-time")
        self.total_training_steps = step

    # Accounting ---------------------------------------------------------------------------------------------

    @property
    def _expected_rollouts(self) -> int:
        """Rollouts of one batch; an asynchronous mode trains on several batches a step."""
        rollouts = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return int(rollouts // self.parameter_sync_step)

    def _stop_on_failures(self, rows: list[StepRow]) -> None:
        """Raise `TooManyFailures` above the configured share, naming the first causes."""
        good = sum(row.counts for row in rows)
        causes = [row.reward.get("reason_invalid") for row in rows if not row.padding and not row.counts]
        self._check_failed_share(f"step {self.global_steps}", self._expected_rollouts, good, causes)

    def _check_failed_share(self, what: str, expected: int, good: int, causes: list[str | None]) -> None:
        """`causes` are those of the rows that do not count; what is missing beside them has raised."""
        limit = self.config.run.max_failed_share
        if expected - good > limit * expected:
            raise TooManyFailures(
                f"{what}: {1 - good / expected:.0%} of {expected} rollouts were spoiled "
                f"(run.max_failed_share={limit:.0%}). {expected - good - len(causes)} raised in the agent "
                f"loop (see trainer.log), {len(causes)} are invalid, the first because: {causes[:3]}. Rerun "
                "to resume from the last checkpoint once the service is up again."
            )

    def _compute_metrics(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        timing_raw: dict[str, float],
        global_steps: int,
        epoch: int,
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        rows = read_rows(batch)
        metrics.update(rollout_metrics(rows, self._expected_rollouts * self.parameter_sync_step))
        metrics.update(self._method_metrics(rows))
        metrics.update(
            collapse_metrics(rows, [self._group(row) for row in rows], read_log_probs(batch, rows))
        )
        alarms = self._collapse_watch.look(metrics)
        if self._collapse_watch.judged:
            metrics["drzero/collapse/alarms"] = len(self._collapse_watch.standing)
        print(progress_line(metrics, global_steps, self.total_training_steps), flush=True)
        for alarm in alarms:
            print(f"step {global_steps}: {alarm}", flush=True)
        if self._out_of_time:
            self._end_after(global_steps)

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[int],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """veRL's validation metrics and ours, both without the rows that a failed service has spoiled.

        Raises TooManyFailures above the configured share; a rerun makes up for the validation.
        """
        infos = reward_extra_infos_dict
        expected = sum((expected_acc_counts or {}).values())
        metrics = validation_metrics(infos, expected)
        print(validation_line(metrics, self.global_steps), flush=True)
        good = valid_rows(infos)
        causes = [
            infos["reason_invalid"][row] for row, valid in enumerate(infos.get("valid", ())) if not valid
        ]
        self._check_failed_share(f"validation after step {self.global_steps}", expected, len(good), causes)
        if good:
            # Of the rest veRL would average flags and hop counts.
            kept = {name: [infos[name][row] for row in good] for name in ("reward", "f1")}
            sources, uids, turns = (
                [column[row] for row in good] for column in (data_sources, sample_uids, sample_turns)
            )
            metrics |= super()._val_metrics_update(sources, uids, kept, turns)
        return metrics

    # Rollout dump -------------------------------------------------------------------------------------------

    def _log_rollout_data(
        self, batch: KVBatchMeta, timing_raw: dict[str, float], rollout_data_dir: str
    ) -> None:
        """Nothing: `_dump` has done it. veRL's has flat text and comes after the checkpoint."""

    def _dump(self, rows: list[StepRow], folder: Path) -> None:
        """Write a step's rollouts with turns, reward and solver attempts, before they are learnt from.

        So every checkpoint has the dumps of all its steps, whenever the run was killed.
        """
        part = f"_{self.local_trigger_step}" if self.parameter_sync_step > 1 else ""
        target = folder / f"step_{self.global_steps:04d}{part}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            for row in sorted(rows, key=lambda row: row.key):
                if not row.padding:
                    file.write(json.dumps(_dump_record(row, self.global_steps), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        announce(target)


def _dump_record(row: StepRow, step: int) -> dict[str, Any]:
    reward = {name: value for name, value in row.reward.items() if name != "attempts"}
    told = {name: row.extra_info.get(name) for name in ("doc_id", "document", "question")}
    return {
        "step": step,
        "key": row.key,
        "hop": row.hop,
        **told,
        "trajectory": row.trajectory.to_dict(),
        "token_drift": row.token_drift,
        "reward": reward,
        "attempts": json.loads(row.reward.get("attempts", "[]")),
    }
