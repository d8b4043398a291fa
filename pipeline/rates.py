"""What machines have and cost: the one table of GPUs and prices.

Prices are Modal's published ones per second, times 3600, as of RATES_DATE; a machine of one's own costs
nothing here. Where a region is asked for Modal takes more (modal.com/docs/guide/region-selection). Memory is
what CUDA reports, which is less than the name says. TFLOP/s are the makers' dense bfloat16 figures; estimates
take a stated share of them.
"""

from __future__ import annotations

from dataclasses import dataclass

RATES_DATE = "2026-09-26"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory_gib: float
    usd_per_hour: float
    bf16_tflops: float
    has_bf16: bool = True
    """Whether it computes in bfloat16 by itself; without, PyTorch emulates it and SGLang refuses."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B300", 267.0, 7.0992, 2250),
        Gpu("B200", 178.0, 6.2496, 2250),
        Gpu("H200", 139.8, 4.5396, 989),
        Gpu("H100", 79.2, 3.9492, 989),
        Gpu("RTX-PRO-6000", 94.9, 3.0312, 504),
        Gpu("A100-80GB", 79.2, 2.4984, 312),
        Gpu("A100-40GB", 39.4, 2.0988, 312),
        Gpu("L40S", 44.4, 1.9512, 362),
        Gpu("A10", 22.1, 1.1016, 70),
        Gpu("L4", 22.0, 0.7992, 121),
        Gpu("T4", 14.6, 0.5904, 65, has_bf16=False),
    )
}
# Modal's other names, each with the least that it may bring: a bare A100 has 40 GB; an H100 or a B200+ may
# turn out to be the next larger one at the same price, an H100! not.
GPUS |= {
    "A100": GPUS["A100-40GB"],
    "A10G": GPUS["A10"],
    "H100!": GPUS["H100"],
    "B200+": GPUS["B200"],
}

CORE_USD_PER_HOUR = 0.0472
"""A physical core."""
GIB_USD_PER_HOUR = 0.0080
"""A GiB of host memory."""


BROAD_REGION, NARROW_REGION = 1.5, 1.75
"""Times the price, where `us` or the like is asked for, and where `us-east` or the like is."""


def usd_per_hour(
    gpu: Gpu | None, gpus: int, cores: float, memory_gib: float, region: str | None = None
) -> float:
    """Price of a machine with so many GPUs, physical cores and GiB of host memory, in a region if said."""
    of_gpus = gpu.usd_per_hour * gpus if gpu else 0.0
    base = of_gpus + cores * CORE_USD_PER_HOUR + memory_gib * GIB_USD_PER_HOUR
    if not region:
        return base
    return base * (NARROW_REGION if "-" in region else BROAD_REGION)
