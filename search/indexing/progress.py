"""How far long work is: a bar on a terminal, which goes when the work is done; elsewhere a line a minute."""

import io
import sys
from typing import Any

from tqdm import tqdm

from drzero.ops.console import say

LINE_S = 60.0
_always: dict[str, Any] = {"leave": False}


class _Lines(io.StringIO):
    """Prints what tqdm would draw."""

    def write(self, text: str) -> int:
        if line := text.strip():
            say("index", line)
        return len(text)


def hide() -> None:
    """Show nothing of this process."""
    _always["disable"] = True


def progress(what: str, unit: str, total: int | None = None, done: Any = None) -> "tqdm[Any]":
    """Count `done`, or the calls of `update`."""
    form: dict[str, Any] = {"mininterval": 1.0, "delay": 1.0}
    amount = "{n:,}" if total is None else "{n:,} of {total:,}"
    rest = "" if total is None else "<{remaining}"
    shown = f"{amount} {unit} [{{elapsed}}{rest}]"
    if sys.stderr.isatty():
        form["bar_format"] = "{desc}: " + ("" if total is None else "{percentage:3.0f}%|{bar}| ") + shown
    else:
        # Without miniters, tqdm would print further lines in between.
        form = {"mininterval": LINE_S, "delay": LINE_S, "miniters": 1, "file": _Lines()}
        form["bar_format"] = "{desc}: " + shown
    return tqdm(done, desc=what, total=total, **form, **_always)
