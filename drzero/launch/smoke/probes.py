"""The probes of a machine with GPUs, before a run starts: one verdict a mechanism.

Each runs in its own process with a time limit, so an error, a crash or a hang becomes a verdict's reason.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from drzero.launch.smoke.needs import Needs, Verdict
from drzero.ops.process.isolated import last_line, run_isolated

LIMIT_S = 120.0  # Seconds for one probe. The first import of torch may have to fetch it from the image.


@dataclass(frozen=True)
class Probe:
    """A mechanism, and the command that tries it."""

    mechanism: str
    command: tuple[str, ...]
    needed: bool = True


def probes_for(needs: Needs, run_dir: Path) -> list[Probe]:
    """The probes for such a run, the cheapest first."""

    def probe(mechanism: str, *words: str, needed: bool = True) -> Probe:
        return Probe(mechanism, (sys.executable, "-m", "drzero.launch.smoke.probe", *words), needed)

    ranks, store = str(needs.ranks), str(needs.shared_memory)
    return [
        # Without pipes, ranks dump their collectives only on a time-out.
        probe("a FIFO for the recorder", "fifo", tempfile.gettempdir(), needed=False),
        probe("a FIFO on the volume", "fifo", str(run_dir.parent), needed=False),
        # With less, Ray keeps its object store in a file.
        probe("/dev/shm", "shared_memory", store, needed=False),
        probe("bfloat16", "bfloat16", "cuda"),
        probe("CUDA IPC", "ipc", "cuda", needed=needs.sglang),
        probe("memory that sleeps", "sleep_and_wake", needed=needs.sleeps),
        *([probe("all-reduce", "all_reduce", "cuda", ranks)] if needs.ranks > 1 else []),
        probe("flash-attn", "flash_attention", needed=needs.flash_attention),
    ]


def try_out(probe: Probe, limit_s: float = LIMIT_S) -> Verdict:
    """Run a probe. Its verdict has the reason, however its process ends."""
    ended = run_isolated(probe.command, limit_s)
    why = last_line(ended.out.encode()) if ended.fault is None else ended.fault
    return Verdict(probe.mechanism, ended.fault is None, why, probe.needed)
