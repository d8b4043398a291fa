"""`verifiers:NAME`: the tasksets of the package `verifiers` (0.4, the extra `environments`) as environments.

    find("verifiers:textarena").load(game="Mastermind-v0")
    find("gsm8k").load()                # an installed package with a taskset, by its bare name

`installed` is what there is of that package, `taskset` a taskset of it, `games` those of TextArena
that the package's own taskset does not list. What plays them is `verl_ext.verifiers`.
"""

from collections.abc import Sequence
from typing import Any

from environments.taskset import Taskset
from environments.verifiers.installed import installed_tasksets, library


def load(name: str, **options: Any) -> Taskset:
    """The taskset of a name as users type it; its options are `VerifiersTaskset`'s and its config's fields.

    Raises EnvironmentUnusable where the library or the taskset is missing, or cannot be played here.
    """
    library()  # before what imports it: its absence has a message of its own
    from environments.verifiers.taskset import VerifiersTaskset

    return VerifiersTaskset(name, **options)


def names() -> Sequence[str]:
    """The tasksets that are installed, by the names that `load` takes; none without the library."""
    return installed_tasksets()
