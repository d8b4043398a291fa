"""Small helpers for messages and for values that people type."""

import difflib
import ipaddress
import json
import math
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # this machine's names
_DEEPER = 100  # so much deeper, in brackets and calls, another writer may be


def nearest(word: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return up to `n` known names that look like `word`, the closest first."""
    return difflib.get_close_matches(word, list(known), n, cutoff)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'a'?)` to put behind an unknown name, or "" if no known name looks like it."""
    return suggest(nearest(word, known))


def suggest(candidates: Iterable[str]) -> str:
    """Return ` (did you mean 'a' or 'b'?)`, or "" without candidates."""
    quoted = [repr(candidate) for candidate in dict.fromkeys(candidates)]
    return f" (did you mean {' or '.join(quoted)}?)" if quoted else ""


def counted(number: float, noun: str) -> str:
    """Return the number with its noun: "1 GPU", "2 GPUs", "1,024 documents"."""
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}s"


def is_loopback(address: str) -> bool:
    """Whether a URL, `HOST:PORT` or host can only mean this machine."""
    if "://" not in address:
        is_bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
        address = f"//[{address}]" if is_bare_ipv6 else f"//{address}"
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, or no address at all
        return False


def is_encodable(value: Any) -> bool:
    """Whether a JSON value can be written: no NaN, no half of a surrogate pair, not too deep."""
    for _ in range(_DEEPER):
        value = [value]
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def encodable(value: Any) -> Any:
    """A JSON value with a question mark for each half of a surrogate pair."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def is_number(value: Any) -> bool:
    """Whether a value is a finite int or float. True and False count as 1 and 0."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False
