"""Draws README's first picture from README's own table: exact match by iteration, a colour a run.

python -m bench.learning_by_seed        # writes docs/learning-by-seed.png
"""

import re
from pathlib import Path
from typing import Any

from drzero.runs.report.charts import scores_chart, to_png
from drzero.stages.evaluate.intervals import wilson

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (\d+) \|" + r" (\.\d+)? *\|" * 6 + "$", re.MULTILINE)
MODELS = ("before", "iteration 1", "iteration 2")
ASKED = 100  # questions of each kind


def scores(first: int) -> list[dict[str, Any]]:
    """A row for each score. Two hops begin at cell 0, one hop at cell 3."""
    rows = []
    for match in ROW.finditer((ROOT / "README.md").read_text(encoding="utf-8")):
        run, *cells = match.groups()
        for model, cell in zip(MODELS, cells[first : first + 3], strict=True):
            if cell:
                low, high = wilson(round(float(cell) * ASKED), ASKED)
                rows.append({"run": f"run {run}", " ": model, "em": float(cell), "low": low, "high": high})
    return rows


def main() -> None:
    """Draw a panel for each number of hops, on the same scale."""
    panels = []
    for title, first in (("two hops", 0), ("one hop", 3)):
        (chart,) = scores_chart(title, title, [row | {"n": ASKED} for row in scores(first)], " ", "run")
        # There are more runs than a page's charts have colours.
        chart.spec["encoding"]["color"]["scale"] = {"scheme": "tableau10"}
        panels.append({**chart.spec, "title": title, "width": 380, "height": 230})
    to_png({"hconcat": panels}, ROOT / "docs" / "learning-by-seed.png")


if __name__ == "__main__":
    main()
