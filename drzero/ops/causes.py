"""Log patterns of known failures, with advice. A recipe adds more."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NO_HOST_MEMORY = "the machine is out of memory"
_WORKER_DIED = "worker died"


@dataclass(frozen=True)
class Cause:
    """A kind of failure."""

    name: str
    pattern: str
    advice: str
    culprit: str | None = None  # the component at fault; None means the component whose log has the line


def named(cause: Cause, others: str) -> str:
    """A cause's name, and for lack of memory the other programs that have it."""
    is_shown = cause.name == NO_HOST_MEMORY and others
    return f"{cause.name} (largest other programs: {others})" if is_shown else cause.name


CAUSES: tuple[Cause, ...] = (
    Cause(
        "no shared memory",
        # A process gets SIGBUS where it writes to a full /dev/shm; NCCL's words name the disk.
        r"\bSIGBUS\b|\bBus error\b|/dev/shm.*No space left|memory segment /dev/shm|out of shared memory",
        "make room in /dev/shm (`docker run --shm-size` sets its size), then rerun: it resumes at the last "
        "checkpoint",
        culprit="/dev/shm",
    ),
    Cause(
        "disk full",
        r"No space left on device|Disk quota exceeded|ENOSPC|OutOfDiskError",
        "make room, then rerun: it resumes at the last checkpoint",
    ),
    Cause(
        NO_HOST_MEMORY,
        # Ray's monitor kills its own workers; the kernel kills anybody.
        r"[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure|node running low on memory"
        r"|oom-kill|killed (pid \d+|\d+ process\(es\) of this cgroup) for lack of memory",
        "close other programs, or lower batches and lengths (`drzero preflight` says how far), then "
        "rerun: it resumes at the last checkpoint",
        culprit="this machine's memory",
    ),
    Cause(
        "out of memory",
        r"CUDA out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|bad_alloc",
        "smaller micro-batches, shorter responses, or a smaller share of the GPU for the engines",
    ),
    Cause(
        "collective time-out",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send)"
        r"|collective.{0,40}timed? ?out",
        "one rank did not join: find the rank whose log ends first; flight/ shows what each rank waited for",
    ),
    Cause(
        "a rank was lost",
        r"Connection closed by peer|Connection reset by peer \[|ncclRemoteError|remote process exited",
        "this rank only lost its peer: look in the log of the rank that ended first",
    ),
    Cause(
        "NCCL failure",
        r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError|NCCL error|ncclInvalidUsage",
        "run once with debug=hang (NCCL_DEBUG=INFO) and read the first WARN line",
    ),
    Cause(
        "GPU fault",
        r"illegal memory access|device-side assert|unspecified launch failure|\bXid\b|uncorrectable ECC",
        "run once with debug=hang (CUDA_LAUNCH_BLOCKING=1) to find the failing line; ECC or Xid is hardware",
    ),
    Cause(
        "port in use",
        r"Address already in use|Errno 98|is taken by pid",
        "stop what holds the port, or unset it",
    ),
    Cause(
        "shape mismatch",
        r"size mismatch for|shapes cannot be multiplied|Sizes of tensors must match|PipeliningShapeError"
        r"|shape.{0,30}mismatch",
        "the checkpoint belongs to another model, or stages disagree on a shape: compare the model's config",
    ),
    Cause(
        "unknown config key",
        r"got an unexpected keyword argument|Key '.*' is not in struct|Could not override",
        "this version does not know the key: see the nearest name in the message",
    ),
    Cause(
        "model not found",
        r"is not a local folder and is not a valid model identifier|Repository Not Found|gated repo"
        r"|401 Client Error|LocalEntryNotFoundError",
        "check the model's path or hub id, and HF_TOKEN for a gated model",
    ),
    Cause(
        _WORKER_DIED,
        r"ActorDiedError|ActorUnavailableError|WorkerCrashedError|died unexpectedly|RayActorError"
        r"|A worker died or was killed|[1-9]\d* Workers crashed due to other reasons",
        "a worker process of the trainer died, most often for lack of memory: see the lines before",
    ),
)


def find_cause(line: str, more: Sequence[Cause] = ()) -> Cause | None:
    """Return the cause that a line shows, or None. `more` is tried first."""
    return next((cause for cause in (*more, *CAUSES) if re.search(cause.pattern, line)), None)


def first_cause(lines: Iterable[str], more: Sequence[Cause] = ()) -> tuple[str, Cause] | None:
    """Return the first line that shows a known cause, with that cause: later errors are its consequences."""
    found = [(line, cause) for line in lines if (cause := find_cause(line, more))]
    if found and found[0][1].name == _WORKER_DIED:  # Ray says later why it killed a worker
        return next((one for one in found if one[1].name == NO_HOST_MEMORY), found[0])
    return found[0] if found else None
