"""Do the images' versions agree with what the packages themselves declare? Told on a CPU, before a build.

    python -m launch.image_check                    # asks the package index for metadata; installs nothing
    python -m launch.image_check --installed gpu    # in a container: judges what is installed there (or cpu)

Of every package of the table (launch/pins.py), of SGLang, torch and this project, each demand on another
package must be met by the version that the image has, or be one of the stated overrides; and nothing may be
needed that is neither in the table nor brought by SGLang's image. The name of the flash-attn wheel must say
what the table says and what the image has. Which versions SGLang's image brings beside SGLang is known only
inside of it: demands on those are counted here and judged in the container.

Exit code 0: all agrees. 1: something does not. 2: the package index could not be asked.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from launch.demands import Finding, Package, Verdict, extra_findings, judge
from launch.pins import (
    CPU_PINS,
    GPU_PINS,
    SGLANG_IMAGE,
    BaseImage,
    FlashAttnWheel,
    flash_attn_wheel,
    normalised,
)
from launch.wheel_name import parse_wheel_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "drzero-recipes"


class IndexUnavailable(RuntimeError):
    """The package index cannot be asked."""


def check_wheel(wheel: FlashAttnWheel, base: BaseImage) -> list[Finding]:
    """Where the wheel's name, its row in the table and the image say different things."""
    said = parse_wheel_name(wheel.name)
    table = {
        "version": (wheel.version, said.version),
        "torch": (wheel.torch, said.torch),
        "CUDA": (wheel.cuda, said.cuda),
        "Python": (wheel.python, said.python),
        "platform": (base.platform, said.platform),
        # Where the name does not say it there is nothing to compare: since 2.7 torch has but one.
        "C++11 ABI": (wheel.cxx11_abi, wheel.cxx11_abi if said.cxx11_abi is None else said.cxx11_abi),
    }
    found = [
        Finding(wheel.name, f"{what} {named}", str(row))
        for what, (row, named) in table.items()
        if row != named
    ]
    if not wheel.fits(base):
        found.append(Finding(wheel.name, "another torch, CUDA, Python or ABI", base.tag))
    return found


def project() -> Package:
    """This project, as pyproject.toml declares it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return Package(PROJECT, declared["version"], tuple(declared["dependencies"]), declared["requires-python"])


_PLATFORMS = tuple(
    f"{name}_x86_64"
    for name in (*(f"manylinux_2_{glibc}" for glibc in range(39, 26, -1)), "manylinux2014", "linux")
)
"""Of the wheels that the image runs; pip does not know that a newer one stands for the older ones."""


def fetch(pins: Mapping[str, str]) -> list[Package]:
    """What those versions declare, from the configured package index; nothing is installed.

    Raises IndexUnavailable.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"),
            *("--no-deps", "--ignore-installed"),
            *("--report", str(report), "--target", folder, "--python-version", SGLANG_IMAGE.python),
            *(word for name in _PLATFORMS for word in ("--platform", name)),
            *(f"{name}=={version}" for name, version in pins.items()),
        ]
        _ask(command)
        entries = [entry["metadata"] for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]
    return [
        Package(
            normalised(entry["name"]),
            entry["version"],
            tuple(entry.get("requires_dist", ())),
            entry.get("requires_python", ""),
        )
        for entry in entries
    ]


def brought_by_sglang() -> frozenset[str]:
    """Names of all that an installation of the image's SGLang brings; raises IndexUnavailable."""
    pinned = f"sglang=={SGLANG_IMAGE.packages['sglang']}"
    command = [
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"),
        *("--python-version", SGLANG_IMAGE.python, "--python-platform", "x86_64-manylinux_2_39"),
    ]
    lines = _ask(command, stdin=pinned).splitlines()
    return frozenset(normalised(re.split(r"[\[=]", line)[0]) for line in lines if "==" in line)


def _ask(command: list[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise IndexUnavailable(f"{' '.join(command[1:4])} failed: {' '.join(said)[-500:]}")
    return done.stdout


def installed() -> tuple[list[Package], dict[str, str]]:
    """What the packages of the table declare as installed here, and the versions of all that is."""
    versions = {normalised(each.metadata["Name"]): each.version for each in metadata.distributions()}
    packages = [
        Package(
            name,
            versions[name],
            tuple(metadata.requires(name) or ()),
            str(metadata.metadata(name).json.get("requires_python", "")),
        )
        for name in sorted({*GPU_PINS, *CPU_PINS})
        if name in versions
    ]
    return packages, versions


def main(arguments: list[str]) -> int:
    """Judge, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Do the images' versions agree?")
    parser.add_argument("--installed", choices=("gpu", "cpu"), help="judge what is installed here instead")
    image = parser.parse_args(arguments).installed
    try:
        return _judge_here(image) if image else _judge_table()
    except IndexUnavailable as error:
        print(f"not checked: {error}", file=sys.stderr)
        return 2


def _judge_table() -> int:
    base = SGLANG_IMAGE
    packages = ", ".join(f"{name} {version}" for name, version in base.packages.items())
    print(f"image: {base.tag}: Python {base.python}, CUDA {base.cuda}, {packages}")
    wheel = flash_attn_wheel()
    print(f"flash-attn: {f'{wheel.name}, sha256 {wheel.sha256}' if wheel else 'no wheel fits: sdpa'}")
    wrong = check_wheel(wheel, base) if wheel else []
    fetched = [*fetch({**CPU_PINS, **GPU_PINS}), project()]
    by_sglang = brought_by_sglang()
    gpu = [package for package in fetched if package.name in {*GPU_PINS, PROJECT}]
    cpu = [package for package in fetched if package.name not in {"sglang"}]
    verdicts = {
        "GPU image": judge(gpu, GPU_PINS, by_sglang, base.python),
        # torch's CPU build declares none of CUDA's packages.
        "CPU image": judge([_without_cuda(package) for package in cpu], CPU_PINS, frozenset(), base.python),
    }
    for name, verdict in verdicts.items():
        _tell(name, verdict)
    wrong += extra_findings(
        next(each for each in gpu if each.name == "verl"), "sglang", GPU_PINS, base.python
    )
    _print_table(wrong)
    return 1 if wrong or any(verdict.errors for verdict in verdicts.values()) else 0


def _without_cuda(package: Package) -> Package:
    if package.name != "torch":
        return package
    kept = tuple(line for line in package.requires if not re.match(r"nvidia-|cuda-|triton", line))
    return Package(package.name, package.version, kept, package.requires_python)


def _judge_here(image: str) -> int:
    from verl_ext.sglang_compat import refusal

    pins = GPU_PINS if image == "gpu" else CPU_PINS
    packages, versions = installed()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    verdict = judge([*packages, project()], versions, frozenset(), python)
    wrong = [
        Finding("launch/pins.py", f"{name}=={version}", versions.get(name, "nothing"))
        for name, version in pins.items()
        # A local build tag (2.11.0+cu130) is the same release.
        if versions.get(name, "").partition("+")[0] != version
    ]
    _tell(f"{image.upper()} container", verdict)
    _print_table(wrong)
    lacks = refusal() if image == "gpu" else None
    if lacks:
        print(lacks)
    return 1 if verdict.errors or wrong or lacks else 0


def _tell(name: str, verdict: Verdict) -> None:
    errors = len(verdict.errors)
    told = f"{verdict.demands} demands, {len(verdict.findings) - errors} knowingly not met, {errors} errors"
    unknown = f"; {verdict.unknown} are on what SGLang's image brings" if verdict.unknown else ""
    print(f"{name}: {told}{unknown}")
    _print_table(verdict.findings)


def _print_table(findings: Iterable[Finding]) -> None:
    for each in findings:
        verdict = f"stated: {each.stated}" if each.stated else "ERROR"
        print(f"  {each.package:<28} wants {each.wants:<36} image has {each.has:<12} {verdict}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
