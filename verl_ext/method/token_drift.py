"""Token in, token out: checks that the ids to train on are the ids that were sampled."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol


class TokenRow(Protocol):
    """A row to train on: veRL's AgentLoopOutput or a played episode."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]


def token_drift(row: TokenRow, sampled: Sequence[tuple[list[int], list[int]]]) -> int:
    """1 if the row breaks token in, token out, else 0. `sampled` has each turn's input and sampled ids."""
    for (before_in, before_out), (after_in, _) in pairwise(sampled):
        known = before_in + before_out
        if after_in[: len(known)] != known:
            return 1
    trained = [i for i, kept in zip(row.response_ids, row.response_mask, strict=True) if kept]
    drawn = [token for _, ids in sampled for token in ids]
    starts_as_sampled = row.prompt_ids == sampled[0][0]
    return int(not starts_as_sampled or trained != drawn[: len(trained)] or not trained)
