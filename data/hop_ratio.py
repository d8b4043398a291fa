"""The ratio of questions of 1, 2, 3, … hops: exact counts, their assignment to rows, and the file name."""

import random
from collections.abc import Sequence
from fractions import Fraction

from data.errors import DataError


def prompts_file(hop_ratio: Sequence[int]) -> str:
    """Return the name of the prompts file, such as `zero_ratio4321.parquet` or `zero_ratio10-3-1.parquet`."""
    separator = "" if max(hop_ratio, default=0) < 10 else "-"
    return f"zero_ratio{separator.join(map(str, hop_ratio))}.parquet"


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in the ratio `weights` (Hamilton's method). Raises DataError if impossible."""
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


def assign_hops(hops: Sequence[int], carried: Sequence[int], rng: random.Random) -> list[int]:
    """Return each row's hops, at most `carried`, as many of each as `hops` has, or else in that ratio."""
    carried = carried[: len(hops)]
    if not hops or min(carried) >= max(hops):
        return list(hops)
    given = [1] * len(hops)
    missing = 0
    for hop in range(max(hops), 1, -1):
        wanted = list(hops).count(hop) + missing
        able = [row for row, most in enumerate(carried) if given[row] == 1 and most >= hop]
        # Smaller hop counts compete for these rows once their own rows are used up.
        others = sum(2 <= most < hop for most in carried)
        rivals = max(sum(2 <= fewer < hop for fewer in hops) - others, 0)
        share = len(able) * wanted // (wanted + rivals) if wanted else 0
        for row in rng.sample(able, min(wanted, share)):
            given[row] = hop
        missing = wanted - min(wanted, share)
    return given
