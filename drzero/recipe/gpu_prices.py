"""GPU types, with Modal's prices on RATES_DATE in dollars an hour and dense bfloat16 TFLOP/s.

A chosen region costs more (modal.com/docs/guide/region-selection). Memory is as CUDA reports it.
"""

from dataclasses import dataclass

RATES_DATE = "2026-09-26"


@dataclass(frozen=True)
class GpuType:
    """One type of GPU and its price."""

    name: str
    memory_gib: float
    usd_per_hour: float
    bf16_tflops: float
    has_bf16: bool = True
    """Whether it has native bfloat16. Otherwise PyTorch emulates it, and SGLang takes float16."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuType("B300", 267.0, 7.0992, 2250),
        GpuType("B200", 178.0, 6.2496, 2250),
        GpuType("H200", 139.8, 4.5396, 989),
        GpuType("H100", 79.2, 3.9492, 989),
        GpuType("RTX-PRO-6000", 94.9, 3.0312, 504),
        GpuType("A100-80GB", 79.2, 2.4984, 312),
        GpuType("A100-40GB", 39.4, 2.0988, 312),
        GpuType("L40S", 44.4, 1.9512, 362),
        GpuType("A10", 22.1, 1.1016, 70),
        GpuType("L4", 22.0, 0.7992, 121),
        GpuType("T4", 14.6, 0.5904, 65, has_bf16=False),
    )
}
# Modal's other names, each with the smallest GPU it can mean. Modal may upgrade H100 and B200+ at the same
# price, but not H100!.
GPUS |= {"A100": GPUS["A100-40GB"], "A10G": GPUS["A10"], "H100!": GPUS["H100"], "B200+": GPUS["B200"]}

MOST_MEMORY_MIB = 344064
"""The most host memory we ask for. Modal's own limit is not documented."""
CORE_USD_PER_HOUR = 0.0472
GIB_USD_PER_HOUR = 0.0080


BROAD_REGION, NARROW_REGION = 1.5, 1.75  # price factors for a region such as `us`, and one such as `us-east`


def usd_per_hour(
    gpu: GpuType | None, gpus: int, cores: float, memory_gib: float, region: str | None = None
) -> float:
    """Price of a machine with so many GPUs, physical cores and GiB of host memory."""
    of_gpus = gpu.usd_per_hour * gpus if gpu else 0.0
    base = of_gpus + cores * CORE_USD_PER_HOUR + memory_gib * GIB_USD_PER_HOUR
    if not region:
        return base
    return base * (NARROW_REGION if "-" in region else BROAD_REGION)
