"""Is what the GPU image is made of importable together? Proven without Docker, a GPU or an account.

    make image-proof                                  # ARGS="--python PATH" if uv finds no such Python itself

Makes an environment with the images' Python, installs SGLang of the pinned version and then, with
`--no-deps`, what the image adds (drzero/launch/image/pins.py), and runs in it the check that a container
runs. SGLang's own packages are today's, not those of the day its image was made, and flash-attn's wheel is
left out. 9 GB are downloaded into a temporary folder, which is removed at the end.
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
    """Make the environment, check it, remove it; returns the check's exit code, or uv's if that fails."""
    parser = argparse.ArgumentParser(description="Is what the GPU image is made of importable together?")
    parser.add_argument("--python", default=SGLANG_IMAGE.python, help="the images' Python, or where it is")
    python = parser.parse_args(arguments).python
    with tempfile.TemporaryDirectory(prefix="drzero-image-") as folder:
        return _prove(Path(folder), python)


def _prove(folder: Path, python: str) -> int:
    environment = os.environ | {
        **{f"DRZERO_MOUNT_{kind.upper()}": str(folder / kind) for kind in MOUNTS},
        **{
            "PYTHONPATH": str(PROJECT.parent),
            "PYTHONWARNINGS": "ignore",
            "UV_CACHE_DIR": str(folder / "uv"),
            "TMPDIR": str(folder),
        },
    }
    for kind in MOUNTS:
        (folder / kind).mkdir()
    inside = folder / "environment" / "bin" / "python"
    uv, install = (sys.executable, "-m", "uv"), ("pip", "install", "--quiet", "--python", str(inside))
    steps = (
        (*uv, "venv", "--quiet", "--python", python, str(folder / "environment")),
        (*uv, *install, *requirements(("sglang",))),
        # And uv itself, which Modal puts into an image.
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


# A container gets Modal's client behind its own packages.
_BEHIND = "import sys, sysconfig; open(sysconfig.get_path('purelib') + '/modal.pth', 'w').write(sys.argv[1])"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
