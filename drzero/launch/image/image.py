"""The two images, in layers from the one that changes least to the one that changes most.

    gpu_image(ImageExtras(pip=("sympy",), scripts=("tools/",)))     # SGLang's image and what it lacks
    cpu_image()                                                     # the same packages with torch's CPU build

Layers: base, flash-attn, our packages (drzero/launch/image/pins.py), the user's apt and pip packages,
environment. Our source and the user's scripts are not layers: Modal adds them when a container starts, so a
change of code builds nothing. A user's pip package may bring its dependencies, but may not change an
installed version: the installed versions are its constraints, and a package that conflicts with them fails
the build.

No secret gets in: `SOURCE` lists the parts of the checkout that are sent, `leave_out` keeps back any of their
files that look like a secret, and the environment has only what is written here.

Imported at the client: nothing but modal, the standard library, and light modules of ours.
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
    OF_ENVIRONMENTS_ALONE,
    OF_ENVIRONMENTS_PIP,
    SGLANG_IMAGE,
    UV,
    flash_attn_wheel,
    requirements,
)
from drzero.ops.versions import normalised, pinned

ROOT = Path(__file__).resolve().parents[3]
REMOTE = "/root/drzero"
"""The checkout in a container, and its working directory."""
EXTRA = "/root/extra"
"""The user's scripts in a container; importable."""
CACHE = "/cache"
"""The volume for the caches of hubs and package indexes."""
SOURCE = (
    *("config", "data", "drzero", "environments", "examples", "search"),
    "verl_ext",
    *("modal_train.py", "modal_search.py", "pyproject.toml", "constraints.txt", "constraints-gpu.txt"),
)
"""The parts of the checkout that a container gets."""
ENVIRONMENT = {
    "PYTHONPATH": f"{REMOTE}:{EXTRA}",
    "HF_HOME": f"{CACHE}/huggingface",
    "PIP_CACHE_DIR": f"{CACHE}/pip",
    "UV_CACHE_DIR": f"{CACHE}/uv",
}
_INSTALLED = "/root/installed.txt"
"""A list of the packages installed before the user's, in the image."""
# A download cache is useless in a layer; SGLang's image may mark its Python as externally managed.
_UV_OPTIONS = "--no-cache --break-system-packages"
_HERE = "--python $(command -v python)"
os.environ["MODAL_IMAGE_BUILDER_VERSION"] = IMAGE_BUILDER  # Modal's own setting, read when it builds


@dataclass(frozen=True)
class ImageExtras:
    """The user's additions to the images (`image:` of a run file)."""

    pip: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    """Local files and folders; relative paths start at the working directory."""
    alone: tuple[str, ...] = ()
    """Packages without what they declare that they need."""

    @classmethod
    def of(cls, image: Mapping[str, Iterable[str]]) -> "ImageExtras":
        """Those of a run file's `image`."""
        return cls(**{part: tuple(items) for part, items in image.items()})


def with_packages_of(env: str | None, extras: ImageExtras) -> ImageExtras:
    """The additions, and what an environment needs that the images do not have."""
    family = (env or "").partition(":")[0]
    pip, alone = OF_ENVIRONMENTS_PIP.get(family, ()), OF_ENVIRONMENTS_ALONE.get(family, ())
    return replace(
        extras,
        pip=(*(f"{name}=={pinned(name.partition('[')[0])}" for name in pip), *extras.pip),
        alone=(*(f"{name}=={pinned(name)}" for name in alone), *extras.alone),
    )


@functools.cache
def gpu_image(extras: ImageExtras = ImageExtras()) -> modal.Image:
    """SGLang's image with the packages that training, retrieval and the stages need in addition.

    Raises LaunchError for extras that cannot be added.
    """
    image = modal.Image.from_registry(SGLANG_IMAGE.reference).entrypoint([])
    wheel = flash_attn_wheel()
    if wheel is not None:
        # uv refuses a file with another hash.
        image = _install(image, f"flash-attn @ {wheel.url}#sha256={wheel.sha256}")
        # Its flash_attn/cute is older than that of SGLang's flash-attn-4, which goes over it again.
        again = f"xargs -r /.uv/uv pip install {_HERE} --no-deps {_UV_OPTIONS} --reinstall"
        image = image.run_commands(f"/.uv/uv pip freeze {_HERE} | grep '^flash-attn-4=' | {again}")
    image = _install(image, *requirements((*ADDED, *GPU_ONLY, *DATA_ONLY)))
    return _finished(image, extras)


@functools.cache
def cpu_image(extras: ImageExtras = ImageExtras()) -> modal.Image:
    """The same packages without SGLang and CUDA, for everything that needs no GPU.

    Raises LaunchError for extras that cannot be added.
    """
    image = modal.Image.debian_slim(SGLANG_IMAGE.python)
    image = _install(image, f"torch=={pinned('torch', gpu=True)}", options="--torch-backend cpu")
    rest = tuple(package for package in BROUGHT if package != "torch")
    image = _install(image, *requirements((*ADDED, *DATA_ONLY, *rest)))
    return _finished(image, extras)


def _install(image: modal.Image, *packages: str, options: str = "") -> modal.Image:
    """A layer of exactly these packages: with `--no-deps` it cannot replace anything else, not even torch."""
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
    # After the packages: the cache volume is not mounted while an image is built.
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
    """Each script and its path in a container."""
    # A container runs the same code, but does not have the client's files.
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
    """Whether a file or folder, by its path below an added folder, is not sent: caches, outputs, secrets.

    Names that begin with a dot are left out (.env, .git, .venv), and so are key files and names with secret,
    credentials, token or password in them. Python files are code, whatever their name.
    """
    for name in path.parts:
        suffix = Path(name).suffix.lower()
        if name.startswith(".") or name.lower() in _LEFT_OUT_NAMES or suffix in _LEFT_OUT_SUFFIXES:
            return True
        if suffix != ".py" and _SECRET_NAME.search(name.lower()):
            return True
    return False
