"""`verifiers:NAME`: tasksets of the package `verifiers` (0.4, the extra `environments`) as environments.

    find("verifiers:textarena").load(game="Mastermind-v0")
    find("gsm8k").load()                # an installed package with a taskset, by its bare name

`verl_ext.verifiers` plays them.
"""

from collections.abc import Sequence
from typing import Any

from environments.taskset import Taskset
from environments.verifiers.installed import installed_tasksets, library


def load(name: str, **options: Any) -> Taskset:
    """The taskset of this name. Takes the options of `VerifiersTaskset` and the fields of its config.

    Raises EnvironmentUnusable if library or taskset is missing or cannot be played here.
    """
    library()  # first: without it, a clear message
    from environments.verifiers.taskset import VerifiersTaskset

    return VerifiersTaskset(name, **options)


def names() -> Sequence[str]:
    """The installed tasksets. Empty without the library."""
    return installed_tasksets()
