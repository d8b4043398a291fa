"""What a run needs of SGLang against the published wheel of the pinned version, which is not installed.

make compat      # DRZERO_COMPAT=1; downloads 6 MB
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from other_environment import only_by_make_compat

from drzero.launch.image.pins import SGLANG_IMAGE
from verl_ext.sglang.compat import NEEDS, PINNED
from verl_ext.sglang.source import Source

only_by_make_compat("downloads SGLang's wheel")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sglang")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", SGLANG_IMAGE.python, "--platform", "manylinux_2_34_x86_64"]
    command += ["--platform", "any", "--dest", str(folder), f"sglang=={PINNED}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return Source(Path(folder) / "sglang")


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.kind} {need.name}")
def test_the_pinned_version_has_what_a_run_needs(need, source):
    assert need.found_in(source)
