"""The challenger's advantages (HRPO, arXiv 2601.07055), among all questions of a step with one hop count.

The population variance is the paper's, not the published code's. A lone row gets advantage 0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

DELTA = 1e-6  # added to the variance, so that equal rewards give 0 and not 0/0


def hop_advantages(
    rewards: npt.ArrayLike, hops: npt.ArrayLike, valid: npt.ArrayLike, delta: float = DELTA
) -> npt.NDArray[np.float64]:
    """Advantage of each row: (reward - group mean) / sqrt(group population variance + delta), shape (rows,).

    Invalid rows get 0. Raises ValueError for unequal shapes or a valid reward that is not finite.
    """
    reward, hop, is_valid = checked_rows(rewards, hops, valid)
    advantages = np.zeros_like(reward)
    for label in np.unique(hop[is_valid]):
        group = is_valid & (hop == label)
        centred = reward[group] - reward[group].mean()
        advantages[group] = centred / np.sqrt(np.mean(centred**2) + delta)
    return advantages


def checked_rows(
    rewards: npt.ArrayLike, labels: npt.ArrayLike, valid: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """The columns as arrays of shape (rows,). Raises ValueError as `hop_advantages` does."""
    reward = np.asarray(rewards, dtype=np.float64)
    label: npt.NDArray[Any] = np.asarray(labels)
    is_valid = np.asarray(valid, dtype=bool)
    if reward.ndim != 1 or not reward.shape == label.shape == is_valid.shape:
        raise ValueError(
            f"rewards {reward.shape}, group labels {label.shape} and valid {is_valid.shape} must have one "
            "shape (rows,)"
        )
    if not np.isfinite(reward[is_valid]).all():
        rows = np.flatnonzero(is_valid & ~np.isfinite(reward)).tolist()
        raise ValueError(f"rewards of valid rows {rows} are not finite: mark failed samples as not valid")
    return reward, label, is_valid
