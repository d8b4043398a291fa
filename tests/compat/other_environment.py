"""An environment of its own for a package that is no part of this project's."""

import subprocess
import sys


def environment(tmp_path_factory, package):
    """The Python of a new environment with this package; from the package index, so it needs a network."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python
