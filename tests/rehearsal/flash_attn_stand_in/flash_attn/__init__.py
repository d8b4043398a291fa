"""flash-attn 2.8.3's functions for packed sequences in plain PyTorch, with its signatures."""

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each sequence attends to itself alone; [tokens, heads, size]."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not torch.equal(cu_seqlens_q, cu_seqlens_k) or (window_size, softcap, block_table) != (
        (-1, -1),
        0.0,
        None,
    ):
        raise NotImplementedError
    lengths = cu_seqlens_q.diff().tolist()
    done = [
        scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts),
            is_causal=causal,
            scale=softmax_scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    return torch.cat(done)


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of sequences of one length, which the actor has not."""
    raise NotImplementedError


flash_attn_with_kvcache = flash_attn_func
