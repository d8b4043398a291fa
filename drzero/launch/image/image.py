"""The two images, in layers from the one that changes least to the one that changes most.

Modal adds our source and the user's scripts when a container starts, so a code change builds nothing. A
user's package that would change an installed version fails the build. No secret gets in (`leave_out`). The
client imports this module: only modal, the standard library and light modules of ours.
"""

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import modal

from drzero.launch.errors import LaunchError
from drzero.launch.image.pins import (
    ADDED,
    BROUGHT,
    DATA_ONLY,
    GPU_ONLY,
    GPU_PINS,
    IMAGE_BUILDER,
    OF_AGENTS_PIP,
    OF_ENVIRONMENTS_ALONE,
    OF_ENVIRONMENTS_PIP,
    SGLANG_IMAGE,
    UV,
    flash_attn_wheel,
    requirements,
)
from drzero.ops.versions import normalised, pinned

ROOT = Path(__file__).resolve().parents[3]
REMOTE = "/root/drzero"  # the checkout in a container
EXTRA = "/root/extra"  # the user's scripts in a container
CACHE = "/cache"
_FOLDERS = ("config", "data", "drzero", "environments", "examples", "search", "verl_ext")
_APPS = ("modal_train.py", "modal_search.py", "modal_agent.py")
_FILES = (*_APPS, "pyproject.toml", "constraints.txt", "constraints-gpu.txt")
SOURCE = (*_FOLDERS, *_FILES)  # the parts of the checkout a container gets
ENVIRONMENT = {
    "PYTHONPATH": f"{REMOTE}:{EXTRA}",
    "HF_HOME": f"{CACHE}/huggingface",
    "PIP_CACHE_DIR": f"{CACHE}/pip",
    "UV_CACHE_DIR": f"{CACHE}/uv",
    # flashinfer compiles its kernels at a first start, which takes two minutes of every GPU.
    "FLASHINFER_WORKSPACE_BASE": f"{CACHE}/flashinfer",
}
_INSTALLED = "/root/installed.txt"  # the packages before the user's
# A layer has no use for a download cache. SGLang's image may mark its Python as externally managed.
_UV_OPTIONS = "--no-cache --break-system-packages"
_HERE = "--python $(command -v python)"
os.environ["MODAL_IMAGE_BUILDER_VERSION"] = IMAGE_BUILDER  # Modal's own setting, read when it builds


@dataclass(frozen=True)
class ImageExtras:
    """Additions to the images (`image:` of a run file)."""

    pip: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()  # packages installed without their dependencies

    @classmethod
    def of(cls, image: Mapping[str, Iterable[str]]) -> "ImageExtras":
        """The additions in a run file's `image`."""
        return cls(**{part: tuple(items) for part, items in image.items()})


def with_packages_of(env: str | None, extras: ImageExtras) -> ImageExtras:
    """The additions, plus the packages an environment needs."""
    family = (env or "").partition(":")[0]
    pip, alone = OF_ENVIRONMENTS_PIP.get(family, ()), OF_ENVIRONMENTS_ALONE.get(family, ())
    of_agents = OF_AGENTS_PIP if family == "agent" else ()
    return replace(
        extras,
        pip=(*of_agents, *(f"{name}=={pinned(name.partition('[')[0])}" for name in pip), *extras.pip),
        alone=(*(f"{name}=={pinned(name)}" for name in alone), *extras.alone),
    )


@functools.cache
def gpu_image(extras: ImageExtras = ImageExtras()) -> modal.Image:
    """SGLang's image plus our packages. Raises LaunchError for extras that cannot be added."""
    image = modal.Image.from_registry(SGLANG_IMAGE.reference).entrypoint([])
    wheel = flash_attn_wheel()
    if wheel is not None:
        # uv refuses a file with another hash.
        image = _install(image, f"flash-attn @ {wheel.url}#sha256={wheel.sha256}")
        # It overwrites flash_attn/cute of SGLang's flash-attn-4 with an older one: put that back.
        again = f"xargs -r /.uv/uv pip install {_HERE} --no-deps {_UV_OPTIONS} --reinstall"
        image = image.run_commands(f"/.uv/uv pip freeze {_HERE} | grep '^flash-attn-4=' | {again}")
    image = _install(image, *requirements((*ADDED, *GPU_ONLY, *DATA_ONLY)))
    return _finished(image, extras)


@functools.cache
def cpu_image(extras: ImageExtras = ImageExtras()) -> modal.Image:
    """The same packages without SGLang and CUDA. Raises LaunchError for extras that cannot be added."""
    image = modal.Image.debian_slim(SGLANG_IMAGE.python)
    image = _install(image, f"torch=={pinned('torch', gpu=True)}", options="--torch-backend cpu")
    rest = tuple(package for package in BROUGHT if package != "torch")
    image = _install(image, *requirements((*ADDED, *DATA_ONLY, *rest)))
    return _finished(image, extras)


def _install(image: modal.Image, *packages: str, options: str = "") -> modal.Image:
    options = f"--no-deps {_UV_OPTIONS} {options}".strip()
    return image.uv_pip_install(*packages, extra_options=options, uv_version=UV)


def _finished(image: modal.Image, extras: ImageExtras) -> modal.Image:
    image = image.apt_install(*extras.apt)
    if extras.alone:
        image = _install(image, *extras.alone)
    for package in extras.pip:
        if package.startswith("-"):
            raise LaunchError(f"image.pip: {package!r} is an option, not a package; write name==version")
        name = normalised(re.split(r"[\[<>=!~;@ ]", package, maxsplit=1)[0])
        if name in GPU_PINS and package != f"{name}=={GPU_PINS[name]}":
            raise LaunchError(
                f"image.pip: {package!r}: the image has {name}=={GPU_PINS[name]}, which its other "
                "packages need; leave it out, or change drzero/launch/image/pins.py and run "
                "python -m drzero.launch.image.check"
            )
    if extras.pip:
        freeze = f"/.uv/uv pip freeze {_HERE} --exclude-editable"
        image = image.run_commands(f"{freeze} | grep == > {_INSTALLED}").uv_pip_install(
            *extras.pip, extra_options=f"--constraint {_INSTALLED} {_UV_OPTIONS}", uv_version=UV
        )
    # After the packages, since the cache volume is not mounted during a build.
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


def _scripts(scripts: tuple[str, ...]) -> list[tuple[Path, str]]:
    # A container runs this too, without the client's files.
    if not modal.is_local():
        return []
    places: dict[str, Path] = {}
    for script in scripts:
        path = Path(script).expanduser().resolve()
        if not path.exists():
            raise LaunchError(f"image.scripts: {script!r}: no such file or folder")
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
    """Whether a path stays here: dotfiles, caches, outputs, keys, `hf_token.txt`. Python files are code."""
    for name in path.parts:
        suffix = Path(name).suffix.lower()
        if name.startswith(".") or name.lower() in _LEFT_OUT_NAMES or suffix in _LEFT_OUT_SUFFIXES:
            return True
        if suffix != ".py" and _SECRET_NAME.search(name.lower()):
            return True
    return False
