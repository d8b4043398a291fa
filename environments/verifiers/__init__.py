"""`verifiers:NAME`: tasksets of the package `verifiers` (0.4, the extra `environments`) as environments."""

from collections.abc import Sequence
from typing import Any

from environments.taskset import Taskset
from environments.verifiers.installed import installed_tasksets, library


def load(name: str, **options: Any) -> Taskset:
    """The taskset, with the options of `VerifiersTaskset` and its config. Raises EnvironmentUnusable."""
    library()  # first: without it, a clear message
    from environments.verifiers.taskset import VerifiersTaskset

    return VerifiersTaskset(name, **options)


def names() -> Sequence[str]:
    """The installed tasksets. Empty without the library."""
    return installed_tasksets()
