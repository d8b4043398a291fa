"""The evaluate stage: `run` runs it, `benchmarks` asks questions, `environment` plays episodes.

The two score modules turn the journal's records into a table and `report.json`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ANSWERS = "answers.jsonl"
"""An evaluation's journal: a record for each question or episode."""
Records = Sequence[Mapping[str, Any]]
"""Records of ANSWERS."""
