"""The templates, with one rule for all: whatever a run has written is made visible, then escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from drzero.runs.report.text import visible


def _shown(value: Any) -> Any:
    """Every value that a template prints passes here, before it is escaped."""
    if value is None:
        return "–"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


FOLDER = Path(__file__).parent / "html"
TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
