"""torch's Flight Recorder in the trainer's ranks, and the dumps a run keeps in `RUN_DIR/flight`.

    with flight_recorder(run_dir) as environment:
        …                                       # a start of the trainer, with that environment

Pipes live on the local disk: on a network mount without FIFOs all ranks would abort as NCCL starts.
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


def recorder_folder(run_dir: Path) -> Path:
    """Where a run's ranks open pipes and write dumps, the same at each start."""
    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"drzero-{os.getuid()}-{name}"


@contextmanager
def flight_recorder(run_dir: Path) -> Iterator[dict[str, str]]:
    """The environment of one start of the trainer. Dumps are kept even if it fails."""
    folder, kept = recorder_folder(run_dir), run_dir / FLIGHT
    # The last supervisor may have been killed.
    keep_dumps(folder, kept)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield recorder_env(folder)
    finally:
        keep_dumps(folder, kept)
        shutil.rmtree(folder, ignore_errors=True)


def recorder_env(folder: Path) -> dict[str, str]:
    """Ranks dump their collectives on a timeout and, with pipes, on demand. Names of torch 2.9 to 2.13."""
    recorded = {
        # Which of the two names opens the pipe depends on the release.
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
            f"{folder} takes no pipes ({refused.strerror}), so ranks dump their collectives at a time-out "
            "but not at a stall; set TMPDIR to another temporary folder",
        )
        return recorded
    return recorded | {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / "rank_")}


def dumps_of(run_dir: Path) -> Path | None:
    """The folder with a run's dumps: the kept ones, else the ranks' own. None without any."""
    places = (run_dir / FLIGHT, recorder_folder(run_dir))
    return next((place for place in places if any(path.is_file() for path in place.glob("*"))), None)
