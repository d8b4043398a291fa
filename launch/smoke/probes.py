"""The probes of a machine with GPUs, before anything is started on it: one verdict a mechanism.

    verdicts = [try_out(probe) for probe in probes_for(needs, run_dir)]

Each takes seconds, and runs in a process of its own with a time limit: an error, a crash and a hang are each
the reason of a verdict.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launch.smoke.needs import Needs
from launch.smoke.probe import last_line
from launch.smoke.verdict import Verdict
from ops.process.child import describe_exit

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
        return Probe(mechanism, (sys.executable, "-m", "launch.smoke.probe", *words), needed)

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
    proven, why = _outcome(probe.command, limit_s)
    return Verdict(probe.mechanism, proven, why, probe.needed)


def _outcome(command: Sequence[str], limit_s: float) -> tuple[bool, str]:
    # Files, not pipes: whatever survives of a probe would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False, f"it hung: no result after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (out, err):
            file.seek(0)
        if code == 0:
            return True, last_line(out.read())
        said = last_line(err.read())
    if code > 0 and said:
        return False, said
    return False, f"{describe_exit(code)}{f': {said}' if said else ''}"
