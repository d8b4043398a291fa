"""The machine that a run is declared for (`compute=`): what preflight judges by, and the launcher rents."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.settings.key import key


@dataclass
class Compute:
    """The machine at hand by default, whatever hardware= says it is; it costs nothing."""

    provider: str = key("local", "Where stages run.", choices=("local", "modal"))
    hardware: str | None = key(
        None, "The hardware profile that fits, where hardware= is not given; null reads this machine's GPUs."
    )
    type: str | None = key(
        None,
        "GPU type by Modal's names (pipeline/rates.py); null for none, or on your own machine.",
        pace=True,
    )
    count: int | None = key(None, "GPUs.", low=0)
    cpu: int | float | None = key(None, "Physical cores.", above=0)
    memory: int | None = key(None, "Host memory in MiB.", low=1)
    timeout: int | None = key(
        None, "Seconds after which the provider ends the call; Modal's own limit is 86400."
    )
    region: str | None = key(None, "Where to run; null leaves it to the provider.")
    retries: int = key(0, "How often the provider retries a failed call.", low=0)
    max_usd: int | float | None = key(
        None,
        "US dollars that one start, of a stage or of a loop, may cost by the estimate; above it preflight "
        "refuses. null sets no limit.",
        low=0,
    )
