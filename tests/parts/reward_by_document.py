"""The challenger's reward plus a share by document, because greedy rollouts alone often score alike."""

import zlib
from typing import Any

from verl_ext import rewards


async def challenger_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """`verl_ext.rewards.challenger_score`, plus up to 1."""
    found = await rewards.challenger_score(data_source, solution_str, ground_truth, extra_info, **settings)
    return found | {"score": found["score"] + zlib.crc32(extra_info["document"].encode()) % 8 / 8}
