"""torch's Flight Recorder in the trainer's ranks: where it works on this machine, and what a run keeps of it.

    with flight_recorder(run_dir) as environment:
        …                                       # a start of the trainer, with that environment
    # what the ranks dumped is in run_dir / "flight"

The ranks have pipes and dumps on the machine's own temporary disk, never in the run's folder: torch makes
each pipe in a thread that catches nothing, and where the file system has no FIFOs (many network mounts,
volumes) all ranks would abort as NCCL starts. If the temporary disk has none either, there are no pipes.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drzero.ops.console import say
from drzero.ops.watchdog.collect import keep_dumps

FLIGHT = "flight"
"""Where a run keeps dumps, in its folder."""


def recorder_folder(run_dir: Path) -> Path:
    """Where the ranks of a run open their pipes and write their dumps: the same for each of its starts."""
    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"drzero-{os.getuid()}-{name}"


@contextmanager
def flight_recorder(run_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of one start of the trainer; what its ranks dump is kept, also if it fails."""
    folder, kept = recorder_folder(run_dir), run_dir / FLIGHT
    # Of a start whose supervisor was killed.
    keep_dumps(folder, kept)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield recorder_env(folder)
    finally:
        keep_dumps(folder, kept)
        shutil.rmtree(folder, ignore_errors=True)


def recorder_env(folder: Path) -> dict[str, str]:
    """The environment of ranks that record their collectives, and dump the record into `folder`.

    They do when one times out, before they are torn down, and, with pipes, when the watchdog asks. The names
    are those of torch 2.9 to 2.13.
    """
    recorded = {
        # Twice: releases differ in which of the names opens the pipe.
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_"),
    }
    probe = folder / "probe"
    try:
        os.mkfifo(probe)
        probe.unlink()
    except OSError as refused:
        say(
            "watchdog",
            f"{folder} takes no pipes ({refused.strerror}): ranks dump their collectives when one times out, "
            "but not when the run stalls; TMPDIR can name another temporary folder",
        )
        return recorded
    return recorded | {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "rank_")}


def dumps_of(run_dir: Path) -> Path | None:
    """The folder with the dumps of a run's ranks, None without any; where they were written if not kept."""
    places = (run_dir / FLIGHT, recorder_folder(run_dir))
    return next((place for place in places if any(path.is_file() for path in place.glob("*"))), None)
