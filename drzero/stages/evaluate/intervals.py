"""95 % intervals of a share, of an average of shares, and of a mean."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's interval of `right` of `n`, with a width even at 0 and 1. Raises ValueError."""
    found = stats.binomtest(right, n).proportion_ci(LEVEL, method="wilson")
    return float(found.low), float(found.high)


def averaged(
    weights: Sequence[int], rights: Sequence[int], sizes: Sequence[int]
) -> tuple[float, float, float]:
    """A weighted average of shares and its interval, from Wilson's ends.

    MOVER: Zou, Huang and Zhang, Comput. Stat. Data Anal. 53, 2009.
    """
    weight_B = np.array(weights) / sum(weights)
    share_B = np.array(rights) / np.array(sizes)
    end_B2 = np.array([wilson(right, n) for right, n in zip(rights, sizes, strict=True)])
    mean = float(weight_B @ share_B)
    below, above = np.linalg.norm(weight_B[:, None] * (end_B2 - share_B[:, None]), axis=0)
    return mean, mean - float(below), mean + float(above)


def mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's interval of a mean. None for fewer than two values, a point for equal ones."""
    if len(values) < 2:
        return None, None
    mean, error = float(np.mean(values)), float(stats.sem(values))
    half = error * float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return mean - half, mean + half
