"""SGLang on a machine without CUDA, to rehearse a run with real engines (SGLang 0.5.12, veRL 0.9.1).

tests/rehearsal/test_sglang_shims.py says when each of the three shims can go.
"""

import importlib.util
import os
import platform
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from verl_ext.sglang.compat import PINNED, refusal

STAND_INS = Path(__file__).parent / "without_cuda"


def environment(tp: int) -> dict[str, str]:
    """The environment of a process that starts or calls an SGLang of `tp` ranks."""
    cores = sorted(os.sched_getaffinity(0))
    # SGLang counts these parts, but binds to them only with CPU kernels, which the stand-in lacks.
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))
    return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": bound}


def arguments(sequences: int, positions: int) -> dict[str, Any]:
    """Arguments of a server that decodes this many sequences at full length at once."""
    backends = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "none"}
    sizes = {"max_running_requests": sequences, "max_total_tokens": sequences * positions}
    return {"device": "cpu", **backends, "disable_overlap_schedule": True, "sleep_on_idle": True, **sizes}


def refusal_on_cpu() -> str | None:
    """Why SGLang cannot run here without CUDA, in one line, or None."""
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed here"
    if (version := metadata.version("sglang")) != PINNED:
        return f"on a CPU, stand-ins replace what is CUDA's of SGLang {PINNED}, and {version} is installed"
    kernels = importlib.util.find_spec("sgl_kernel")
    if kernels is None or STAND_INS.name not in Path(str(kernels.origin)).parts:
        return "this environment has no stand-in for SGLang's kernels, which are for CUDA"
    if platform.machine() != "x86_64":
        return f"on {platform.machine()} SGLang calls kernels for the CPU, which the stand-in has not"
    return refusal()


def main() -> None:
    """Put the stand-ins on the path of this Python's environment."""
    place = Path(sysconfig.get_path("purelib")) / "without_cuda.pth"
    place.write_text(f"{STAND_INS}\nimport torchvision_operators\n")


if __name__ == "__main__":
    main()
