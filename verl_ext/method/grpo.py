"""The solver's advantages (GRPO, arXiv 2402.03300), without invalid rows. A lone row gets advantage 0."""

from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ext.method.hrpo import checked_rows

EPSILON = 1e-6  # added to the deviation


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, valid: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Advantage of each row: (reward - group mean) / (group sample deviation + 1e-6), shape (rows,).

    Invalid rows and equal rewards get 0. Raises ValueError for unequal shapes or a valid reward not finite.
    """
    reward, group, is_valid = checked_rows(rewards, groups, valid)
    advantages = np.zeros_like(reward)
    for label in np.unique(group[is_valid]):
        rows = is_valid & (group == label)
        own = reward[rows]
        # Compare the rewards: through rounding, equal ones can have a deviation above 0.
        if own.min() < own.max():
            advantages[rows] = (own - own.mean()) / (own.std(ddof=1) + EPSILON)
    return advantages


def hop_balanced(advantages: npt.NDArray[np.float64], hops: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Scale advantages (rows,) so that each hop count has the same sum of absolute values."""
    hop: npt.NDArray[Any] = np.asarray(hops)
    sizes = np.abs(advantages)
    totals = {label: total for label in np.unique(hop) if (total := sizes[hop == label].sum()) > 0}
    balanced = advantages.copy()
    for label, total in totals.items():
        balanced[hop == label] *= sizes.sum() / len(totals) / total
    return balanced
