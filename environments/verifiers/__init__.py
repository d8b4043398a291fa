"""`verifiers:NAME`: tasksets of the package `verifiers` (0.4, the extra `environments`) as environments."""

from typing import Any

from environments.taskset import Taskset
from environments.verifiers.installed import installed_tasksets as names
from environments.verifiers.installed import library


def load(name: str, **options: Any) -> Taskset:
    """The taskset, with the options of `VerifiersTaskset` and its config. Raises EnvironmentUnusable."""
    library()  # first: without it, a clear message
    from environments.verifiers.taskset import VerifiersTaskset

    return VerifiersTaskset(name, **options)


__all__ = ["load", "names"]
