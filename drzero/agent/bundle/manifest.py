"""A bundle's manifest: what answers depend on besides the weights, and the sha256 of every file."""

from pathlib import Path, PurePosixPath

import msgspec

from drzero.ops.errors import UserError
from drzero.recipe.fingerprint import fingerprint
from search.index_info import ServedIndex

MANIFEST, CARD = "drzero-bundle.json", "README.md"
FORM = 1
"""Raise this when an older version could not open a bundle as it was meant."""
_NAMED = 3  # files in one message


class BundleError(UserError):
    """A bundle that cannot be written, opened or used as asked. The message says what to do."""


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a bundle."""

    form: int
    iteration: int | None  # of the loop that trained it; None for a model named by model=
    base_model: str  # a hub id, or a folder's name
    settings: dict[str, str | int | float | None]  # by config key
    places: dict[str, str]  # paths inside, by config key
    index: ServedIndex
    versions: dict[str, str]
    files: dict[str, str]  # sha256 (hex) by path. Not the card's: its owner may edit it.

    @property
    def has_index(self) -> bool:
        """Whether the index lies inside."""
        return bool({"chroma.path", "faiss.path"} & self.places.keys())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises BundleError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}. Make one with `drzero bundle out=…`")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as error:
        raise BundleError(f"{path} is damaged ({error}): copy the bundle again") from error
    if found.form != FORM:
        raise BundleError(f"{folder} was made by another version (form {found.form}, not {FORM}): update")
    _check_plain(path, found)
    return found


def _check_plain(path: Path, manifest: Manifest) -> None:
    """A bundle may come from anybody: its paths stay inside, and nothing in it is looked up here."""
    for inside in (*manifest.places.values(), *manifest.files):
        if PurePosixPath(inside).is_absolute() or ".." in PurePosixPath(inside).parts:
            raise BundleError(f"{path} names {inside!r}, which is not inside the bundle")
    for key, value in (manifest.settings | manifest.places).items():
        if "${" in str(value):
            raise BundleError(f"{path}: the value of {key} is no plain text")


def files_of(folder: Path) -> dict[str, str]:
    """The sha256 of every file that a manifest lists."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in found}
    return {name: fingerprint(path) for path, name in names.items() if name not in (MANIFEST, CARD)}


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise BundleError unless every file is there as it was written."""
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    if missing:
        raise BundleError(f"the bundle {folder} lacks {_listed(missing)}: copy it again, whole")
    spoiled = [name for name, sha256 in manifest.files.items() if fingerprint(folder / name) != sha256]
    if spoiled:
        raise BundleError(f"the bundle {folder} is damaged: {_listed(spoiled)} changed. Copy it again")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more files" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
