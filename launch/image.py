"""The two images, in layers from the one that changes least to the one that changes most.

    gpu_image(ImageExtras(pip=("sympy",), scripts=("tools/",)))     # SGLang's image and what it lacks
    cpu_image()                                                     # the same packages with torch's CPU build

Layers: base, flash-attn, our packages (launch/pins.py), the user's apt and pip packages, environment. Our
source and the user's scripts are not layers at all: Modal adds them when a container starts, so a change of
code builds nothing. A user's pip package may bring what it needs, but nothing that is already there may
change: what is installed is its constraint, and a package that cannot live with that fails the build.

No secret can get in: `SOURCE` says which parts of the checkout go, and of these `leave_out` keeps back
whatever looks like one; the environment has only what is written here.

Read at the client: nothing is imported but modal and the standard library.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import modal

from launch.errors import LaunchError
from launch.pins import (
    ADDED,
    BROUGHT,
    DATA_ONLY,
    GPU_PINS,
    SGLANG_IMAGE,
    UV,
    flash_attn_wheel,
    normalised,
    requirements,
    version_of,
)

ROOT = Path(__file__).resolve().parent.parent
REMOTE = "/root/drzero"
"""Where a container has the checkout, and where it starts."""
EXTRA = "/root/extra"
"""Where a container has the user's scripts; importable."""
CACHE = "/cache"
"""The volume for what hubs and package indexes give."""
SOURCE = (
    *("config", "data", "launch", "ops", "pipeline", "policies", "search", "verl_ext"),
    *("modal_train.py", "pyproject.toml", "constraints.txt"),
)
"""What of the checkout a container gets."""
ENVIRONMENT = {
    "PYTHONPATH": f"{REMOTE}:{EXTRA}",
    "HF_HOME": f"{CACHE}/huggingface",
    "PIP_CACHE_DIR": f"{CACHE}/pip",
    "UV_CACHE_DIR": f"{CACHE}/uv",
}
_INSTALLED = "/root/installed.txt"
"""In the image: what is in it before the user's packages."""
# What was downloaded is of no use in a layer; SGLang's image may mark its Python as the system's.
_UV_OPTIONS = "--no-cache --break-system-packages"


@dataclass(frozen=True)
class ImageExtras:
    """What a user adds to the images (`image:` of a run file)."""

    pip: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    """Local files and folders, by paths from where the command is given."""


@functools.cache
def gpu_image(extras: ImageExtras = ImageExtras()) -> modal.Image:
    """SGLang's image with what training, retrieval and the stages need on top of it.

    Raises LaunchError for extras that cannot be added.
    """
    image = modal.Image.from_registry(SGLANG_IMAGE.reference).entrypoint([])
    wheel = flash_attn_wheel()
    if wheel is not None:
        # uv compares the hash and refuses another file.
        image = _install(image, f"flash-attn @ {wheel.url}#sha256={wheel.sha256}")
    image = _install(image, *requirements((*ADDED, *DATA_ONLY)))
    return _finished(image, extras)


@functools.cache
def cpu_image(extras: ImageExtras = ImageExtras()) -> modal.Image:
    """The same packages without SGLang and CUDA, for all that needs no GPU.

    Raises LaunchError for extras that cannot be added.
    """
    image = modal.Image.debian_slim(SGLANG_IMAGE.python)
    image = _install(image, f"torch=={version_of('torch')}", options="--torch-backend cpu")
    rest = tuple(package for package in BROUGHT if package != "torch")
    image = _install(image, *requirements((*ADDED, *DATA_ONLY, *rest)))
    return _finished(image, extras)


def _install(image: modal.Image, *packages: str, options: str = "") -> modal.Image:
    """A layer of exactly these packages: with `--no-deps` nothing else can be replaced, not even torch."""
    options = f"--no-deps {_UV_OPTIONS} {options}".strip()
    return image.uv_pip_install(*packages, extra_options=options, uv_version=UV)


def _finished(image: modal.Image, extras: ImageExtras) -> modal.Image:
    image = image.apt_install(*extras.apt)
    if extras.pip:
        _check_pip(extras.pip)
        freeze = "/.uv/uv pip freeze --python $(command -v python) --exclude-editable"
        image = image.run_commands(f"{freeze} | grep == > {_INSTALLED}").uv_pip_install(
            *extras.pip, extra_options=f"--constraint {_INSTALLED} {_UV_OPTIONS}", uv_version=UV
        )
    # After the packages: caches on a volume are not there while an image is built.
    image = image.env(ENVIRONMENT).workdir(REMOTE)
    for name in SOURCE:
        image = _add(image, ROOT / name, f"{REMOTE}/{name}")
    for path, remote in _scripts(extras.scripts):
        image = _add(image, path, remote)
    return image


def _add(image: modal.Image, path: Path, remote: str) -> modal.Image:
    if path.is_dir():
        return image.add_local_dir(path, remote, ignore=leave_out)
    return image.add_local_file(path, remote)


def _check_pip(packages: tuple[str, ...]) -> None:
    for package in packages:
        if package.startswith("-"):
            raise LaunchError(f"image.pip: {package!r} is an option, not a package; write name==version")
        name = normalised(re.split(r"[\[<>=!~;@ ]", package, maxsplit=1)[0])
        if name in GPU_PINS and package != f"{name}=={GPU_PINS[name]}":
            raise LaunchError(
                f"image.pip: {package!r}: the image has {name}=={GPU_PINS[name]}, which the rest of it is "
                "made for; leave it out, or change launch/pins.py and ask python -m launch.image_check"
            )


def _scripts(scripts: tuple[str, ...]) -> list[tuple[Path, str]]:
    """Each script and where a container has it."""
    # A container reads the same code, without the files that the client has added to it.
    if not modal.is_local():
        return []
    places: dict[str, Path] = {}
    for script in scripts:
        path = Path(script).expanduser().resolve()
        if not path.exists():
            raise LaunchError(f"image.scripts: {script!r}: there is no such file or folder")
        if leave_out(Path(path.name)):
            raise LaunchError(f"image.scripts: {script!r} looks like a secret; pass it as a Modal secret")
        if path.name in places:
            raise LaunchError(f"image.scripts: {script!r} and {str(places[path.name])!r} have the same name")
        places[path.name] = path
    return [(path, f"{EXTRA}/{name}") for name, path in places.items()]


_LEFT_OUT_NAMES = frozenset(
    {"__pycache__", "outputs", "wandb", "node_modules", "venv", "netrc", "kaggle.json"}
)
_LEFT_OUT_SUFFIXES = frozenset({".pyc", ".pem", ".key", ".p12", ".pfx", ".jks", ".kdbx", ".ppk", ".egg-info"})
_SECRET_NAME = re.compile(
    r"(^|[._-])(secrets?|credentials?|token|passw(or)?d|api[_-]?key|private[_-]?key|service[_-]?account)([._-]|$)"
    r"|^id_(rsa|dsa|ecdsa|ed25519)"
)


def leave_out(path: Path) -> bool:
    """Whether a file or folder, relative to what is added, stays here: caches, outputs, what may be secret.

    Whatever begins with a dot is left out (.env, .git, .venv), and so are key files and names that say
    secret, credentials, token or password. Python files are code, whatever they are called.
    """
    return any(_leave_out_name(part) for part in path.parts)


def _leave_out_name(name: str) -> bool:
    suffix = Path(name).suffix.lower()
    if name.startswith(".") or name.lower() in _LEFT_OUT_NAMES or suffix in _LEFT_OUT_SUFFIXES:
        return True
    return suffix != ".py" and bool(_SECRET_NAME.search(name.lower()))
