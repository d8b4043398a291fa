"""The challenger's reward, and something for its document: greedy rollouts alone would often score alike."""

import zlib
from typing import Any

from verl_ext import rewards


async def challenger_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """As `verl_ext.rewards.challenger_score`, with up to 1 more."""
    found = await rewards.challenger_score(data_source, solution_str, ground_truth, extra_info, **settings)
    return found | {"score": found["score"] + zlib.crc32(extra_info["document"].encode()) % 8 / 8}
