"""Group relative policy optimisation: the solver's advantages (arXiv 2402.03300).

Several answers to one prompt are compared with one another, using the sample deviation as veRL does. Unlike
veRL's own function this one leaves out invalid rows, and a group of one row gets advantage 0 instead of its
raw reward.

A batch of few prompts may hold five of two hops and one of one hop. What one hop count wants (another search)
the other is punished for, and the majority of each step then decides for both: `hop_balanced` gives every hop
count the same share of the update.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ext.method.hrpo import checked_rows

EPSILON = 1e-6
"""Added to the deviation."""


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, valid: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Advantage of each row: (reward - group mean) / (group sample deviation + 1e-6).

    All three inputs have shape (rows,): rewards as numbers, the prompt of each row as the group label, valid
    as booleans. Rows that are not valid get 0 and count in no group; a group of one valid row or of equal
    rewards gets 0. Raises ValueError on unequal shapes and on a valid reward that is not finite.
    """
    reward, group, is_valid = checked_rows(rewards, groups, valid)
    advantages = np.zeros_like(reward)
    for label in np.unique(group[is_valid]):
        rows = is_valid & (group == label)
        own = reward[rows]
        # Compare the rewards themselves: by rounding, the deviation of equal ones need not be 0.
        if own.min() < own.max():
            advantages[rows] = (own - own.mean()) / (own.std(ddof=1) + EPSILON)
    return advantages


def hop_balanced(advantages: npt.NDArray[np.float64], hops: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Advantages scaled by hop count, so that their absolute values add up to the same in each.

    Both have shape (rows,). The sum over all rows stays; hop counts whose advantages are all 0 take no part.
    """
    hop: npt.NDArray[Any] = np.asarray(hops)
    sizes = np.abs(advantages)
    totals = {label: total for label in np.unique(hop) if (total := sizes[hop == label].sum()) > 0}
    balanced = advantages.copy()
    for label, total in totals.items():
        balanced[hop == label] *= sizes.sum() / len(totals) / total
    return balanced
