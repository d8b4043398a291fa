"""The probes: each tries one mechanism on this machine and returns what it saw, or raises.

    python -m drzero.launch.smoke.probe ipc cuda

Each runs in its own process, since a mechanism may crash or hang. Written for SGLang 0.5.12, veRL 0.9.1,
torch_memory_saver 0.0.10 and flash-attn 2.8.3.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from drzero.ops.errors import RunFailed
from drzero.ops.process.child import describe_exit
from drzero.ops.process.isolated import last_line

_MIB = 2**20
_NUMBERS = 1 << 20
_SAVED_MIB = {"weights": 256, "kv_cache": 1024}


def fifo(folder: str) -> str:
    """The folder takes a named pipe, and a byte goes through it."""
    path = Path(folder) / f".fifo-{uuid.uuid4().hex}"
    try:
        os.mkfifo(path)
    except OSError as refused:
        raise RunFailed(f"{folder} takes none: {refused.strerror}") from refused
    try:
        end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(end, b"x")
            if os.read(end, 1) != b"x":
                raise RunFailed(f"a pipe in {folder} loses what is written to it")
        finally:
            os.close(end)
    finally:
        path.unlink()
    return f"in {folder}"


def shared_memory(wanted: str) -> str:
    """/dev/shm has room for this many bytes."""
    from drzero.preflight.ray_cluster import shm_free

    free = shm_free()
    said = f"{free / 1e9:.1f} GB are free, and Ray's object store takes {int(wanted) / 1e9:.1f}"
    if free < int(wanted):
        raise RunFailed(f"{said}: it will be on disk")
    return said


def bfloat16(device: str) -> str:
    """Every GPU multiplies matrices in bfloat16 natively and correctly."""
    import torch

    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RunFailed(f"{torch.cuda.get_device_name()} has no bfloat16 of its own")
    left, right = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
    whole = left @ right
    for place in _places(device):
        product = left.to(place, torch.bfloat16) @ right.to(place, torch.bfloat16)
        gap = ((product.float().cpu() - whole).abs().max() / whole.abs().max()).item()
        if not gap < 0.03:
            raise RunFailed(f"a product on {place} is {gap:.1%} off")
    return f"products on {len(_places(device))} of {device}"


def ipc(device: str) -> str:
    """Another process reads and writes a tensor on each GPU, as in SGLang's weight sync."""
    import torch
    import torch.multiprocessing

    if device == "cpu":
        # By default torch passes file descriptors, which cannot go through a pipe.
        torch.multiprocessing.set_sharing_strategy("file_system")
    for place in _places(device):
        shared = torch.arange(_NUMBERS, dtype=torch.float32, device=place)
        _in_other_process("take_shared", stdin=bytes(ForkingPickler.dumps(shared)))
        if not torch.equal(shared.cpu(), -torch.arange(_NUMBERS, dtype=torch.float32)):
            raise RunFailed(f"what the other process wrote to its tensor on {place} is not seen here")
    return f"a tensor on {len(_places(device))} of {device} read and written by another process"


def take_shared() -> str:
    """The other process of `ipc`: open the tensor whose handle is on stdin, check it, write to it."""
    import torch
    import torch.multiprocessing

    shared = pickle.loads(sys.stdin.buffer.read())
    if not torch.equal(shared.cpu(), torch.arange(_NUMBERS, dtype=torch.float32)):
        raise RunFailed("it reads other numbers than were written")
    shared.neg_()
    if shared.is_cuda:
        torch.cuda.synchronize()
    return "taken"


def sleep_and_wake() -> str:
    """GPU memory is freed and taken again at the same addresses, as SGLang's schedulers do."""
    import torch_memory_saver

    # Its library must load before CUDA's. SGLang starts its schedulers with this LD_PRELOAD.
    with torch_memory_saver.configure_subprocess():
        return _in_other_process("sleep_once")


def sleep_once() -> str:
    """The other process of `sleep_and_wake`, with the library loaded."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = torch.arange(_SAVED_MIB["weights"] * _MIB // 4, dtype=torch.int32, device="cuda")
    with saver.region(tag="kv_cache", enable_cpu_backup=False):
        cache = torch.ones(_SAVED_MIB["kv_cache"] * _MIB // 4, dtype=torch.int32, device="cuda")
    places = weights.data_ptr(), cache.data_ptr()
    torch.cuda.synchronize()
    awake = torch.cuda.mem_get_info()[0]
    for tag in ("kv_cache", "weights"):
        saver.pause(tag)
    freed = (torch.cuda.mem_get_info()[0] - awake) / _MIB
    if freed < 0.9 * sum(_SAVED_MIB.values()):
        raise RunFailed(f"{freed:.0f} MiB are free of {sum(_SAVED_MIB.values())} that were put to sleep")
    for tag in ("weights", "kv_cache"):
        saver.resume(tag)
    if (weights.data_ptr(), cache.data_ptr()) != places:
        raise RunFailed("what woke up is at another address")
    if not torch.equal(weights.cpu(), torch.arange(len(weights), dtype=torch.int32)):
        raise RunFailed("the weights that were put to sleep are not those that woke up")
    cache.fill_(2)
    if cache.sum().item() != 2 * len(cache):
        raise RunFailed("the cache cannot be written to after it woke up")
    return f"{freed:.0f} MiB freed and taken again, the weights kept"


def all_reduce(device: str, ranks: str) -> str:
    """A process for each rank sums a tensor, by NCCL on GPUs and by gloo on a CPU."""
    with tempfile.TemporaryDirectory(prefix="drzero-probe-") as folder, ExitStack() as began:
        processes = []
        for rank in range(int(ranks)):
            said = began.enter_context(Path(folder, f"rank_{rank}").open("w+b"))
            process = subprocess.Popen(
                _command("reduce", device, str(rank), ranks, f"{folder}/store"),
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
            began.callback(process.wait)
            began.callback(process.kill)
            processes.append((process, said))
        # If one fails, the others wait forever.
        while not any(process.poll() for process, _ in processes):
            if all(process.poll() == 0 for process, _ in processes):
                return f"{ranks} ranks by {'nccl' if device == 'cuda' else 'gloo'}"
            time.sleep(0.1)
        rank, (process, said) = next(each for each in enumerate(processes) if each[1][0].returncode)
        said.seek(0)
        raise RunFailed(f"rank {rank}: {_reason(process.returncode, said.read())}")


def reduce(device: str, rank: str, ranks: str, store: str) -> str:
    """One rank of `all_reduce`."""
    import torch
    import torch.distributed as dist

    place = f"cuda:{rank}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(int(rank))
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(ranks),
    )
    numbers = torch.full((_NUMBERS,), int(rank) + 1.0, device=place)
    dist.all_reduce(numbers)
    if not (numbers == int(ranks) * (int(ranks) + 1) / 2).all():
        raise RunFailed(f"a sum over {ranks} ranks is {numbers[0].item()}")
    dist.destroy_process_group()
    return "reduced"


def flash_attention() -> str:
    """flash-attn's attention and cross-entropy agree with torch's own, forward and backward."""
    import torch
    from flash_attn import flash_attn_func
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from torch.nn import functional

    def attend(flash: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parts = [torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for part in parts:
            part.requires_grad_()
        if flash:
            out = flash_attn_func(*parts, causal=True)
        else:
            query, key, value = (part.transpose(1, 2) for part in parts)
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        out.float().square().sum().backward()
        return [out.detach(), *(part.grad for part in parts if part.grad is not None)]

    for theirs, ours in zip(attend(True), attend(False), strict=True):
        gap = ((theirs - ours).abs().max() / ours.abs().max()).item()
        if not gap < 0.05:
            raise RunFailed(f"it differs from torch's own attention by {gap:.1%}")
    logits, words = torch.randn(64, 4096, device="cuda"), torch.arange(64, device="cuda")
    losses = cross_entropy_loss(logits, words)[0]
    if not torch.allclose(losses, functional.cross_entropy(logits, words, reduction="none"), atol=1e-3):
        raise RunFailed("its cross-entropy differs from torch's own")
    return "attention forward and backward, cross-entropy"


def _places(device: str) -> list[str]:
    import torch

    if device != "cuda":
        return [device]
    if not torch.cuda.is_available():
        raise RunFailed("torch finds no GPU")
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _in_other_process(name: str, *words: str, stdin: bytes = b"") -> str:
    done = subprocess.run(_command(name, *words), input=stdin, capture_output=True, check=False)
    if done.returncode:
        raise RunFailed(f"in the other process: {_reason(done.returncode, done.stderr)}")
    return last_line(done.stdout)


def _command(name: str, *words: str) -> tuple[str, ...]:
    return sys.executable, "-m", "drzero.launch.smoke.probe", name, *words


def _reason(code: int, stderr: bytes) -> str:
    return last_line(stderr) if code > 0 and stderr.strip() else describe_exit(code)


_PROBES = (fifo, shared_memory, bfloat16, ipc, sleep_and_wake, all_reduce, flash_attention)
_OTHER_PROCESSES = (take_shared, sleep_once, reduce)
FUNCTIONS: dict[str, Callable[..., str]] = {each.__name__: each for each in (*_PROBES, *_OTHER_PROCESSES)}


def main(name: str, *words: str) -> int:
    """Print the probe's result. Returns 1 if it failed, with the reason as the last line of stderr."""
    try:
        print(FUNCTIONS[name](*words))
    # A mechanism may raise anything.
    except Exception as error:
        kind = "" if isinstance(error, RunFailed) else f"{type(error).__name__}: "
        print(f"{kind}{' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
