"""The machine of a measurement: processor, memory and package versions, as one line for a table."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil


def cores() -> int:
    """Number of cores that this process may use."""
    return len(psutil.Process().cpu_affinity() or []) or os.cpu_count() or 1


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(*packages: str) -> str:
    """One line: processor, cores, memory, Python and the versions of `packages` that are installed."""
    memory = psutil.virtual_memory().total / 2**30
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{processor()}, {cores()} cores, {memory:.0f} GiB; {', '.join(versions)}"
