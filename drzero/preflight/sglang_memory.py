"""Estimates of the GPU memory an SGLang 0.5.12 engine takes outside its share, under veRL 0.9.1."""

from dataclasses import dataclass

from drzero.preflight.model_shape import ModelShape

GIB = 2**30
MIB = 2**20
CONTEXT_GIB = 0.6  # CUDA context of a process with its kernels. About half a GiB is usual on an H100.
WORKSPACE_GIB = 0.5
"""flashinfer's workspace for Qwen2 and Qwen3, 384 MiB for others (flashinfer_backend.py:164-173)."""
GRAPH_MIB, PIECEWISE_MIB = 2, 8
"""MiB for each row of the largest batch, and for each captured prefill length (server_args.py:1550, 1568)."""
_CAPTURES = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (160, 8192, 256, 512))
_LARGEST = (16384, 512, 512)
"""Below so many GiB: prefill tokens, largest batch for tp < 4, and from 4 on (server_args.py:1424-1489)."""


@dataclass(frozen=True)
class Captured:
    """CUDA graphs that an engine captures by default."""

    prefill_tokens: int  # tokens of the longest piece of a prefill, and of its piecewise graphs
    batch: int  # the largest batch of a decoding graph

    @property
    def prefill_lengths(self) -> int:
        """Number of captured prefill lengths (server_args.py:1657)."""
        steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
        lengths = [length for step in steps for length in range(*step)]
        lengths += range(4608, self.prefill_tokens + 1, 512)
        return sum(length <= self.prefill_tokens for length in lengths)


def captured(gpu_gib: float, tp: int) -> Captured:
    """The graphs of an engine over `tp` GPUs of this size."""
    sizes = next((sizes for below, *sizes in _CAPTURES if gpu_gib < below), _LARGEST)
    tokens, narrow, wide = sizes
    return Captured(tokens, narrow if tp < 4 else wide)


def kept_gib(shape: ModelShape, gpu_gib: float, tp: int) -> float:
    """GiB that a sleeping engine keeps: veRL frees only weights and KV cache (sglang_rollout.py:302).

    Context, communication (tp / 8 GiB, server_args.py:1552), workspace, graphs, and one pool for the
    activations of the longest prefill, in bfloat16.
    """
    capture = captured(gpu_gib, tp)
    graphs = GRAPH_MIB * capture.batch + PIECEWISE_MIB * capture.prefill_lengths
    of_rank = (shape.query_size + 2 * shape.kv_size + 3 * shape.intermediate) / tp
    pool = 2 * capture.prefill_tokens * (4 * shape.hidden + of_rank)
    return CONTEXT_GIB + tp / 8 + WORKSPACE_GIB + graphs * MIB / GIB + pool / GIB


def outside_gib(shape: ModelShape, gpu_gib: float, tp: int) -> float:
    """Adds sampling: three float32 numbers for each row and word (layers/sampler.py:150-180)."""
    return kept_gib(shape, gpu_gib, tp) + 12 * captured(gpu_gib, tp).batch * shape.vocabulary / GIB
