"""Warn about the demo policy on another corpus: its numbers look healthy, but its questions are nonsense."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from data.demo_world import KIND_WEIGHTS
from data.errors import DataError
from data.parquet_io import read_parquet
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, warning

_ID = re.compile(rf"({'|'.join(KIND_WEIGHTS)})-[a-z-]+")
_LOOKED_AT = 20
_WHY = (
    "the demo policy knows only the demo's invented world, so its questions and answers about this corpus "
    "mean nothing"
)
_FIX = "rehearse with it, and judge a corpus with a model that can read (drzero preview source=… endpoint=…)"


def demo_notice(model: str, prompts: Path) -> str | None:
    """One line for the demo policy with prompts about another corpus, else None."""
    return f"{_WHY}; {_FIX}" if is_demo_policy(model) and not is_demo_corpus(documents_of(prompts)) else None


def check_demo_policy(ctx: CheckContext) -> Iterator[Finding]:
    """The demo policy should get prompts about the demo's world."""
    prompts = Path(str(ctx.config.data.train_files))
    if prompts.exists() and demo_notice(str(ctx.config.base_model), prompts):
        yield warning("base_model", _WHY, _FIX)


def is_demo_policy(model: str) -> bool:
    """Whether the demo made this model folder with its adapter (drzero/stages/demo_models.py)."""
    made_from = Path(model) / "made_from"
    return made_from.is_file() and len(made_from.read_text(encoding="utf-8").split()) == 3


def is_demo_corpus(doc_ids: Iterable[str]) -> bool:
    """Whether the first documents have ids of the demo's world."""
    return all(map(_ID.fullmatch, islice(doc_ids, _LOOKED_AT)))


def documents_of(prompts: Path) -> list[str]:
    """The document ids of prompts; none if the file cannot be read, which other checks report."""
    try:
        return [
            info["doc_id"] for info in read_parquet(prompts, ["extra_info"]).column("extra_info").to_pylist()
        ]
    except (DataError, KeyError):
        return []
