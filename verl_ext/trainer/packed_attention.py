"""Attention over packed rows without the package flash-attn (torch 2.11 to 2.13).

veRL packs the rows of a micro-batch into one sequence. Transformers' fallback, sdpa, multiplies every token
with every other one and masks most of it. This function attends within each row: with torch's own
FlashAttention kernels on a GPU that has bfloat16, row by row elsewhere. Choose it with
`actor_rollout_ref.model.override_config.attn_implementation=drzero_packed`.
"""

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface

PACKED = "drzero_packed"  # `attn_implementation` of this function
_bounds: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def packed_attention(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each row of one packed sequence, in Transformers' signature."""
    if query_BHTD.shape[0] != 1 or attention_mask is not None:
        raise ValueError(
            f"{PACKED} takes packed rows alone: set actor_rollout_ref.model.use_remove_padding=true"
        )
    bounds = row_bounds(position_ids)
    states = (query_BHTD[0], key_BKTD[0], value_BKTD[0])
    attend = _by_kernel if has_kernel(query_BHTD) else _by_row
    return attend(states, bounds, scaling).unsqueeze(0), None


def has_kernel(states: torch.Tensor) -> bool:
    """Whether torch's FlashAttention takes these numbers on this device."""
    if not states.is_cuda or states.dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(states.device) >= (8, 0)


def row_bounds(position_ids: torch.Tensor) -> list[int]:
    """Where each packed row begins, then where the last one ends; computed once for all layers."""
    if position_ids not in _bounds:
        positions_T = position_ids.reshape(-1)
        _bounds[position_ids] = [*torch.nonzero(positions_T == 0).squeeze(-1).tolist(), len(positions_T)]
    found: list[int] = _bounds[position_ids]
    return found


def _by_kernel(states: tuple[torch.Tensor, ...], bounds: list[int], scaling: float | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query_THD, key_TKD, value_TKD = (one.transpose(0, 1) for one in states)
    ends = torch.tensor(bounds, dtype=torch.int32, device=query_THD.device)
    longest = max(end - start for start, end in pairwise(bounds))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}
    # torch 2.13 must be told about grouped heads; 2.11 accepts them without the argument.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    out_THD = varlen_attn(query_THD, key_TKD, value_TKD, ends, ends, longest, longest, **options)
    assert isinstance(out_THD, torch.Tensor)
    return out_THD


def _by_row(states: tuple[torch.Tensor, ...], bounds: list[int], scaling: float | None) -> torch.Tensor:
    rows = []
    for start, end in pairwise(bounds):
        query, key, value = (one[:, start:end].unsqueeze(0) for one in states)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


AttentionInterface.register(PACKED, packed_attention)
