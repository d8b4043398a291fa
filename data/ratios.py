"""Whole counts in a given ratio."""

from collections.abc import Sequence
from fractions import Fraction

from data.errors import DataError


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into whole counts in the ratio `weights` (Hamilton's method).

    Each count is its exact share rounded down; what is left goes to the largest remainders, earlier ones
    first. The counts sum to `total`, and each is less than 1 away from its exact share.

    Raises:
        ValueError: `total` is negative, a weight is negative or all weights are 0.
    """
    if total < 0 or min(weights, default=-1) < 0 or sum(weights) == 0:
        raise DataError(
            f"cannot split {total} in the ratio {':'.join(map(str, weights)) or '(empty)'}: "
            "nothing may be negative and at least one weight must be positive"
        )
    shares = [Fraction(total * weight, sum(weights)) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
