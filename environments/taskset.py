"""A taskset: the rows of an environment, and an episode for each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from environments.episode import Episode
from environments.row import Row, Split


class Taskset(ABC):
    """The result of an environment's `load`. All episodes of a process share it, so it must not change."""

    name: str
    max_turns: int = 1  # Most assistant turns of an episode. The run's own limit may be lower.
    timeout_s: float = 30.0  # Seconds for one call of the environment's code. A longer one fails the episode.
    needs_retrieval: bool = False
    """Whether episodes search the run's collection. The retrieval service then runs next to the model."""
    filters_groups: bool = False
    """Whether training replaces groups of equal rewards, which teach nothing (`algorithm.filter_groups`)."""
    held_out: str = "The rows of the split eval are in no training split."
    """For the report: how evaluation differs from training."""
    files: Sequence[Path] = ()
    """What an evaluation's answers depend on besides the options, such as a file of tasks."""
    player: str = "verl_ext.episodes:play"
    """The `module:function` that plays a row with a model, if the environment builds its own token ids."""

    @abstractmethod
    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """`n` rows of a split, or all for None. The same seed gives the same rows."""

    @abstractmethod
    def episode(self, row: Row) -> Episode:
        """A new episode, which shares no changing state with another one."""
