"""Start from a bundle: its files are checked, and its settings, weights and index become config values."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from drzero.agent.bundle.hub import pulled
from drzero.agent.bundle.manifest import BundleError, Manifest, check_files, read_manifest
from drzero.agent.keys import INDEX_PATHS, INDEX_SETTINGS, PLACES, answer_keys
from drzero.ops.console import say
from drzero.ops.files import publish, staging_folder
from drzero.ops.hub import HUB_ID
from drzero.recipe.indices import index_of
from search.index_info import ServedIndex, ask_index


@cache
def opened(name: str) -> tuple[Path, Manifest]:
    """A bundle's folder and manifest, checked. `name` is a folder, or OWNER/NAME on the hub."""
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        if not HUB_ID.fullmatch(name):
            raise BundleError(f"there is no bundle at {folder}: name a folder, or OWNER/NAME on the hub")
        folder = pulled(name)
    manifest = read_manifest(folder)
    say("bundle", f"checking {len(manifest.files)} files of {name}")
    check_files(folder, manifest)
    return folder, manifest


def bundle_values(name: str, typed: Mapping[str, str], *, corpus: Path, trained: bool) -> dict[str, Any]:
    """The config values of a bundle, by key. Unless `trained`, another model answers from its index."""
    folder, manifest = opened(name)
    # A stranger's bundle must not name a service that would get the questions and the token.
    strange = manifest.settings.keys() - {*answer_keys(), *INDEX_SETTINGS}
    strange |= manifest.places.keys() - {*INDEX_PATHS, "retrieval.embedder"}
    if strange:
        named = ", ".join(sorted(strange))
        raise BundleError(f"{name} sets {named}, which this version does not know: update")
    of_answers = manifest.settings.keys() & set(answer_keys())
    values = {key: value for key, value in manifest.settings.items() if trained or key not in of_answers}
    values |= _index_values(name, folder, manifest, typed, corpus)
    return values | (_model_values(name, folder, manifest, typed) if trained else {"iteration": 0})


def _model_values(name: str, folder: Path, manifest: Manifest, typed: Mapping[str, str]) -> dict[str, Any]:
    own = manifest.iteration or 0
    asked = int(typed["iteration"]) if typed.get("iteration", "").isdecimal() else own
    if asked == own:
        return {"iteration": own, "solver.model_path": str(folder)}
    if asked == 0 and HUB_ID.fullmatch(manifest.base_model):
        return {"base_model": manifest.base_model}
    raise BundleError(
        f"{name} holds the solver of iteration {own} alone: leave iteration= out, or set model="
    )


def _index_values(
    name: str, folder: Path, manifest: Manifest, typed: Mapping[str, str], corpus: Path
) -> dict[str, Any]:
    inside = {key: str(folder / place) for key, place in manifest.places.items()}
    if any(key.startswith(PLACES) for key in typed):
        kept = {key: path for key, path in inside.items() if key == "retrieval.embedder"}
        return kept | ({"index": "faiss"} if "faiss.path" in typed else {})
    if not manifest.has_index:
        raise BundleError(
            f"{name} does not hold its index ({described(manifest.index)}): name a copy of it with "
            "chroma.path=FOLDER, index=faiss faiss.path=FOLDER, or retrieval.url=http://HOST:PORT"
        )
    if "chroma.path" in inside:
        inside["chroma.path"] = str(_own_copy(folder, manifest, corpus))
    return inside


def _own_copy(folder: Path, manifest: Manifest, corpus: Path) -> Path:
    """The Chroma folder, copied once: Chroma writes into what it opens, and a bundle stays as it is."""
    names = [name for name in manifest.files if name.startswith(f"{manifest.places['chroma.path']}/")]
    told = json.dumps([[name, manifest.files[name]] for name in names])
    target = corpus / f"bundled_{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if not target.is_dir():
        say("bundle", f"copying the index to {target}")
        with staging_folder(target) as copy:
            for name in names:
                copied(folder / name, copy / Path(name).relative_to(manifest.places["chroma.path"]))
            publish(copy, target)
    return target


def copied(source: Path, target: Path) -> None:
    """Copy a file's content, not its mode: the source may be read-only."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def identity_of(config: DictConfig) -> ServedIndex:
    """The index that a config names, in its own place or behind a service. Raises StoreError or its kin."""
    if config.retrieval.url is not None:
        return ask_index(config.retrieval.url.rstrip("/"))
    index = index_of(config)
    with closing(index.open()) as store:
        info = store.info
    return ServedIndex(index.name, info.embedder, info.revision, info.version, info.documents, info.chunks)


def check_index(config: DictConfig, bundles: Iterable[str | None]) -> None:
    """Raise BundleError unless the index is the one that each of these bundles was made with."""
    found = None
    for name in filter(None, bundles):
        found = found or identity_of(config)
        wanted = opened(name)[1].index
        if found.fingerprint != wanted.fingerprint:
            raise BundleError(
                f"this index is not the one of {name}: it has {described(found)}, and the bundle was made "
                f"with {described(wanted)}. Name a copy of that index"
            )


def described(index: ServedIndex) -> str:
    """An index for a message."""
    embedder = index.embedder or "an unnamed embedder"
    return f"{index.documents:,} documents embedded by {embedder}, identity {index.fingerprint}"
