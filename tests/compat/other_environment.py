"""Separate environments and a browser: `make compat` needs them, and `make setup` does not install them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLAYWRIGHT = "playwright==1.65.2"


def only_by_make_compat(why: str, *, browser: bool = False) -> None:
    """Skip the module that calls this, unless `make compat` runs it, and where a browser is missing."""
    if not os.environ.get("DRZERO_COMPAT") or (browser and CHROMIUM is None):
        pytest.skip(f"{why}: make compat", allow_module_level=True)


def environment(tmp_path_factory, package):
    """The Python of a new environment with this package; from the package index, so it needs a network."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def driven(python: Path, script: str, *words: str, seconds: float = 500) -> Any:
    """What a script of this folder saw in Chromium. Its Python has playwright."""
    command = [str(python), str(Path(__file__).with_name(script)), str(CHROMIUM), *words]
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=seconds)
    return json.loads(ran.stdout)
