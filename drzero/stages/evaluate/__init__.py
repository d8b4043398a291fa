"""The evaluate stage on benchmarks and in environments."""

from collections.abc import Mapping, Sequence
from typing import Any

ANSWERS = "answers.jsonl"  # an evaluation's journal: a record for each question or episode
Records = Sequence[Mapping[str, Any]]
