"""The probes of a machine with GPUs, before anything is started on it: one verdict a mechanism.

    verdicts = [try_out(probe) for probe in probes_for(needs, run_dir)]

Each takes seconds, and runs in a process of its own with a time limit: an error, a crash and a hang are each
the reason of a verdict.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from drzero.launch.smoke.needs import Needs
from drzero.launch.smoke.verdict import Verdict
from drzero.ops.process.isolated import last_line, run_isolated

LIMIT_S = 120.0
"""Seconds of one probe; the first one that imports torch may have to fetch it from the image."""


@dataclass(frozen=True)
class Probe:
    """A mechanism and the command that tries it."""

    mechanism: str
    command: tuple[str, ...]
    needed: bool = True


def probes_for(needs: Needs, run_dir: Path) -> list[Probe]:
    """The probes of a machine with GPUs for such a run, the cheapest first."""

    def probe(mechanism: str, *words: str, needed: bool = True) -> Probe:
        return Probe(mechanism, (sys.executable, "-m", "drzero.launch.smoke.probe", *words), needed)

    ranks, store = str(needs.ranks), str(needs.shared_memory)
    return [
        # Without pipes the ranks dump their collectives on a time-out only.
        probe("a FIFO for the recorder", "fifo", tempfile.gettempdir(), needed=False),
        probe("a FIFO on the volume", "fifo", str(run_dir.parent), needed=False),
        # With less, Ray's object store is a file.
        probe("/dev/shm", "shared_memory", store, needed=False),
        probe("bfloat16", "bfloat16", "cuda"),
        probe("CUDA IPC", "ipc", "cuda", needed=needs.sglang),
        probe("memory that sleeps", "sleep_and_wake", needed=needs.sleeps),
        *([probe("all-reduce", "all_reduce", "cuda", ranks)] if needs.ranks > 1 else []),
        probe("flash-attn", "flash_attention", needed=needs.flash_attention),
    ]


def try_out(probe: Probe, limit_s: float = LIMIT_S) -> Verdict:
    """Run a probe; whatever becomes of its process, the verdict has the reason."""
    ended = run_isolated(probe.command, limit_s)
    why = last_line(ended.out.encode()) if ended.fault is None else ended.fault
    return Verdict(probe.mechanism, ended.fault is None, why, probe.needed)
