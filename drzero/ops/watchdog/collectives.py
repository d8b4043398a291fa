"""Which rank waits in which collective, by the calls on the ranks' main threads.

On GPUs a rank hangs at its next wait for the device, after the collective: its class is then `device`.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drzero.ops.grouping import by_key
from drzero.ops.process.tree import ZOMBIE
from drzero.ops.watchdog.stacks import Frame, Stack

Kind = Literal["collective", "clean-up", "init", "loading", "pipeline", "device", "ended", "elsewhere"]

_COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
)
_PIPELINE_FILES = ("torch/distributed/pipelining/", "megatron/core/pipeline_parallel/")
_GROUP_BEGIN = re.compile(
    "init_process_group|_new_process_group_helper|new_group|_store_based_barrier|init_device_mesh|rendezvous"
    "|_tcp_rendezvous_handler|_env_rendezvous_handler|_create_c10d_store"
)
_CLEAN_UP = re.compile(
    "destroy_process_group|destroy|close|shutdown|cleanup|clean_up|teardown|__exit__|__del__"
)
_INTERPRETER_ENDS = {"_shutdown", "_run_exitfuncs", "_exit_function", "_python_exit"}
"""In the standard library, where other names in _CLEAN_UP only close files and pools."""
_LOADING = {"from_pretrained", "load_state_dict", "load_checkpoint", "load_model", "safe_open", "load_file"}
_LOADING_FILES = (
    "torch/_inductor/",
    "torch/_dynamo/",
    "triton/compiler/",
    "safetensors/",
    "torch/serialization.py",
)
_DEVICE_FILES = ("torch/cuda/", "torch/npu/")


def call(frame: Frame) -> str:
    """Return the bare name of a function, which py-spy qualifies from Python 3.11 on."""
    return frame.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class RankPosition:
    """Where a rank stands: its class, the operation, and the line that called it."""

    kind: Kind
    operation: str
    site: str

    def __str__(self) -> str:
        return f"{self.operation} called by {self.site}" if self.operation else self.site


def position_of(stack: Stack) -> RankPosition:
    """Classify a rank."""
    frames = stack.main
    if stack.state == ZOMBIE or not frames:
        return RankPosition("ended", "", "no Python frames")
    site = str(next((frame for frame in frames if not _is_library(frame)), frames[-1]))
    # The outermost of torch.distributed's own functions is the collective.
    ours = [
        call(f)
        for f in frames
        if f.file.startswith(_COLLECTIVE_FILES) and not _GROUP_BEGIN.fullmatch(call(f))
    ]
    operation = ours[-1] if ours else ""
    if signs := [call(frame) for frame in frames if _cleans_up(frame)]:
        return RankPosition("clean-up", operation or signs[0], site)
    if any(frame.file.startswith(_PIPELINE_FILES) for frame in frames):
        return RankPosition("pipeline", operation or call(frames[0]), site)
    if begun := [call(frame) for frame in frames if _GROUP_BEGIN.fullmatch(call(frame))]:
        return RankPosition("init", begun[0], site)
    if operation:
        return RankPosition("collective", operation, site)
    if any(call(frame) in _LOADING or frame.file.startswith(_LOADING_FILES) for frame in frames):
        return RankPosition("loading", call(frames[0]), site)
    if frames[0].file.startswith(_DEVICE_FILES):
        return RankPosition("device", call(frames[0]), site)
    return RankPosition("elsewhere", "", site)


def is_in_distributed(stack: Stack) -> bool:
    """Whether its main thread is in torch.distributed, which makes it a rank."""
    return any(frame.file.startswith("torch/distributed/") for frame in stack.main)


def compare(
    ranks: Sequence[Stack], has_error: bool, ending: bool, starting: bool
) -> tuple[str, Sequence[Stack]] | None:
    """Return how ranks differ and which are at fault, or None if no rank waits for another."""
    of = by_key(ranks, lambda stack: position_of(stack).kind)
    waiting = [*of.get("collective", ()), *of.get("pipeline", ()), *of.get("device", ())]
    rest = [*of.get("elsewhere", ()), *of.get("ended", ())]
    if "clean-up" in of and (len(of["clean-up"]) < len(ranks) or ending):
        return "clean-up deadlock", of["clean-up"]
    begun = [*of.get("init", ()), *(waiting if starting else ())]
    if begun and ("loading" in of or rest or ("init" in of and len(of["init"]) == len(ranks))):
        late = of.get("loading") or rest or of["init"]
        if starting or "init" in of:
            return "initialisation deadlock", late
    if waiting and rest:
        has_raised = has_error or "ended" in of
        return "exception on some ranks" if has_raised else "mismatched collectives", rest
    if "pipeline" in of and len(waiting) == len(ranks):
        return "shape mismatch between pipeline stages", of["pipeline"]
    if len(waiting) == len(ranks) > 1:
        groups = by_key(ranks, lambda stack: str(position_of(stack)))
        if len(groups) == 1:
            return "same-collective time-out", ()
        # If groups are equally large, assume that the first rank is right.
        largest = max(groups.values(), key=len)
        fewer = [stack for group in groups.values() if group is not largest for stack in group]
        return "mismatched collectives", fewer
    return None


def _is_library(frame: Frame) -> bool:
    return frame.file.startswith(("torch/", "ray/", "threading.py", "queue.py", "selectors.py", "asyncio/"))


def _cleans_up(frame: Frame) -> bool:
    """Whether a call is a clean-up, not just closing a file or leaving one of torch's `with` blocks."""
    name = call(frame)
    if name in _INTERPRETER_ENDS:
        return True
    if (
        not _CLEAN_UP.fullmatch(name)
        or frame.file.split("/")[0].removesuffix(".py") in sys.stdlib_module_names
    ):
        return False
    return name != "__exit__" or not _is_library(frame)
