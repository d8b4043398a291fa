"""The ratio of questions of 1, 2, 3, … hops: its exact shares, who gets which, and the file that it names."""

import random
from collections.abc import Sequence
from fractions import Fraction

from data.errors import DataError


def prompts_file(hop_ratio: Sequence[int]) -> str:
    """The file of prompts in this ratio: `zero_ratio4321.parquet` for 4:3:2:1.

    Weights of several digits are separated, as in `zero_ratio10-3-1.parquet`.
    """
    separator = "" if max(hop_ratio, default=0) < 10 else "-"
    return f"zero_ratio{separator.join(map(str, hop_ratio))}.parquet"


def largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` into whole counts in the ratio `weights` (Hamilton's method).

    Each count is its exact share rounded down; the rest goes to the largest remainders, earlier ones first.
    The counts sum to `total`, and each is less than 1 away from its exact share.

    Raises:
        DataError: `total` is negative, a weight is negative or all weights are 0.
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


def assign_hops(hops: Sequence[int], carried: Sequence[int], rng: random.Random) -> list[int]:
    """The hop count of each row: at most what its document carries, and as many of each as `hops` has.

    `hops` are the wanted counts in any order; `carried` is of at least as many rows, and those beyond are not
    used. Where too few rows carry several hops, the counts share them in their ratio, and what is left over
    becomes a question of fewer hops. Rows that carry all of them keep the order of `hops`.
    """
    carried = carried[: len(hops)]
    if not hops or min(carried) >= max(hops):
        return list(hops)
    given = [1] * len(hops)
    missing = 0
    for hop in range(max(hops), 1, -1):
        wanted = list(hops).count(hop) + missing
        able = [row for row, most in enumerate(carried) if given[row] == 1 and most >= hop]
        # What fewer hops want of these rows, besides the rows that carry only fewer.
        others = sum(2 <= most < hop for most in carried)
        rivals = max(sum(2 <= fewer < hop for fewer in hops) - others, 0)
        share = len(able) * wanted // (wanted + rivals) if wanted else 0
        for row in rng.sample(able, min(wanted, share)):
            given[row] = hop
        missing = wanted - min(wanted, share)
    return given
