"""Can the installed torch use the GPUs? If not, a run fails minutes later with an unrelated error."""

from collections.abc import Iterator

from omegaconf import OmegaConf

from drzero.ops.resources.cuda import Sight, look
from drzero.ops.resources.gpu import gpus_here
from drzero.ops.text import counted
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note
from drzero.recipe.compose import process_env

KEY = "CUDA"
_DEVICES = {
    "machine.device": ("prepare_data", "merge", "serve_search"),
    "indexing.device": (),
    "retrieval.device": ("merge", "prepare_data"),
}
"""The keys that may ask for a GPU, and the stages that load nothing there."""
_HIDDEN = "CUDA_VISIBLE_DEVICES hides the others: unset it, or name as many as the run uses"


def check_cuda(ctx: CheckContext) -> Iterator[Finding]:
    """torch must be built for CUDA, see the run's GPUs, and compute on each."""
    uses_gpu = any(_asks(ctx, key) for key in _DEVICES)
    here = gpus_here() if ctx.machine.is_here and uses_gpu else 0
    if not here:  # check_compute reports a machine without GPUs
        return
    if ctx.readings.sight is None:
        ctx.readings.sight = look(process_env(ctx.config))
    wanted = ctx.config.machine.gpus if _asks(ctx, "machine.device") else 1
    yield from judge(ctx.readings.sight, here, wanted)


def _asks(ctx: CheckContext, key: str) -> bool:
    device = str(OmegaConf.select(ctx.config, key))
    return device.startswith("cuda") and ctx.stage not in _DEVICES[key]


def judge(sight: Sight, here: int, wanted: int) -> Iterator[Finding]:
    """Findings for a run that wants `wanted` of a machine's `here` GPUs."""
    shown, gpus = str(sight), counted(here, "GPU")
    if not sight.torch:
        why = f"torch did not start in a separate process ({sight.fault})"
        yield error(KEY, why, "repair the installation, or the driver that it waits for", value=gpus)
    elif sight.cuda is None:
        why = f"torch {sight.torch} is built without CUDA, and this machine has {gpus}"
        fix = "install the torch of constraints-gpu.txt in a build for CUDA, or use hardware=cpu"
        yield error(KEY, why, fix, value=shown)
    elif sight.fault is not None:
        which = f"GPU {len(sight.devices)}" if sight.available else "the driver"
        fix = "see `nvidia-smi -q` and the kernel's log; restart the machine, or leave that GPU out"
        yield error(KEY, f"{which} did not answer: {sight.fault}", fix, value=shown)
    elif not sight.available and sight.visible is None:
        reason = sight.why or "it does not say why"
        why = f"torch for CUDA {sight.cuda} finds none of {gpus} ({reason})"
        yield error(KEY, why, "the driver must be new enough for that CUDA: update it", value=shown)
    elif len(sight.devices) < min(wanted, here):
        why = f"torch sees {len(sight.devices)} of this machine's {gpus}, and the run uses {wanted}"
        yield error(KEY, why, _HIDDEN, value=shown)
    elif broken := [index for index, device in enumerate(sight.devices) if device.fault]:
        listed = "; ".join(f"GPU {index}: {sight.devices[index].fault}" for index in broken)
        why = f"torch cannot compute on every GPU that it sees ({listed})"
        yield error(KEY, why, "leave it out by CUDA_VISIBLE_DEVICES, or use another machine", value=shown)
    else:
        yield note(KEY, shown, value=gpus)
