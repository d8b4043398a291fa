"""Whether the ids that will be trained on are the ids that were sampled (token in, token out)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol


class TokenRow(Protocol):
    """A row of ids as it will be trained on: veRL's AgentLoopOutput, or a played episode."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]


def token_drift(row: TokenRow, sampled: Sequence[tuple[list[int], list[int]]]) -> int:
    """1 when the row breaks token-in, token-out; 0 when it keeps both rules.

    `sampled` holds per turn the ids the engine was given and the ids it sampled. The rules: a turn's input
    starts with the whole of the turn before, input and output; and the row's masked-in response ids are the
    sampled ids, in order (as far as the response was kept).
    """
    for (before_in, before_out), (after_in, _) in pairwise(sampled):
        known = before_in + before_out
        if after_in[: len(known)] != known:
            return 1
    trained = [i for i, kept in zip(row.response_ids, row.response_mask, strict=True) if kept]
    drawn = [token for _, ids in sampled for token in ids]
    starts_as_sampled = row.prompt_ids == sampled[0][0]
    return int(not starts_as_sampled or trained != drawn[: len(trained)] or not trained)
