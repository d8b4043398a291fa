"""The machine of a launch: a file of `config/compute/`, changed by run file and flags, and checked.

Modal and the stage's config get the same numbers, so preflight checks the requested machine. Every GPU with a
price in drzero/recipe/gpu_prices.py is allowed if the image supports it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from drzero.launch.errors import LaunchError
from drzero.launch.image.pins import NEWER_CUDA, SGLANG_IMAGE
from drzero.ops.text import did_you_mean
from drzero.recipe.gpu_prices import GPUS, MOST_MEMORY_MIB, usd_per_hour

CONFIG = Path(__file__).resolve().parents[2] / "config"
MODAL_LIMIT_S = 86400  # of one call
IDLE_S = 2  # seconds a container is kept after its call: Modal's minimum, since idle time is billed
MAX_CORES = 64  # The most we request. Modal's own limit is not documented.
MODAL_GPUS = {"A10": 4, "A10G": 4}  # most GPUs of one machine on Modal, where that is not 8


@dataclass(frozen=True)
class Compute:
    """One machine on Modal."""

    name: str
    hardware: str
    type: str | None
    count: int
    cpu: float  # physical cores
    memory: int  # MiB
    timeout: int  # seconds of one call
    region: str | None
    retries: int
    max_usd: float | None

    @property
    def usd_per_hour(self) -> float:
        """US dollars an hour."""
        gpu = GPUS[self.type] if self.type else None
        return usd_per_hour(gpu, self.count, self.cpu, self.memory / 1024, self.region)

    def changed(self, **values: Any) -> Compute:
        """The machine with other values. Raises LaunchError for one Modal does not offer."""
        for key in values:
            if key not in _KEYS:
                raise LaunchError(
                    f"compute.{key}: no such key{did_you_mean(key, _KEYS)}. Keys: {', '.join(_KEYS)}"
                )
        return _checked(dataclasses.replace(self, **values))

    def modal_options(self) -> dict[str, Any]:
        """The arguments of `Function.with_options`, which ignores None."""
        return {
            "gpu": f"{self.type}:{self.count}" if self.type else None,
            "cpu": float(self.cpu),
            "memory": self.memory,
            "timeout": self.timeout,
            "retries": self.retries or None,
            "region": self.region,
            "scaledown_window": IDLE_S,
        }

    def overrides(self) -> list[str]:
        """The machine as Hydra overrides."""
        file = load_compute(self.name)
        words = [f"compute={self.name}"]
        if self.hardware != file.hardware:
            words.append(f"hardware={self.hardware}")
        for key in _KEYS:
            mine = getattr(self, key)
            # config/env may set a limit too, so the launch always names its own.
            if mine != getattr(file, key) or key == "max_usd":
                # Hydra needs quotes around `H100!`.
                quoted = isinstance(mine, str) and not mine.replace("-", "").isalnum()
                words.append(f"compute.{key}={'null' if mine is None else repr(mine) if quoted else mine}")
        if self.count and self.count != file.count:
            words.append(f"machine.gpus={self.count}")
        return words


_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "type": ((str, NoneType), "the name of a GPU"),
    "count": ((int,), "a number of GPUs"),
    "cpu": ((int, float), "a number of cores"),
    "memory": ((int,), "a whole number of MiB"),
    "timeout": ((int,), "a whole number of seconds"),
    "region": ((str, NoneType), "the name of a region"),
    "retries": ((int,), "a whole number"),
    "max_usd": ((int, float, NoneType), "a number of US dollars, or null"),
}
_REGIONS = ("us", "eu", "uk", "ap", "ca", "sa", "me", "mx", "af", "jp")
_REGION = re.compile(rf"({'|'.join(_REGIONS)})(-[a-z0-9]+)*")


def compute_names() -> list[str]:
    """The files of `config/compute/` for Modal."""
    files = (CONFIG / "compute").glob("*.yaml")
    return sorted(path.stem for path in files if "provider: modal\n" in path.read_text(encoding="utf-8"))


def load_compute(name: str) -> Compute:
    """`config/compute/NAME.yaml`. Raises LaunchError for a name without a file."""
    if name not in (known := compute_names()):
        raise LaunchError(f"compute={name}: no such machine{did_you_mean(name, known)}. {', '.join(known)}")
    values = yaml.safe_load((CONFIG / "compute" / f"{name}.yaml").read_text(encoding="utf-8"))["compute"]
    wanted = {key: values[key] for key in (*_KEYS, "hardware")}
    return _checked(Compute(name=name, **wanted))


def for_gpus(compute: Compute, type_: str | None, count: int | None) -> Compute:
    """The machine with other GPUs (`none` or 0: none). Cores and memory grow, other changes stay."""
    if type_ is None and count is None:
        return compute
    if count == 0 or (type_ or "").lower() == "none":
        return _with_changes_of(compute, load_compute("cpu"))
    count = count or compute.count or 1
    wanted = _known_type(type_) if type_ else compute.type
    files = (load_compute(name) for name in compute_names())
    exact = next((file for file in files if (file.type, file.count) == (wanted, count)), None)
    is_file = exact is not None and compute == load_compute(compute.name)
    if is_file or not compute.type or (count == 1) != (compute.count == 1):
        base = exact or load_compute("single_h100" if count == 1 else "8xh100")
        compute = _with_changes_of(compute, base)
    return compute.changed(type=wanted or compute.type, count=count)


def _with_changes_of(compute: Compute, base: Compute) -> Compute:
    file = load_compute(compute.name)
    changes = {key: getattr(compute, key) for key in _KEYS if getattr(compute, key) != getattr(file, key)}
    # Cores and memory of a smaller machine would not do.
    grown = {key: max(changes[key], getattr(base, key)) for key in ("cpu", "memory") if key in changes}
    kept = {key: value for key, value in changes.items() if key not in ("type", "count")}
    return base.changed(**kept | (grown if base.type else {}))


def _known_type(name: str) -> str:
    by_name = {known.lower(): known for known in GPUS}
    if name.lower() not in by_name:
        raise LaunchError(
            f"unknown GPU type {name!r}{did_you_mean(name.upper(), GPUS)}. Types: {', '.join(GPUS)}; "
            "or add it to drzero/recipe/gpu_prices.py"
        )
    return by_name[name.lower()]


def _checked(compute: Compute) -> Compute:
    for key, (kinds, what) in _KEYS.items():
        value = getattr(compute, key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise LaunchError(f"compute {compute.name}: {key} is {value!r}, not {what}")
    if compute.type is not None:
        compute = dataclasses.replace(compute, type=_known_type(str(compute.type)))
    if fault := _gpu_fault(compute) or _limits_fault(compute):
        raise LaunchError(f"compute {compute.name}: {fault}")
    return compute


def _gpu_fault(compute: Compute) -> str | None:
    gpu, count = compute.type, compute.count
    if gpu is None:
        return f"count is {count} and type is not set: choose one of {', '.join(GPUS)}" if count else None
    cuda, most = NEWER_CUDA.get(gpu), MODAL_GPUS.get(gpu, 8)
    if cuda and _version(cuda) > _version(SGLANG_IMAGE.cuda):
        return (
            f"type is {gpu}, for which Modal wants CUDA {cuda}, and the image has {SGLANG_IMAGE.cuda}: "
            "choose B200, or another SGLANG_IMAGE in drzero/launch/image/pins.py"
        )
    if not 1 <= count <= most:
        return f"count is {count}: a machine on Modal has 1 to {most} of {gpu}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _limits_fault(compute: Compute) -> str | None:
    if not 1 <= compute.timeout <= MODAL_LIMIT_S:
        limits = f"1 to {MODAL_LIMIT_S} seconds; a longer run continues in a new call by itself"
        return f"timeout is {compute.timeout}: Modal ends a call after {limits}"
    if not 0 < compute.cpu <= MAX_CORES:
        return f"cpu is {compute.cpu}: a container has more than 0 cores, and {MAX_CORES} at most"
    if not 128 <= compute.memory <= MOST_MEMORY_MIB:
        return f"memory is {compute.memory} MiB: a container has 128 to {MOST_MEMORY_MIB}"
    if compute.region is not None and not _REGION.fullmatch(compute.region):
        known = ", ".join(_REGIONS)
        return f"region is {compute.region!r}: Modal's are {known}, or narrower ones such as us-east"
    if not 0 <= compute.retries <= 10:
        return f"retries is {compute.retries}: Modal allows 0 to 10"
    if compute.max_usd is not None and not compute.max_usd > 0:
        return f"max_usd is {compute.max_usd}: it must be above 0, or null for no limit"
    return None
