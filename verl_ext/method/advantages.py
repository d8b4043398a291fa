"""The advantages: HRPO for the challenger (arXiv 2601.07055), GRPO for the solver (arXiv 2402.03300).

HRPO compares all questions of a step with one hop count, by the paper's population variance and not the
published code's. GRPO compares the answers to one question. A lone row gets advantage 0.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

DELTA = 1e-6  # added to the variance, so that equal rewards give 0 and not 0/0


def hop_advantages(
    rewards: npt.ArrayLike, hops: npt.ArrayLike, valid: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Advantage of each row: (reward - group mean) / sqrt(group population variance + 1e-6), shape (rows,).

    Invalid rows get 0. Raises ValueError for unequal shapes or a valid reward that is not finite.
    """
    reward, hop, is_valid = checked_rows(rewards, hops, valid)
    advantages = np.zeros_like(reward)
    for label in np.unique(hop[is_valid]):
        group = is_valid & (hop == label)
        centred = reward[group] - reward[group].mean()
        advantages[group] = centred / np.sqrt(np.mean(centred**2) + DELTA)
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


def call_advantages(
    rewards: Sequence[Sequence[float]], groups: Sequence[Hashable]
) -> list[npt.NDArray[np.float64]]:
    """Advantages of the calls of episodes that are paid by the call, in the shape of `rewards`.

    A call's return is the sum of its reward and all later ones. It is compared with the returns of the calls
    at the same place in the other episodes of its group.
    """
    returns = [np.cumsum(np.asarray(own, float)[::-1])[::-1] for own in rewards]
    label: dict[Hashable, int] = {}
    places = [(group, place) for group, own in zip(groups, returns, strict=True) for place in range(len(own))]
    labels = [label.setdefault(place, len(label)) for place in places]
    flat = group_advantages(np.concatenate([*returns, []]), labels, [True] * len(labels))
    return np.split(flat, np.cumsum([len(own) for own in returns])[:-1])


def hop_balanced(advantages: npt.NDArray[np.float64], hops: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Scale advantages (rows,) so that each hop count has the same sum of absolute values."""
    hop: npt.NDArray[Any] = np.asarray(hops)
    sizes = np.abs(advantages)
    totals = {label: total for label in np.unique(hop) if (total := sizes[hop == label].sum()) > 0}
    balanced = advantages.copy()
    for label, total in totals.items():
        balanced[hop == label] *= sizes.sum() / len(totals) / total
    return balanced
