"""A stand-in for NVIDIA's libcuda.so.1, to import SGLang without a GPU: each function reports no device."""

import ctypes
import re
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from drzero.ops.errors import RunFailed

_LIBRARY = "libcuda.so.1"
_KERNELS = ("sglang-kernel", "torch-memory-saver")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def load_stand_in() -> int:
    """Returns its number of functions, 0 with a driver. Raises RunFailed or PackageNotFoundError."""
    try:
        ctypes.CDLL(_LIBRARY)
        return 0
    except OSError:
        names = _wanted()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / _LIBRARY
        source = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names)
        compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{_LIBRARY}"]
        _run(*compiler, "-o", str(library), source=source)
        # Libraries loaded later that need this name get this one.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return len(names)


def _wanted() -> list[str]:
    files = [file for name in _KERNELS for file in metadata.distribution(name).files or ()]
    libraries = [str(file.locate()) for file in files if file.suffix == ".so"]
    return sorted(set(re.findall(r"\bU (cu[A-Z]\w*)$", _run("nm", "-D", *libraries), re.MULTILINE)))


def _run(*command: str, source: str = "") -> str:
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise RunFailed(f"no stand-in for {_LIBRARY}: {command[0]}: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        raise RunFailed(f"no stand-in for {_LIBRARY}: {command[0]}: {error.stderr.strip()[-300:]}") from error
