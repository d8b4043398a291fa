"""Draws README's first picture from README's own table: exact match by iteration, a line a seed.

python -m bench.learning_by_seed        # writes docs/learning-by-seed.png
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (\d+) \|" + r" (\.\d+)? *\|" * 6 + "$", re.MULTILINE)


def scores() -> list[tuple[list[float], list[float]]]:
    """For each seed the scores at two hops and at one hop: before, and after each iteration that was run."""
    rows = [match.groups()[1:] for match in ROW.finditer((ROOT / "README.md").read_text(encoding="utf-8"))]
    return [([float(x) for x in row[:3] if x], [float(x) for x in row[3:] if x]) for row in rows]


def main() -> None:
    """Draw one panel a hop count, on the same scale."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for panel, title, place in zip(panels, ("two hops", "one hop"), (0, 1), strict=True):
        for number, seed in enumerate(scores(), 1):
            panel.plot(range(len(seed[place])), seed[place], marker="o", linewidth=2, label=f"seed {number}")
        panel.set(title=title, ylim=(0, 1), xticks=(0, 1, 2))
        panel.set_xticklabels(["before", "iteration 1", "iteration 2"])
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("exact match, 100 questions each")
    panels[1].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "learning-by-seed.png", dpi=140)


if __name__ == "__main__":
    main()
