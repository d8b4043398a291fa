"""What the file name of a flash-attn wheel says that it was built for.

parse_wheel_name("flash_attn-2.8.3+cu12torch2.9cxx11abiTRUE-cp312-cp312-linux_x86_64.whl").torch    # "2.9"
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.utils import InvalidWheelFilename, parse_wheel_filename


@dataclass(frozen=True)
class WheelName:
    """What the name of a flash-attn wheel says it was built for."""

    version: str
    cuda: str
    """Major, or major and minor."""
    torch: str
    """Major and minor."""
    cxx11_abi: bool | None
    """None where the name does not say."""
    python: str
    platform: str


_BUILD = re.compile(r"cu(?P<cuda>\d{2,3})torch(?P<torch>\d+\.\d+)(?:cxx11abi(?P<abi>true|false))?")


def parse_wheel_name(name: str) -> WheelName:
    """Read a wheel's file name; raises ValueError for one that does not say what it is built for."""
    try:
        _, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename as error:
        raise ValueError(f"{name!r} is not the name of a wheel: {error}") from None
    build = _BUILD.fullmatch(version.local or "")
    if build is None or len(tags) != 1:
        raise ValueError(f"{name!r} does not say one torch, CUDA, Python and platform that it is built for")
    tag = next(iter(tags))
    interpreter = re.fullmatch(r"cp(\d)(\d+)", tag.interpreter)
    if interpreter is None:
        raise ValueError(f"{name!r} is not for one version of CPython, but for {tag.interpreter!r}")
    cuda = build["cuda"]
    return WheelName(
        version=version.public,
        cuda=f"{cuda[:2]}.{cuda[2]}" if len(cuda) == 3 else cuda,
        torch=build["torch"],
        cxx11_abi={"true": True, "false": False, None: None}[build["abi"]],
        python=".".join(interpreter.groups()),
        platform=tag.platform,
    )
