"""The images: their table of versions, their layers as the client sends them, and what goes along."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from modal_checkout import PLANTED, make_checkout
from modal_plane import ControlPlane
from modal_plane.state import FunctionSpec

from launch.demands import Package, extra_findings, judge
from launch.errors import LaunchError
from launch.image import SOURCE, ImageExtras, gpu_image, leave_out
from launch.image_check import check_wheel, project
from launch.pins import (
    ADDED,
    BROUGHT,
    CPU_PINS,
    FLASH_ATTN_WHEELS,
    GPU_PINS,
    IMAGE_VERSIONS,
    OVERRIDES,
    SGLANG_IMAGE,
    constraints,
    flash_attn_wheel,
    normalised,
)
from launch.wheel_name import parse_wheel_name

ROOT = Path(__file__).parent.parent
PYTHON = SGLANG_IMAGE.python

# The table --------------------------------------------------------------------------------------------------


def test_the_images_have_the_versions_that_the_tests_run_with_but_for_torchs_own() -> None:
    differ = {
        name for name, version in {**CPU_PINS, **GPU_PINS}.items() if constraints().get(name) != version
    }
    assert differ == set(IMAGE_VERSIONS)


def test_nothing_is_both_added_and_brought() -> None:
    assert not set(ADDED) & set(BROUGHT)


def test_every_dependency_of_this_project_is_in_both_images() -> None:
    assert judge([project()], CPU_PINS, frozenset(), PYTHON).errors == []
    assert judge([project()], GPU_PINS, frozenset(BROUGHT), PYTHON).errors == []


def test_the_override_is_what_is_installed() -> None:
    assert {override.package: override.version for override in OVERRIDES}.items() <= GPU_PINS.items()


def test_the_flash_attn_wheel_is_for_the_image_by_its_name_and_by_its_row() -> None:
    wheel = flash_attn_wheel()
    assert wheel is not None and check_wheel(wheel, SGLANG_IMAGE) == []


@pytest.mark.parametrize("wheel", FLASH_ATTN_WHEELS, ids=lambda wheel: wheel.name)
def test_every_wheels_row_says_what_its_name_says_and_has_a_hash(wheel) -> None:  # type: ignore[no-untyped-def]
    said = parse_wheel_name(wheel.name)
    assert (said.version, said.torch, said.cuda, said.python) == (
        wheel.version,
        wheel.torch,
        wheel.cuda,
        wheel.python,
    )
    assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)


@pytest.mark.parametrize(
    "other",
    [
        replace(SGLANG_IMAGE, packages={"torch": "2.12.0"}),
        replace(SGLANG_IMAGE, cuda="12.9"),
        replace(SGLANG_IMAGE, python="3.11"),
        replace(SGLANG_IMAGE, cxx11_abi=False),
    ],
    ids=["torch", "CUDA", "Python", "ABI"],
)
def test_an_image_that_no_wheel_was_built_for_gets_none(other) -> None:  # type: ignore[no-untyped-def]
    assert flash_attn_wheel(other) is None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"torch": "2.10"}, "torch 2.11"),
        ({"cuda": "12"}, "CUDA 13.0"),
        ({"python": "3.11"}, "Python 3.12"),
        ({"version": "2.8.2"}, "version 2.8.3"),
    ],
)
def test_a_row_that_contradicts_the_wheels_name_is_told(changed: dict[str, str], told: str) -> None:
    wheel = replace(FLASH_ATTN_WHEELS[0], **changed)
    assert told in [finding.wants for finding in check_wheel(wheel, SGLANG_IMAGE)]


# Names of wheels --------------------------------------------------------------------------------------------


@given(
    *(st.integers(1, 9), st.integers(0, 30), st.sampled_from(["12", "128", "130", "118"])),
    *(st.integers(8, 14), st.sampled_from(["", "cxx11abiTRUE", "cxx11abiFALSE"])),
)
def test_a_wheels_name_is_read_back(torch: int, minor: int, cuda: str, python: int, abi: str) -> None:
    name = f"flash_attn-2.8.3+cu{cuda}torch{torch}.{minor}{abi}-cp3{python}-cp3{python}-linux_x86_64.whl"
    said = parse_wheel_name(name)
    assert (said.torch, said.python, said.platform) == (f"{torch}.{minor}", f"3.{python}", "linux_x86_64")
    assert said.cuda.replace(".", "") == cuda
    assert said.cxx11_abi is {"": None, "cxx11abiTRUE": True, "cxx11abiFALSE": False}[abi]


@given(st.text())
def test_whatever_is_no_such_name_is_refused_as_that(text: str) -> None:
    with pytest.raises(ValueError, match=r"name of a wheel|built for|one version of CPython"):
        parse_wheel_name(text)


@pytest.mark.parametrize(
    "name",
    [
        "flash_attn-2.8.3.tar.gz",
        "flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl",
        "flash_attn-2.8.3+cu13-cp312-cp312-linux_x86_64.whl",
        "flash_attn-2.8.3+cu130torch2.11-py3-none-any.whl",
        "flash_attn-2.8.3+cu130torch2.11-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    ],
)
def test_a_name_that_does_not_say_what_it_is_built_for_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        parse_wheel_name(name)


# Demands of packages (as published, shortened) --------------------------------------------------------------

SGLANG = Package(
    "sglang", "0.5.12", ("transformers==5.6.0", "torch==2.11.0", "xgrammar==0.2.0", "numpy"), ">=3.10"
)
VERL = Package(
    "verl",
    "0.9.1",
    (
        "tensordict!=0.9.0,<=0.10.0,>=0.8.0",
        "transformers!=5.6.0,<5.11,>=5.5.3",
        "ray[default]>=2.41.0",
        'torch==2.11.0; extra == "sglang"',
        'sglang==0.5.12; extra == "sglang"',
        'mbridge; extra == "sglang"',
    ),
    "<3.13,>=3.10",
)
RAY = Package(
    "ray", "2.55.1", ("click", 'aiohttp-cors; extra == "default"', 'tomli; python_version < "3.11"')
)
HAS = {
    **{
        "sglang": "0.5.12",
        "verl": "0.9.1",
        "torch": "2.11.0",
        "transformers": "5.9.0",
        "tensordict": "0.10.0",
    },
    **{"ray": "2.55.1", "click": "8.5.1", "aiohttp-cors": "0.8.1", "numpy": "2.3.5"},
}


def test_the_pair_of_sglang_and_verl_agrees_but_for_the_stated_override() -> None:
    verdict = judge([SGLANG, VERL, RAY], HAS, frozenset(), PYTHON)
    assert [(each.package, each.wants, each.has) for each in verdict.findings] == [
        ("sglang", "transformers==5.6.0", "5.9.0")
    ]
    assert verdict.errors == []


def test_an_override_does_not_cover_another_version() -> None:
    verdict = judge([SGLANG, VERL, RAY], HAS | {"transformers": "5.10.0"}, frozenset(), PYTHON)
    assert [each.has for each in verdict.errors] == ["5.10.0"]


def test_a_demand_that_nobody_has_thought_of_is_an_error() -> None:
    verdict = judge([VERL, RAY], HAS | {"tensordict": "0.9.0"}, frozenset(), PYTHON)
    assert [(each.package, each.has) for each in verdict.errors] == [("verl", "0.9.0")]


def test_what_is_needed_and_nowhere_is_an_error_with_the_extras_that_others_ask_for() -> None:
    without = {name: version for name, version in HAS.items() if name != "aiohttp-cors"}
    assert judge([RAY], without, frozenset(), PYTHON).errors == []
    (error,) = judge([VERL, RAY], without, frozenset(), PYTHON).errors
    assert (error.package, error.has) == ("ray", "nothing") and error.wants.startswith("aiohttp-cors")


def test_what_the_base_image_brings_in_unknown_versions_is_counted() -> None:
    without = {name: version for name, version in HAS.items() if name != "click"}
    verdict = judge([VERL, RAY], without, frozenset({"click"}), PYTHON)
    assert (verdict.errors, verdict.unknown) == ([], 1)


def test_what_sglang_needs_for_itself_is_its_images_own() -> None:
    assert judge([SGLANG], HAS, frozenset(), PYTHON).errors == []


def test_a_package_for_another_python_is_an_error() -> None:
    (error,) = judge([VERL, RAY], HAS, frozenset(), "3.13").errors
    assert (error.package, error.has) == ("verl", "3.13")


def test_an_extra_is_judged_by_what_it_pins_and_the_image_has() -> None:
    assert extra_findings(VERL, "sglang", HAS, PYTHON) == []
    (error,) = extra_findings(VERL, "sglang", HAS | {"sglang": "0.5.13"}, PYTHON)
    assert error.wants == "sglang==0.5.12"


def test_without_a_package_index_the_check_says_so(tmp_path: Path) -> None:
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_EXTRA_INDEX_URL": ""}
    done = subprocess.run(
        [sys.executable, "-m", "launch.image_check"],
        **{"env": os.environ | nowhere, "cwd": ROOT, "capture_output": True, "text": True, "check": False},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("not checked: ")


def test_what_is_installed_here_is_as_the_cpu_image_but_for_torch_and_what_it_wants() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.image_check", "--installed", "cpu"],
        **{"cwd": ROOT, "capture_output": True, "text": True, "check": False},
    )
    wrong = re.findall(r"launch/pins.py +wants (\S+)==", done.stdout)
    assert (done.returncode, set(wrong)) == (1, {"torch", "setuptools"}), done.stdout


# The layers, as the real client sends them ------------------------------------------------------------------

APP = """
import modal
from launch.image import ImageExtras, cpu_image, gpu_image

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
    *(".env", "id_rsa", "config/.env.local", "config/hf_token.txt", "launch/id_ed25519", "data/server.pem"),
    *(
        "pipeline/credentials.json",
        "search/wandb_api_key.yaml",
        "ops/service-account.json",
        "outputs/secret.txt",
    ),
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def plane(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        _launch(plane, checkout)
        yield plane


def _launch(plane: ControlPlane, checkout: Path) -> None:
    # The user's shell has secrets too.
    done = plane.modal("run", "app.py", cwd=checkout, env={"PYTHONPATH": str(checkout), **PLANTED})
    assert done.code == 0, done.stdout + done.stderr


def runs(spec: FunctionSpec) -> list[str]:
    return [command for command in spec.image.commands if command.startswith("RUN")]


def installs(spec: FunctionSpec) -> list[str]:
    return [command for command in runs(spec) if "uv pip install" in command]


def test_the_gpu_image_starts_from_sglangs_by_digest_with_its_entrypoint_cleared(plane: ControlPlane) -> None:
    first, *rest = plane.functions["gpu"].image.commands
    assert first == f"FROM {SGLANG_IMAGE.reference}"
    assert "ENTRYPOINT []" in rest


def test_its_layers_go_from_what_changes_least_to_what_changes_most(plane: ControlPlane) -> None:
    commands = "\n".join(plane.functions["gpu_with_mine"].image.commands)
    marks = (
        "FROM lmsysorg",
        "ENTRYPOINT",
        "flash-attn @",
        "verl==",
        "graphviz",
        "pip freeze",
        "sympy==",
        "ENV HF_HOME",
    )
    places = [commands.index(mark) for mark in (*marks, "WORKDIR /root/drzero")]
    assert places == sorted(places)


def test_flash_attn_is_one_wheel_by_its_hash_and_nothing_is_built_from_source(plane: ControlPlane) -> None:
    spec, wheel = plane.functions["gpu"], flash_attn_wheel()
    assert wheel is not None
    (install,) = (command for command in installs(spec) if "flash-attn" in command)
    assert f"{wheel.url}#sha256={wheel.sha256}" in install
    assert not [command for command in runs(spec) if "--no-build-isolation" in command or "git+" in command]


def test_whatever_we_install_brings_nothing_else_and_never_torch(plane: ControlPlane) -> None:
    for command in installs(plane.functions["gpu"]):
        assert "--no-deps" in command
        assert not re.search(r"\b(torch|torchvision|sglang)==", command)


def test_every_pin_is_installed_once(plane: ControlPlane) -> None:
    pinned = re.findall(r"(?<![\w-])([\w-]+)==(\S+)", "\n".join(installs(plane.functions["gpu"])))
    assert sorted(pinned) == sorted(
        (name, v) for name, v in GPU_PINS.items() if name not in SGLANG_IMAGE.packages
    )


def test_the_cpu_image_has_the_same_pins_with_torchs_cpu_build_and_no_sglang(plane: ControlPlane) -> None:
    spec = plane.functions["cpu_with_mine"]
    assert spec.image.commands[0].startswith(f"FROM python:{PYTHON}")
    torch, ours, _ = installs(spec)
    assert f"torch=={SGLANG_IMAGE.packages['torch']}" in torch and "--torch-backend cpu" in torch
    pinned = re.findall(r"(?<![\w-])([\w-]+)==(\S+)", ours)
    assert dict(pinned) == {name: version for name, version in CPU_PINS.items() if name != "torch"}
    assert not [command for command in spec.image.commands if "sglang" in command or "flash-attn" in command]


def test_a_users_packages_come_after_ours_and_may_change_none_of_them(plane: ControlPlane) -> None:
    plain, mine = (plane.functions[name].image for name in ("gpu", "gpu_with_mine"))
    ours = [layer.commands for layer in plain.layers][:-2]  # but for environment and workdir
    assert [layer.commands for layer in mine.layers][: len(ours)] == ours
    (freeze,) = (command for command in mine.commands if "pip freeze" in command)
    (install,) = (command for command in mine.commands if "sympy==1.14.0" in command)
    assert f"--constraint {freeze.rpartition(' ')[2]}" in install and "--no-deps" not in install


def test_caches_are_on_the_cache_volume_and_our_code_is_importable(plane: ControlPlane) -> None:
    for name in ("gpu", "cpu_with_mine"):
        image = plane.functions[name].image
        assert image.environment["PYTHONPATH"].split(":")[0] == image.workdir == "/root/drzero"
        assert {
            image.environment[key].split("/")[1] for key in ("HF_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR")
        } == {"cache"}


def test_what_goes_along_is_what_a_run_needs_of_the_checkout(plane: ControlPlane) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *SOURCE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    sent = {path for path in plane.functions["gpu"].files if path.startswith("/root/drzero/")}
    assert {f"/root/drzero/{name}" for name in tracked if (ROOT / name).is_file()} <= sent
    assert not [path for path in sent if "/tests/" in path or "__pycache__" in path or "/outputs/" in path]


def test_no_secret_is_in_a_layer_or_goes_along(plane: ControlPlane) -> None:
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


def test_a_users_scripts_go_along_without_their_caches_and_secrets(plane: ControlPlane) -> None:
    for name in ("gpu_with_mine", "cpu_with_mine"):
        sent = {path for path in plane.functions[name].files if path.startswith("/root/extra/")}
        assert sent == {"/root/extra/tools/tool.py", "/root/extra/mine.py"}


def test_a_change_of_code_builds_nothing(plane: ControlPlane, checkout: Path) -> None:
    built = len(plane.images_built)
    with (checkout / "pipeline" / "cli.py").open("a") as file:
        file.write("# changed\n")
    _launch(plane, checkout)
    assert built and len(plane.images_built) == built


# What is refused, what stays --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extras", "told"),
    [
        (ImageExtras(pip=("torch>=2.12",)), "the image has torch==2.11.0"),
        (ImageExtras(pip=("Transformers[torch]==5.10",)), "the image has transformers==5.9.0"),
        (ImageExtras(pip=("--pre",)), "'--pre' is an option"),
        (ImageExtras(scripts=("no/such/file.py",)), "'no/such/file.py': there is no such file"),
        (ImageExtras(scripts=("/etc/ssl/.env",)), "there is no such file"),
    ],
)
def test_an_addition_that_cannot_be_is_refused_with_its_reason(extras: ImageExtras, told: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(told)):
        gpu_image(extras)


def test_a_script_that_looks_like_a_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").touch()
    with pytest.raises(LaunchError, match="looks like a secret"):
        gpu_image(ImageExtras(scripts=(str(tmp_path / ".env"),)))


def test_two_scripts_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").touch()
    with pytest.raises(LaunchError, match="have the same name"):
        gpu_image(ImageExtras(scripts=(str(tmp_path / "a" / "x.py"), str(tmp_path / "b" / "x.py"))))


@pytest.mark.parametrize(
    "name", [*SECRET_FILES, "a/.git/config", "x/__pycache__/y.pyc", "a/API_KEY", "netrc"]
)
def test_what_may_be_secret_or_is_of_no_use_stays(name: str) -> None:
    assert leave_out(Path(name))


@pytest.mark.parametrize(
    "name",
    [
        *("launch/secrets.py", "config/challenger.yaml", "models/special_tokens_map.json", "tokenizer.json"),
        *("policies/demo/adapter_model.safetensors", "verl_ext/method/chatml.jinja", "token_drift.py"),
    ],
)
def test_what_a_run_needs_goes(name: str) -> None:
    assert not leave_out(Path(name))


def test_every_package_of_the_project_goes() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {pattern.rstrip("*") for pattern in packages["include"]} <= set(SOURCE)


def test_the_client_needs_nothing_but_modal() -> None:
    script = (
        "import sys, modal; before = set(sys.modules); import launch.image;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["launch"]


def test_names_are_compared_as_indexes_do() -> None:
    assert normalised("ML_dtypes") == normalised("ml.dtypes") == "ml-dtypes"
