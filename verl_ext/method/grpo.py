"""Group relative policy optimisation: the solver's advantages (arXiv 2402.03300).

Several answers to one prompt are compared with one another, using the sample deviation as veRL does. Unlike
veRL's own function this one leaves out invalid rows, and a group of one row gets advantage 0 instead of its
raw reward.
"""

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
