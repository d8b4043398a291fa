"""Failure share: a step or validation that failing services have spoiled stops the run."""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.ppo.v1 import PPOTrainer

from verl_ext.trainer.step_rows import StepRow


class TooManyFailures(RuntimeError):
    """Failed services spoiled so many rollouts that training on the rest, or its score, would mislead."""


class FailureShareMixin(PPOTrainer):
    """Compares the rollouts that count with those expected, against `run.max_failed_share`."""

    @property
    def _expected_rollouts(self) -> int:
        """Rollouts of one batch; an asynchronous mode trains on several batches a step."""
        rollouts = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return int(rollouts // self.parameter_sync_step)

    def _stop_on_failures(self, rows: Sequence[StepRow]) -> None:
        """Raise `TooManyFailures` above the configured share, with the first causes."""
        good = sum(row.counts for row in rows)
        causes = [row.reward.get("reason_invalid") for row in rows if not row.padding and not row.counts]
        self._check_failed_share(f"step {self.global_steps}", self._expected_rollouts, good, causes)

    def _check_failed_share(self, what: str, expected: int, good: int, causes: Sequence[str | None]) -> None:
        """`causes` has one entry per invalid row; rollouts missing besides those have raised."""
        limit = self.config.run.max_failed_share
        if expected - good > limit * expected:
            raise TooManyFailures(
                f"{what}: {1 - good / expected:.0%} of {expected} rollouts were spoiled "
                f"(run.max_failed_share={limit:.0%}). {expected - good - len(causes)} raised in the agent "
                f"loop (see trainer.log), {len(causes)} are invalid, the first because: {causes[:3]}. Rerun "
                "to resume from the last checkpoint once the service is up again."
            )
