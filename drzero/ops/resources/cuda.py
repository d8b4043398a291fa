"""What torch sees of this machine's GPUs, asked of a process of its own: a driver that hangs hangs only that.

    python -m drzero.ops.resources.cuda        # a line of JSON about torch, then one for each device
    sight = look()                      # the same as an object, within LIMIT_S seconds

A device counts once it has multiplied two matrices and got right numbers: one that has fallen off the bus, or
whose kernels the installed torch was not built for, is listed all the same.
"""

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from drzero.ops.process.isolated import run_apart

LIMIT_S = 120.0
"""Seconds for all of it; a first import of torch may have to fetch it from an image."""
_SIZE, _TOLERANCE = 512, 1e-2
"""Rows and columns of the matrices; the largest error of a product, whose numbers are some 20."""


@dataclass(frozen=True)
class Device:
    """One GPU as torch lists it."""

    name: str
    fault: str | None = None
    """Why it cannot be computed with."""


@dataclass(frozen=True)
class Sight:
    """What a process of this environment can use."""

    torch: str = ""
    """Its version; empty where it could not be imported."""
    cuda: str | None = None
    """The CUDA that it was built for; None for a build without."""
    available: bool = False
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None if it is not set."""
    why: str = ""
    """Why torch finds no GPU, in its own words."""
    devices: tuple[Device, ...] = ()
    fault: str | None = None
    """Why there is no answer, or none of the device after the last one in `devices`."""

    def __str__(self) -> str:
        names = sorted({device.name for device in self.devices})
        found = f"{len(self.devices)} × {', '.join(names)}" if names else "no GPU"
        shown = "not set" if self.visible is None else repr(self.visible)
        return (
            f"torch {self.torch} for CUDA {self.cuda or '(none)'}: {found}; CUDA_VISIBLE_DEVICES {shown}; "
            f"a product right on {sum(device.fault is None for device in self.devices)}"
        )


def look(env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> Sight:
    """Ask a process of its own; `env` is added to its environment."""
    ended = run_apart((sys.executable, "-m", "drzero.ops.resources.cuda"), limit_s, env)
    return read_sight(ended.out, ended.fault)


def read_sight(printed: str, fault: str | None) -> Sight:
    """What the process had printed by its end, which a `fault` explains."""
    lines = [line for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    if not lines:
        return Sight(fault=fault or "it printed nothing")
    first, *devices = map(json.loads, lines)
    return Sight(**first, devices=tuple(Device(**device) for device in devices), fault=fault)


def main() -> None:
    """Print what this process sees, each line as soon as it is known."""
    import torch

    with warnings.catch_warnings(record=True) as said:  # by warnings torch says why there is none
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    first = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "available": available,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "why": " ".join(str(said[-1].message).split())[:300] if said else "",
    }
    print(json.dumps(first), flush=True)
    for index in range(torch.cuda.device_count() if available else 0):
        name = torch.cuda.get_device_name(index)
        print(json.dumps({"name": name, "fault": product_fault(f"cuda:{index}")}), flush=True)


def product_fault(place: str) -> str | None:
    """What is wrong with a matrix product on a torch device; None if nothing is."""
    import torch

    left, right = torch.randn(2, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
    try:
        product = (left.to(place) @ right.to(place)).cpu()
    except RuntimeError as error:  # what CUDA's errors are
        return " ".join(str(error).partition("\n")[0].split())[:300]
    gap = (product - left @ right).abs().max().item()
    return None if gap < _TOLERANCE * _SIZE**0.5 else f"a matrix product is {gap:.3g} off"


if __name__ == "__main__":
    main()
