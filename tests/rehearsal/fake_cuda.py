"""Eight fake H100: what veRL, torch's FSDP2 and SGLang ask of CUDA while they build a run.

Tensors have the device `cuda:0` and no memory (torch's FakeTensorMode). Collectives of eight ranks return at
once (torch's `fake` group), and streams and events wait for nothing. Only devices, types and shapes are real.
Use it in a separate process, before it imports veRL or SGLang.
"""

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import _state_dict_utils
from torch.testing._internal.distributed.fake_pg import FakeStore

GPUS, GIB = 8, 1 << 30
DEVICE = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
_DEVICES_WITH_GUARDS = 2
_CPU, _CUDA = range(_DEVICES_WITH_GUARDS)


class Stream:
    """A stream or event that is always done."""

    device = DEVICE

    def __init__(self, *_, **__): ...

    def __getattr__(self, name):
        return lambda *_: self

    def __enter__(self): ...

    def __exit__(self, *_): ...


def stand_in():
    """Pretend that torch has eight H100 and that this process is the first of eight ranks."""
    properties = SimpleNamespace(
        **{"name": NAME, "major": 9, "minor": 0, "total_memory": 80 * GIB},
        **{"multi_processor_count": 132, "warp_size": 32},
    )
    answers = {
        **{"is_available": True, "device_count": GPUS, "current_device": 0, "is_bf16_supported": True},
        **{"mem_get_info": (79 * GIB, 80 * GIB), "get_device_capability": (9, 0), "get_device_name": NAME},
        **dict.fromkeys(("memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "_lazy_init")),
        **{"get_device_properties": properties, "stream": contextlib.nullcontext()},
        **{"current_stream": Stream(), "default_stream": Stream()},
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    vars(torch.cuda).update(Stream=Stream, Event=Stream)
    vars(torch.cuda.memory)["_set_allocator_settings"] = lambda *_: None
    # Autograd asks for a guard of the device. A torch without CUDA has none, but the CPU's works.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _DEVICES_WITH_GUARDS).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[_CUDA] = guards[_CUDA] or guards[_CPU]
    # Otherwise it would look for the GPUs.
    FakeTensorMode.avoid_device_init = True
    _keep_what_is_there_already()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)


def _keep_what_is_there_already():
    """Patch two functions that fail on tensors without content."""
    move, offsets = torch.nn.Module.to, _state_dict_utils.compute_local_shape_and_global_offset

    def to(module, *args, **named):
        # A move that changes nothing: torch would swap each tensor with itself.
        device, dtype, *_ = torch._C._nn._parse_to(*args, **named)
        here = all(device in (None, p.device) and dtype in (None, p.dtype) for p in module.parameters())
        return module if here else move(module, *args, **named)

    def real_offsets(*args):
        # This reads the numbers of a tensor that it makes.
        with unset_fake_temporarily(), torch.device("cpu"):
            return offsets(*args)

    torch.nn.Module.to = to
    _state_dict_utils.compute_local_shape_and_global_offset = real_offsets


_MODE = FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def on_the_gpu():
    """Tensors made here are on the GPU and have no content."""
    with _MODE, DEVICE:
        yield
