"""Can everything in the GPU image be imported together? Tested without Docker, a GPU or an account.

`make image-proof` installs pinned SGLang and, with `--no-deps`, our additions into a new environment, 9 GB.
It differs from the image in two ways: SGLang's packages are today's, and flash-attn's wheel is left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from drzero.launch.image.check import PROJECT
from drzero.launch.image.pins import ADDED, DATA_ONLY, GPU_ONLY, SGLANG_IMAGE, requirements
from drzero.launch.volumes import MOUNTS


def main(arguments: list[str]) -> int:
    """Make the environment, check it, remove it. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Can everything in the GPU image be imported together?")
    parser.add_argument("--python", default=SGLANG_IMAGE.python, help="the images' Python, or where it is")
    python = parser.parse_args(arguments).python
    with tempfile.TemporaryDirectory(prefix="drzero-image-") as folder:
        return _prove(Path(folder), python)


def _prove(folder: Path, python: str) -> int:
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT.parent),
        "PYTHONWARNINGS": "ignore",
        "UV_CACHE_DIR": str(folder / "uv"),
        "TMPDIR": str(folder),
    }
    for kind in MOUNTS:
        (folder / kind).mkdir()
        environment[f"DRZERO_MOUNT_{kind.upper()}"] = str(folder / kind)
    inside = folder / "environment" / "bin" / "python"
    uv, install = (sys.executable, "-m", "uv"), ("pip", "install", "--quiet", "--python", str(inside))
    steps = (
        (*uv, "venv", "--quiet", "--python", python, str(folder / "environment")),
        (*uv, *install, *requirements(("sglang",))),
        # Modal puts uv into an image.
        (*uv, *install, "--no-deps", *requirements((*ADDED, *GPU_ONLY, *DATA_ONLY, "uv"))),
        (*uv, *install, "--target", str(folder / "modal"), *requirements(("modal",))),
        (str(inside), "-c", _BEHIND, str(folder / "modal")),
        (str(inside), "-m", "drzero.launch.image.container_check", "gpu"),
    )
    for step in steps:
        words = " ".join(step).replace(str(folder), "…").replace(sys.executable, "python")
        print(f"$ {words[:100]}", flush=True)
        if code := subprocess.run(step, env=environment, cwd=folder, check=False).returncode:
            return code
    return 0


# In a container Modal's client comes after the image's own packages.
_BEHIND = "import sys, sysconfig; open(sysconfig.get_path('purelib') + '/modal.pth', 'w').write(sys.argv[1])"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
