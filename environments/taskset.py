"""A taskset: the rows of an environment, and the episode that each becomes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from environments.episode import Episode
from environments.row import Row, Split


class Taskset(ABC):
    """What an environment's `load` returns. One serves all episodes of a process: it does not change."""

    name: str
    max_turns: int = 1
    """Assistant turns of an episode at most; the run's own limit may be lower."""
    timeout_s: float = 30.0
    """Of one call of the environment's code; an episode that takes longer has failed."""
    needs_retrieval: bool = False
    """Whether episodes search the run's collection: the retrieval service then runs next to the model."""
    filters_groups: bool = False
    """Whether training replaces groups of equal rewards, which teach nothing (`algorithm.filter_groups`)."""
    held_out: str = "The rows of the split eval are in no training split."
    """What evaluation asks that training does not, for the report."""
    player: str = "verl_ext.episodes:play"
    """`module:function` that plays a row with a model, of the same form as the default: an environment that
    builds its own token ids has one of its own."""

    @abstractmethod
    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """`n` rows of a split, all for None, fewer where there are no more; a seed always gives the same."""

    @abstractmethod
    def episode(self, row: Row) -> Episode:
        """A new episode of a row. It shares nothing with another one that can change."""
