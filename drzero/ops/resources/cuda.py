"""What torch sees of this machine's GPUs, asked in a separate process because a broken driver may hang.

    python -m drzero.ops.resources.cuda        # a line of JSON about torch, then one for each device

A device must multiply matrices: torch also lists lost devices, and devices that it has no kernels for.
"""

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from drzero.ops.process.isolated import Ended, run_isolated

_LIMIT_S = 120.0  # seconds for everything; the first import of torch may have to fetch it from an image
_SIZE, _TOLERANCE = 512, 1e-2
"""Width of the matrices, and the largest error. The product's numbers are around 20."""


@dataclass(frozen=True)
class Device:
    """One GPU as torch lists it."""

    name: str
    fault: str | None = None  # why it cannot compute


@dataclass(frozen=True)
class Sight:
    """The torch and GPUs that a process of this environment can use."""

    torch: str = ""  # its version; empty if the import failed
    cuda: str | None = None  # the CUDA version it was built for, if any
    available: bool = False
    visible: str | None = None  # CUDA_VISIBLE_DEVICES, or None if unset
    why: str = ""  # why torch finds no GPU, in its own words
    devices: tuple[Device, ...] = ()
    fault: str | None = None
    """Why there is no answer, or none about the device after the last one in `devices`."""

    def __str__(self) -> str:
        names = sorted({device.name for device in self.devices})
        found = f"{len(self.devices)} × {', '.join(names)}" if names else "no GPU"
        shown = "not set" if self.visible is None else repr(self.visible)
        return (
            f"torch {self.torch} for CUDA {self.cuda or '(none)'}: {found}; CUDA_VISIBLE_DEVICES {shown}; "
            f"correct product on {sum(device.fault is None for device in self.devices)}"
        )


def look(env: Mapping[str, str] | None = None) -> Sight:
    """Ask a separate process. `env` extends its environment."""
    return read_sight(run_isolated((sys.executable, "-m", "drzero.ops.resources.cuda"), _LIMIT_S, env))


def read_sight(ended: Ended) -> Sight:
    """Parse the output of the process."""
    if not (records := ended.records()):
        return Sight(fault=ended.fault or "it printed nothing")
    first, *devices = records
    seen = tuple(Device(**device) for device in devices)
    explained = not first["available"] or any(device.fault for device in seen)  # its exit code is then 1
    return Sight(**first, devices=seen, fault=None if explained else ended.fault)


def main() -> int:
    """Print what this process sees, each line as soon as it is known. Returns 1 without a usable GPU."""
    import torch

    with warnings.catch_warnings(record=True) as said:  # torch explains missing GPUs in warnings
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
    faults = 0
    for index in range(torch.cuda.device_count() if available else 0):
        name = torch.cuda.get_device_name(index)
        fault = product_fault(f"cuda:{index}")
        faults += fault is not None
        print(json.dumps({"name": name, "fault": fault}), flush=True)
    return int(faults > 0 or not available)


def product_fault(place: str) -> str | None:
    """Multiply two matrices on a torch device and return the fault, or None."""
    import torch

    left, right = torch.randn(2, _SIZE, _SIZE, generator=torch.Generator().manual_seed(0))
    try:
        product = (left.to(place) @ right.to(place)).cpu()
    except RuntimeError as error:  # CUDA's errors
        return " ".join(str(error).partition("\n")[0].split())[:300]
    gap = (product - left @ right).abs().max().item()
    return None if gap < _TOLERANCE * _SIZE**0.5 else f"a matrix product is {gap:.3g} off"


if __name__ == "__main__":
    sys.exit(main())
