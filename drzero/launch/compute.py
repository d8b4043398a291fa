"""The machine of a launch: a file of `config/compute/`, changed by run file and flags, and checked.

    compute = load_compute("8xh100").changed(type="H200", count=4)
    compute.modal_options()     # for Function.with_options: gpu="H200:4", cpu=…, timeout=…
    compute.overrides()         # for the stage: compute=8xh100 compute.type=H200 …

The same numbers go to Modal and, as overrides, to the stage's own config, so that preflight checks the
requested machine. Any GPU type that drzero/recipe/rates.py has a price for is allowed if the image fits it.
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
from drzero.recipe.rates import GPUS, usd_per_hour

CONFIG = Path(__file__).resolve().parents[2] / "config"
MODAL_LIMIT_S = 86400
"""Modal ends a call after a day."""
IDLE_S = 2
"""Seconds that a container is kept after its call; Modal's minimum."""
MAX_CORES, MAX_MEMORY_MIB = 64, 344064
"""The most that a container is requested with; Modal refuses more than maxima that its pages do not state."""
MODAL_GPUS = {"A10": 4, "A10G": 4}
"""Maximum GPUs of one machine on Modal, where it is not 8."""


@dataclass(frozen=True)
class Compute:
    """One machine on Modal."""

    name: str
    """The file of `config/compute/` that it starts from."""
    hardware: str
    """Its hardware profile (`config/hardware/`)."""
    type: str | None
    """GPU type, None for none."""
    count: int
    cpu: float
    """Physical cores."""
    memory: int
    """MiB."""
    timeout: int
    """Seconds of one call."""
    region: str | None
    retries: int
    max_usd: float | None

    @property
    def usd_per_hour(self) -> float:
        """US dollars an hour, by the rates of drzero/recipe/rates.py."""
        gpu = GPUS[self.type] if self.type else None
        return usd_per_hour(gpu, self.count, self.cpu, self.memory / 1024, self.region)

    def changed(self, **values: Any) -> Compute:
        """The same machine with some values changed; raises LaunchError for what Modal does not offer."""
        unknown = [key for key in values if key not in _KEYS]
        if unknown:
            near = did_you_mean(unknown[0], _KEYS)
            raise LaunchError(f"compute.{unknown[0]}: no such key{near}. Keys: {', '.join(_KEYS)}")
        return _checked(dataclasses.replace(self, **values))

    def modal_options(self) -> dict[str, Any]:
        """The arguments of `Function.with_options`, which keeps its own value for None."""
        return {
            "gpu": f"{self.type}:{self.count}" if self.type else None,
            "cpu": float(self.cpu),
            "memory": self.memory,
            "timeout": self.timeout,
            "retries": self.retries or None,
            "region": self.region,
            # An idle machine is paid for as long as it is kept warm.
            "scaledown_window": IDLE_S,
        }

    def overrides(self) -> list[str]:
        """Hydra overrides that give a stage's config the same machine."""
        file = load_compute(self.name)
        words = [f"compute={self.name}"]
        if self.hardware != file.hardware:
            words.append(f"hardware={self.hardware}")
        for key in _KEYS:
            mine = getattr(self, key)
            # An environment may set a limit too (config/env), so the one of this launch is always named.
            if mine != getattr(file, key) or key == "max_usd":
                # Hydra's grammar wants quotes around `H100!`.
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
"""The keys of a machine, the types of their values, and what they are."""
_REGIONS = ("us", "eu", "uk", "ap", "ca", "sa", "me", "mx", "af", "jp")
_REGION = re.compile(rf"({'|'.join(_REGIONS)})(-[a-z0-9]+)*")


def compute_names() -> list[str]:
    """The files of `config/compute/` that describe a machine on Modal."""
    files = (CONFIG / "compute").glob("*.yaml")
    return sorted(path.stem for path in files if "provider: modal\n" in path.read_text(encoding="utf-8"))


def load_compute(name: str) -> Compute:
    """`config/compute/NAME.yaml`; raises LaunchError for a name without a file."""
    if name not in (known := compute_names()):
        raise LaunchError(f"compute={name}: no such machine{did_you_mean(name, known)}. {', '.join(known)}")
    values = yaml.safe_load((CONFIG / "compute" / f"{name}.yaml").read_text(encoding="utf-8"))["compute"]
    wanted = {key: values[key] for key in (*_KEYS, "hardware")}
    return _checked(Compute(name=name, **wanted))


def for_gpus(compute: Compute, type_: str | None, count: int | None) -> Compute:
    """The machine with other GPUs: from the file with exactly these, else from one for one or for several.

    `none` and 0 mean no GPU. Other changes of the machine (a time-out, a limit in dollars) are kept.
    """
    if type_ is None and count is None:
        return compute
    if count == 0 or (type_ or "").lower() == "none":
        return _with_changes_of(compute, load_compute("cpu"))
    count = count or compute.count or 1
    wanted = _known_type(type_) if type_ else compute.type
    if not compute.type or (count == 1) != (compute.count == 1):
        files = (load_compute(name) for name in compute_names())
        exact = next((file for file in files if (file.type, file.count) == (wanted, count)), None)
        base = exact or load_compute("single_h100" if count == 1 else "8xh100")
        compute = _with_changes_of(compute, base)
    return compute.changed(type=wanted or compute.type, count=count)


def _with_changes_of(compute: Compute, base: Compute) -> Compute:
    """`base` with the values of `compute` that differ from its own file, except its GPUs."""
    file = load_compute(compute.name)
    keys = [key for key in _KEYS if key not in ("type", "count")]
    changes = {key: getattr(compute, key) for key in keys if getattr(compute, key) != getattr(file, key)}
    return base.changed(**changes)


def _known_type(name: str) -> str:
    by_name = {known.lower(): known for known in GPUS}
    if name.lower() not in by_name:
        raise LaunchError(
            f"unknown GPU type {name!r}{did_you_mean(name.upper(), GPUS)}. Types: {', '.join(GPUS)}; "
            "or add it to drzero/recipe/rates.py"
        )
    return by_name[name.lower()]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _checked(compute: Compute) -> Compute:
    for key, (kinds, what) in _KEYS.items():
        value = getattr(compute, key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise LaunchError(f"compute {compute.name}: {key} is {value!r}, not {what}")
    if compute.type is not None:
        compute = dataclasses.replace(compute, type=_known_type(str(compute.type)))
    gpu, count, most = compute.type, compute.count, MODAL_GPUS.get(compute.type or "", 8)
    cuda = NEWER_CUDA.get(gpu or "")
    faults = {
        f"type is {gpu}, for which Modal wants CUDA {cuda}, and the image has {SGLANG_IMAGE.cuda}: choose "
        "B200, or another SGLANG_IMAGE in drzero/launch/image/pins.py": cuda
        and _version(cuda) > _version(SGLANG_IMAGE.cuda),
        f"count is {count}: a machine on Modal has 1 to {most} of {gpu}": gpu and not 1 <= count <= most,
        f"count is {count} and type is not set: choose one of {', '.join(GPUS)}": count and not gpu,
        f"timeout is {compute.timeout}: Modal ends a call after 1 to {MODAL_LIMIT_S} seconds; a longer run "
        "continues in a new call by itself": not 1 <= compute.timeout <= MODAL_LIMIT_S,
        f"cpu is {compute.cpu}: a container has more than 0 cores, and {MAX_CORES} at most": not 0
        < compute.cpu
        <= MAX_CORES,
        f"memory is {compute.memory} MiB: a container has 128 to {MAX_MEMORY_MIB}": not 128
        <= compute.memory
        <= MAX_MEMORY_MIB,
        f"region is {compute.region!r}: Modal's regions are {', '.join(_REGIONS)}, or narrower ones such as "
        "us-east": compute.region is not None and not _REGION.fullmatch(compute.region),
        f"retries is {compute.retries}: Modal allows 0 to 10": not 0 <= compute.retries <= 10,
        f"max_usd is {compute.max_usd}: it must be above 0, or null for no limit": compute.max_usd is not None
        and not compute.max_usd > 0,
    }
    for fault, is_so in faults.items():
        if is_so:
            raise LaunchError(f"compute {compute.name}: {fault}")
    return compute
