"""Text of a run, made safe to show: nothing in it may act on the page or hide from its reader."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from drzero.ops.notices import OBEYED

LONGEST = 20_000

_KEPT = "\t\u200c\u200d"  # scripts need the joiners


def visible(text: str) -> str:
    """The text with each control, direction mark and shapeless character as a picture or a number."""
    return OBEYED.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if found[0] in _KEPT:
        return found[0]
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    return "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"


def cut(text: str, source: str, limit: int = LONGEST) -> str:
    """At most `limit` characters, and a note about the rest. `source` names the file with the whole text."""
    if len(text) <= limit:
        return text
    left_out = len(text) - limit
    return f"{text[:limit]}\n[{left_out:,} of {len(text):,} characters are left out here: see {source}]"


def answer_pattern(answer: str | None) -> re.Pattern[str] | None:
    """Finds an answer's words in sequence, in any case and punctuation. None without words."""
    words = re.findall(r"\w+", answer or "")
    if not words or len(words) > 20:
        return None
    return re.compile(r"\b" + r"[\W_]+".join(map(re.escape, words)) + r"\b", re.IGNORECASE)


def highlighted(text: str, pattern: re.Pattern[str] | None) -> Markup:
    """The text as HTML, with matches in `<mark>`."""
    if pattern is None:
        return escape(visible(text))
    parts, end = [], 0
    for found in pattern.finditer(text):
        parts += [escape(visible(text[end : found.start()])), Markup("<mark>"), escape(visible(found[0]))]
        parts.append(Markup("</mark>"))
        end = found.end()
    return Markup("").join([*parts, escape(visible(text[end:]))])


def _shown(value: Any) -> Any:
    """Every value that a template prints passes here before it is escaped."""
    if value is None:
        return "–"
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return visible(value[:LONGEST]) + "…" * (len(value) > LONGEST) if is_text else value


FOLDER = Path(__file__).parent / "html"
TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
