"""Do the images' versions meet the packages' own requirements? uv answers on a CPU, before a build.

    python -m drzero.launch.image.check                  # asks the package index; installs nothing
    python -m drzero.launch.image.check --installed gpu  # in a container (gpu or cpu): runs `uv pip check`

The images install with `--no-deps`, so everything resolved must be pinned or come with SGLang's image. Exit
code 0: all agrees. 1: something does not. 2: the package index cannot be reached.
"""

import argparse
import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from drzero.launch.image.pins import (
    ADDED,
    CPU_PINS,
    DATA_ONLY,
    GPU_ONLY,
    GPU_PINS,
    OVERRIDES,
    SGLANG_IMAGE,
    flash_attn_wheel,
)
from drzero.ops.errors import RunFailed, UserError
from drzero.ops.versions import normalised

PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
_PLATFORM = "x86_64-manylinux_2_39"
_UV_IN_IMAGE = Path("/.uv/uv")
_CUDA = re.compile(r"nvidia-|cuda-|triton")  # only torch's CUDA build requires these
_INCOMPATIBLE = re.compile(r"The package `(?P<package>.+?)` requires `?(?P<wants>.+?)`?, but (?P<has>.+)")


class VersionConflict(RunFailed):
    """Pinned versions contradict each other. The message has the resolver's explanation."""


def resolve(
    pins: Mapping[str, str], overrides: Mapping[str, str] | None = None, project: Path | None = PROJECT
) -> dict[str, str]:
    """Versions of pins and all their requirements. Raises VersionConflict, or UserError without the index."""
    with tempfile.TemporaryDirectory() as folder:
        override = Path(folder) / "overrides.txt"
        override.write_text(_lines(overrides or {}), encoding="utf-8")
        command = [*_uv(), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        # Without --python, uv would download the images' Python.
        command += ["--python", sys.executable]
        command += ["--python-version", SGLANG_IMAGE.python, "--python-platform", _PLATFORM]
        command += ["--override", str(override), "-", *([str(project)] if project else [])]
        done = subprocess.run(command, input=_lines(pins), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip()
        if done.returncode != 1 or "Packages were unavailable" in reason:
            raise UserError(f"not checked: {reason}")
        raise VersionConflict(f"ERROR: {reason}")
    pairs = (line.partition("==") for line in done.stdout.split("\n") if "==" in line)
    return {normalised(name.partition("[")[0]): version.strip() for name, _, version in pairs}


def _lines(versions: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def _uv() -> list[str]:
    return [str(_UV_IN_IMAGE)] if _UV_IN_IMAGE.is_file() else [sys.executable, "-m", "uv"]


def check_cpu_pins(pins: Mapping[str, str] = CPU_PINS, project: Path | None = PROJECT) -> list[str]:
    """Faults of the CPU pins, to which no override applies. Raises as `resolve` does."""
    wanted = _without_data_only(pins)
    missing = resolve(wanted, project=project).keys() - wanted.keys()
    return _missing("CPU", (name for name in missing if not _CUDA.match(name)))


def check_gpu_pins(pins: Mapping[str, str] = GPU_PINS, project: Path | None = PROJECT) -> list[str]:
    """Faults of the GPU pins and the stated overrides. Raises as `resolve` does."""
    by_sglang = resolve({"sglang": pins["sglang"]}, project=None)
    problems = [
        f"stated override of {each.by}'s {each.package}{each.instead_of}: {each.by} no longer requires that"
        for each in OVERRIDES
        if not SpecifierSet(each.instead_of).contains(by_sglang.get(each.package, "0"))
    ]
    wanted = _without_data_only(pins)
    resolved = resolve(wanted, {each.package: each.version for each in OVERRIDES}, project)
    problems += [
        f"GPU image: {name} is pinned to {version}, and {resolved[name]} is stated in OVERRIDES"
        for name, version in wanted.items()
        if resolved[name] != version
    ]
    return problems + _missing("GPU", resolved.keys() - wanted.keys() - by_sglang.keys())


def _without_data_only(pins: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in pins.items() if name not in DATA_ONLY}


def _missing(image: str, names: Iterable[str]) -> list[str]:
    return [f"{image} image: {name} is required and neither pinned nor in SGLang's image" for name in names]


def check_installed(image: str) -> list[str]:
    """The faults of the packages in this container, whose image is `gpu` or `cpu`."""
    from verl_ext.sglang.compat import refusal

    pins = GPU_PINS if image == "gpu" else CPU_PINS
    versions = imported_versions()
    problems = [
        f"drzero/launch/image/pins.py wants {name}=={version}, installed is {versions.get(name, 'nothing')}"
        for name, version in pins.items()
        # A local build tag (2.11.0+cu130) is the same release.
        if versions.get(name, "").partition("+")[0] != version
    ]
    for line in tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]:
        wants = Requirement(line)
        has = versions.get(normalised(wants.name))
        if has is None or not wants.specifier.contains(has, prereleases=True):
            problems.append(f"this project wants {line}, installed is {has or 'nothing'}")
    command = [*_uv(), "pip", "check", "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    problems += incompatible((done.stdout + done.stderr).split("\n"), versions)
    if image == "gpu":
        problems += [*overwritten("flash-attn-4"), *filter(None, [refusal()])]
    return problems


def imported_versions(path: Sequence[str] = sys.path) -> dict[str, str]:
    """The version that Python imports, the first on the path."""
    versions: dict[str, str] = {}
    for each in metadata.distributions(path=list(path)):
        versions.setdefault(normalised(each.metadata["Name"] or ""), each.version)
    return versions


def overwritten(package: str, path: Sequence[str] = sys.path) -> list[str]:
    """One line if another package has overwritten files of this one."""
    found = next(iter(metadata.distributions(name=package, path=list(path))), None)
    if found is None:
        return [f"{package} is not installed"]
    wrong = [str(file) for file in found.files or () if file.hash and _sha256(file) != file.hash.value]
    if not wrong:
        return []
    return [
        f"{len(wrong)} files of {package} {found.version} were overwritten by another package "
        f"({wrong[0]}, …): install it again after that one"
    ]


def _sha256(file: metadata.PackagePath) -> str:
    if not (path := Path(str(file.locate()))).is_file():
        return ""
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")


def incompatible(lines: Iterable[str], versions: Mapping[str, str]) -> list[str]:
    """The lines of `uv pip check` about our packages that are not accepted."""
    found = (match for line in lines if (match := _INCOMPATIBLE.match(line)))
    ours = [match for match in found if match["package"] in {*GPU_PINS, *CPU_PINS}]
    return [match[0] for match in ours if not _is_accepted(match, versions)]


def _is_accepted(match: re.Match[str], versions: Mapping[str, str]) -> bool:
    package = match["package"]
    if match["wants"].startswith("Python"):
        return False
    if package in DATA_ONLY:  # nothing we import of it needs them
        return True
    wants = Requirement(match["wants"])
    name = normalised(wants.name)
    stated = (package, name, str(wants.specifier), versions.get(name))
    if stated in {(each.by, each.package, each.instead_of, each.version) for each in OVERRIDES}:
        return True
    if name not in versions:
        # SGLang's image has what SGLang needs.
        return package in SGLANG_IMAGE.packages
    # Combinations of SGLang's own image that we did not change.
    return package in SGLANG_IMAGE.packages and name not in (*ADDED, *GPU_ONLY)


def main(arguments: list[str]) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Do the images' versions agree?")
    parser.add_argument("--installed", choices=("gpu", "cpu"), help="check what is installed here instead")
    image = parser.parse_args(arguments).installed
    if not image:
        base, wheel = SGLANG_IMAGE, flash_attn_wheel()
        packages = ", ".join(f"{name} {version}" for name, version in base.packages.items())
        print(f"image: {base.tag}: Python {base.python}, CUDA {base.cuda}, {packages}")
        print(f"flash-attn: {f'{wheel.name}, sha256 {wheel.sha256}' if wheel else 'no wheel fits: sdpa'}")
        for each in OVERRIDES:
            print(f"stated: {each.by} wants {each.package}{each.instead_of}, has {each.version}: {each.why}")
    try:
        problems = check_installed(image) if image else [*check_cpu_pins(), *check_gpu_pins()]
    except (UserError, VersionConflict) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for problem in problems:
        print(f"ERROR {problem}")
    print(f"{f'{image.upper()} container' if image else 'images'}: {len(problems)} errors")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
