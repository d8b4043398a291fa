"""The demo policy on another corpus than the demo's: it works, and means nothing.

It was warm-started on the words of an invented world (drzero/policies/demo/README.md), so that a laptop can
rehearse the recipe: with any other corpus its numbers look healthy and its questions are nonsense.
"""

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
"""The id of a passage of the world."""
_LOOKED_AT = 20
_WHY = (
    "the demo policy knows only the demo's invented world: what it asks and answers about this corpus means "
    "nothing"
)
_FIX = "rehearse with it, and judge a corpus with a model that can read (drzero preview source=… endpoint=…)"


def demo_notice(model: str, prompts: Path) -> str | None:
    """One line for the demo policy on prompts about another corpus; None for any other pair."""
    return f"{_WHY}; {_FIX}" if is_demo_policy(model) and not is_demo_corpus(documents_of(prompts)) else None


def check_demo_policy(ctx: CheckContext) -> Iterator[Finding]:
    """The demo policy should be asked about the demo's world."""
    prompts = Path(str(ctx.config.data.train_files))
    if prompts.exists() and demo_notice(str(ctx.config.base_model), prompts):
        yield warning("base_model", _WHY, _FIX)


def is_demo_policy(model: str) -> bool:
    """Whether a model folder is the one that the demo made with its adapter (drzero/stages/demo.py)."""
    made_from = Path(model) / "made_from"
    return made_from.is_file() and len(made_from.read_text(encoding="utf-8").split()) == 3


def is_demo_corpus(doc_ids: Iterable[str]) -> bool:
    """Whether all of the first documents have ids as the demo world gives them."""
    return all(map(_ID.fullmatch, islice(doc_ids, _LOOKED_AT)))


def documents_of(prompts: Path) -> list[str]:
    """The documents that prompts are about, by id; none if the file cannot be read, which others report."""
    try:
        return [
            info["doc_id"] for info in read_parquet(prompts, ["extra_info"]).column("extra_info").to_pylist()
        ]
    except (DataError, KeyError):
        return []
