"""Which Python makes the environment: setup.sh with Pythons that fit, that do not, and that lack `venv`."""

import functools
import hashlib
import os
import subprocess
import sys
import tomllib
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from drzero.ops.versions import pinned

ROOT = Path(__file__).parents[2]
SYSTEM = Path(sys.base_prefix) / "bin" / "python3"
SYSTEMS = (Path("/usr/bin"), Path("/bin"))
TOOLS = ("cut", "dirname", "grep", "head", "mkdir", "sed", "sh", "tail")
# What a Python lacks or claims, as a module that it imports before its own.
NO_VENV = {"ensurepip.py": "raise ImportError"}
NO_PIP = {"pip.py": "raise ImportError"}
VERSION_3_14 = {"sitecustomize.py": "import sys; sys.version_info = (3, 14, 1, 'final', 0)"}
# In place of uv: it writes down what it was asked for, and fails if that is a download.
UV = """#!/bin/sh
echo "$@" > asked
case "$*" in *">="*) echo "error: no Python on this machine, and no download" >&2; exit 2 ;; esac
"""


def python(folder: Path, modules: dict[str, str]) -> Path:
    """The system's Python with these modules before its own."""
    folder.mkdir()
    for name, text in modules.items():
        (folder / name).write_text(text)
    script = folder / "python3"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {SYSTEM} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def index(tmp_path):
    wheel = f"uv-{(version := pinned('uv'))}-py3-none-manylinux_2_17_{os.uname().machine}.whl"
    folder = tmp_path / "served" / "uv"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        archive.writestr(f"uv-{version}.data/scripts/uv", UV)
    sha256 = hashlib.sha256((folder / wheel).read_bytes()).hexdigest()
    (folder / "index.html").write_text(f'<a href="{wheel}#sha256={sha256}">{wheel}</a>')
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def setup(folder: Path, python: object, index: str) -> subprocess.CompletedProcess[str]:
    """`setup.sh` where no uv is on the path and the package index is the given one."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name in TOOLS:
        if not (tools / name).exists():
            (tools / name).symlink_to(next(p / name for p in SYSTEMS if (p / name).exists()))
    env = {"PATH": str(tools), "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "HOME": str(folder)}
    command = ["sh", str(ROOT / "setup.sh"), str(python), "environment"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_a_python_that_fits_is_used_and_nothing_is_downloaded(tmp_path):
    done = setup(tmp_path, SYSTEM, "http://127.0.0.1:9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "environment" / "bin" / "pip").is_file()
    assert not (tmp_path / "build").exists()


def test_an_environment_that_works_is_kept_and_a_broken_one_is_made_anew(tmp_path):
    setup(tmp_path, SYSTEM, "http://127.0.0.1:9")
    settings, kept = tmp_path / "environment" / "pyvenv.cfg", tmp_path / "environment" / "kept"
    settings.write_text(settings.read_text() + "note = of the first\n")
    kept.touch()
    other = python(tmp_path / "other", {})
    assert setup(tmp_path, other, "http://127.0.0.1:9").returncode == 0
    assert kept.exists() and "of the first" in settings.read_text()
    link = tmp_path / "environment" / "bin" / "python3"
    link.unlink()
    link.symlink_to("/no/such/python")
    assert setup(tmp_path, SYSTEM, "http://127.0.0.1:9").returncode == 0
    assert not kept.exists() and subprocess.run([link, "-m", "pip", "--version"]).returncode == 0


def test_without_venv_uv_makes_the_environment_with_the_same_python(tmp_path, index):
    given = python(tmp_path / "python", NO_VENV | NO_PIP)
    done = setup(tmp_path, given, index)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "it has no venv. uv (20 MB) makes the environment instead" in done.stdout
    asked = (tmp_path / "asked").read_text().split()
    assert asked[0] == "venv" and "--seed" in asked and asked[-3:] == ["--python", str(given), "environment"]


def test_a_version_out_of_range_ends_in_one_line_where_uv_brings_no_other(tmp_path, index):
    done = setup(tmp_path, python(tmp_path / "python", VERSION_3_14 | NO_PIP), index)
    assert done.returncode == 2
    assert "it is Python 3.14.1. uv (20 MB) makes the environment instead" in done.stdout
    assert done.stderr == (
        "setup: it is Python 3.14.1, and uv brings no other "
        "(error: no Python on this machine, and no download). "
        "Install Python 3.11 to 3.13 with venv (Debian, Ubuntu: apt-get install python3-venv), "
        "then run: make setup PYTHON=python3.13\n"
    )
    assert ">=3.11,<3.14" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize("damage", ["no index", "another file"])
def test_where_uv_cannot_be_downloaded_one_line_says_what_to_install(tmp_path, index, damage):
    if damage == "no index":
        index = "http://127.0.0.1:9"
    else:
        next((tmp_path / "served" / "uv").glob("*.whl")).write_bytes(b"another")
    done = setup(tmp_path, python(tmp_path / "python", NO_VENV | NO_PIP), index)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "it has no venv, and uv cannot be downloaded (" in done.stderr
    assert "apt-get install python3-venv" in done.stderr
    assert not (tmp_path / "environment").exists()


def test_a_python_that_is_not_there_ends_in_one_line(tmp_path):
    done = setup(tmp_path, "python3.12", "http://127.0.0.1:9")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("setup: there is no python3.12, and uv cannot be downloaded")


def test_the_range_is_that_of_the_project_and_of_the_readme():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert declared == ">=3.11,<3.14"
    assert "Python 3.11, 3.12 or 3.13" in (ROOT / "README.md").read_text()
    pins = (ROOT / ".ci" / "pins").read_text()
    assert "for python in 3.11.2 3.12.0 3.13.0; do" in pins
