"""Stop time: the run ends at a saved step while there is still time to save it (docs/stopping.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl.utils.debug import marked_timer

from verl_ext.stop_time import Note, Pace, describe_left, seconds_left, write_note
from verl_ext.trainer.mixins.heartbeats import HeartbeatMixin


class StopTimeMixin(HeartbeatMixin):
    """Decides after each step whether another one fits before the stop time; if not, saves and ends.

    The first step of a start always runs, however little time is left: its duration is unknown, and a run
    that is restarted again and again must make progress.
    """

    _out_of_time: str | None = None
    """Why the run ends after this step; None while it continues."""
    _saved: int | None = None
    """The step of this start's last checkpoint."""

    def __init__(self, config: DictConfig) -> None:
        self._pace = Pace()
        super().__init__(config)

    def fit(self, agent_loop_manager: Any) -> None:  # noqa: D102 - veRL's own hooks, here and below
        super().fit(agent_loop_manager)
        if self._out_of_time:
            write_note(Path(self.config.run.dir), Note(self.total_training_steps, self._out_of_time))

    def on_train_begin(self) -> None:  # noqa: D102
        if (left := seconds_left()) <= 0:
            self._out_of_time = f"{describe_left(left)} when the first step was to begin"
            self._end_after(self.global_steps - 1)
            return
        self._pace.begin_step()
        super().on_train_begin()

    def on_step_end(self) -> None:
        """Save now if no further step fits and veRL has not just saved.

        Before the weights are synchronised, as veRL itself saves: a GPU has room for a save while the rollout
        engine sleeps.
        """
        self._pace.end_step()
        trainer, step = self.config.trainer, self.global_steps
        if step < self.total_training_steps:
            validates = trainer.test_freq > 0 and step % trainer.test_freq == 0
            self._out_of_time = self._pace.reason_to_stop(seconds_left(), validates)
            if self._out_of_time and self._saved != step:
                with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                    self._save_checkpoint()
        super().on_step_end()

    def _save_checkpoint(self) -> None:
        with self._pace.apart("save"):
            super()._save_checkpoint()
        self._saved = self.global_steps

    def on_validate_begin(self) -> None:  # noqa: D102
        if self._out_of_time is None:
            super().on_validate_begin()

    def _validate(self) -> dict[str, float]:
        """As veRL's; empty when time has run out, and the next start validates instead."""
        if self._out_of_time is not None:
            return {}
        with self._pace.apart("validation"):
            return super()._validate()

    def _compute_metrics(self, *args: Any, **kwargs: Any) -> None:
        """As veRL's, the last thing of a step that may still change whether its loop continues."""
        super()._compute_metrics(*args, **kwargs)
        if self._out_of_time:
            self._end_after(self.global_steps)

    def _end_after(self, step: int) -> None:
        """Let veRL's loop end after `step` as after a last one: the trackers and Ray shut down in order."""
        print(f"step {step} is the last of this start: {self._out_of_time}", flush=True)
        self._heartbeat.beat(step, "out-of-time")
        self.total_training_steps = step
