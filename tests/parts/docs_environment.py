"""The environment of docs/environments.md, as a reader copies it from the page."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_environment(folder: Path) -> Path:
    """Write the page's Python listing to `environments/number.py` in a folder. Returns `environments`."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    environments = folder / "environments"
    environments.mkdir(parents=True, exist_ok=True)
    (environments / "number.py").write_text(listing, encoding="utf-8")
    return environments
