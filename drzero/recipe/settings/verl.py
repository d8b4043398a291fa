"""veRL's keys that this project treats specially, by the tables of `verl.yaml`."""

from pathlib import Path

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

ROOTS: frozenset[str] = frozenset(_TABLES["roots"])
ALIASES: dict[str, str] = _TABLES["aliases"]
OLD_KEYS: dict[str, str] = _TABLES["old_keys"]
RENAMED: dict[str, str] = _TABLES["renamed"]
RESULTS: tuple[str, ...] = tuple(_TABLES["results"])
NEVER: tuple[str, ...] = (*ALIASES, *_TABLES["never"])
RUN: tuple[str, ...] = tuple(_TABLES["run"])
PACE: tuple[str, ...] = tuple(_TABLES["pace"])
