"""Vega, Vega-Lite and Vega-Embed as one script for the page.

vl-convert-python carries their sources and joins them, which takes two seconds of a core; so the script is
kept in the user's cache, by the version that made it.
"""

import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from vl_convert import javascript_bundle

from drzero.ops.files import atomic_write


def vega() -> str:
    """The script; made, and kept, when the cache does not have it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drzero"
    path = folder / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    script = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with suppress(OSError):  # without a place to keep it, the next page makes it again
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(path, script)
    return script
