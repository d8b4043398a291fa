"""The common form of evaluations on benchmarks and in environments."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from drzero.stages.evaluate import Records

Job = Any  # a question, or an environment's row
Attempt = Any


@dataclass(frozen=True)
class Scores:
    """The results to print and write."""

    table: Table
    report: dict[str, Any]  # part of `report.json`: `benchmarks` and `averages`, each by name
    figures: dict[str, Any]
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """Jobs for one model, and how to run, record and score them."""

    jobs: Sequence[Job]
    key: Callable[[Job], str]
    conditions: dict[str, Any]  # Everything an answer depends on. A journal with other conditions is refused.
    to_do: str  # says what is left to do, with {total} and {missing}
    agent: Callable[[], AbstractAsyncContextManager[Callable[[Job], Awaitable[Attempt]]]]
    record: Callable[[Job, Attempt], dict[str, Any]]
    scores: Callable[[Records, Sequence[Job], str], Scores]
    """Scores the records, given the jobs that failed and the table's title."""
    searches: bool = True
