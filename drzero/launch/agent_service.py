"""The trained agent on Modal: its machine, its price, and `drzero serve-agent` in its container."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from drzero.launch.compute import Compute, for_gpus
from drzero.launch.errors import LaunchError
from drzero.launch.image.pins import NEWER_CUDA
from drzero.launch.runfile import RunFile
from drzero.launch.service import PORT, Service
from drzero.launch.volumes import folder_overrides
from drzero.recipe.gpu_prices import GPUS, RATES_DATE

IDLE_S = 300
"""Seconds without a request until the machine is given back. They are billed."""
REQUEST_S = 3600  # of one request at most, its stream included. The agent ends a question long before.
WAKE_S, QUESTION_S = 120, 8
"""Seconds that a start takes, and a question alone on the machine. Both are assumed, not measured."""


def described(file: RunFile, path: str, environment: Mapping[str, str]) -> tuple[Compute, list[str]]:
    """Machine and overrides. AGENT_GPU wins over the file. Raises LaunchError."""
    machine = for_gpus(file.machine(file.base or "a10g"), environment.get("AGENT_GPU") or None, None)
    if machine.count > 1:
        raise LaunchError(
            f"{path}: compute.count is {machine.count}: the agent has one GPU: take a larger one"
        )
    if machine.type and not GPUS[machine.type].has_bf16:
        raise LaunchError(f"{machine.type} has no bfloat16, which SGLang needs: choose another AGENT_GPU")
    engine = ["rollout=sglang"] if machine.type else []
    return machine, [*machine.overrides(), *engine, *file.overrides]


AGENT = Service(
    name="agent",
    command="serve-agent",
    token="AGENT_TOKEN",
    keys=("RETRIEVAL_TOKEN", "HF_TOKEN", "CHROMA_API_KEY"),
    volumes=("corpus", "checkpoints", "cache"),
    describe=described,
    variables=("AGENT_GPU",),
)


def words_here(words: Sequence[str], port: int = PORT) -> list[str]:
    """The service's overrides, with this container's folders and address."""
    return [
        *folder_overrides(),
        f"run.dir={Path(tempfile.gettempdir()) / 'agent'}",
        *words,
        "host=0.0.0.0",
        f"port={port}",
    ]


def price_lines(machine: Compute) -> list[str]:
    """The agent's price on this machine, and an hour on others."""
    usd, size = machine.usd_per_hour, f"{machine.cpu:g} cores, {machine.memory:,} MiB"
    one, first = (usd * seconds / 3600 for seconds in (QUESTION_S, WAKE_S + QUESTION_S + IDLE_S))
    others = sorted((for_gpus(machine, name, 1).usd_per_hour, name) for name in _choices())
    return [
        f"{machine.type or 'no GPU'}, {size}: ${usd:.2f} an hour while it runs, nothing while nobody asks "
        f"(prices of {RATES_DATE})",
        f"a question: ${one:.3f} for {QUESTION_S} s; the first after a pause: ${first:.2f}, with {WAKE_S} s "
        f"of start and {IDLE_S} s of waiting (question and start are assumed, not measured)",
        f"an hour with another AGENT_GPU: {', '.join(f'{name} ${price:.2f}' for price, name in others)}",
    ]


def _choices() -> list[str]:
    return [
        name for name, gpu in GPUS.items() if gpu.name == name and gpu.has_bf16 and name not in NEWER_CUDA
    ]
