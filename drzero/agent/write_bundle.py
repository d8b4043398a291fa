"""`drzero bundle`: the trained agent as one folder, to move, to publish, and to ask on another machine.

    drzero bundle out=my-agent                         # the last iteration's weights, its settings, a card
    drzero bundle out=my-agent with_index=true         # its index too, so that it needs nothing else
    drzero bundle out=my-agent licence=apache-2.0 corpus_licence=cc-by-4.0 push=OWNER/NAME
    drzero ask bundle=my-agent "Who founded Orrin?"    # there

README.md is a model card with the evaluations' own figures. A rerun replaces the bundle.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath

import msgspec
from omegaconf import DictConfig, OmegaConf

from drzero.agent.bundle.hub import check_push, push
from drzero.agent.bundle.manifest import CARD, FORM, MANIFEST, BundleError, Manifest, files_of
from drzero.agent.bundle.opening import copied, described, identity_of
from drzero.agent.card.card import write_card
from drzero.agent.compose import compose_agent
from drzero.agent.keys import INDEX_SETTINGS, answer_keys
from drzero.checkpoints.weights import model_folder
from drzero.ops.console import say, set_verbose
from drzero.ops.files import publish, recover, staging_folder
from drzero.ops.hub import HUB_ID
from drzero.ops.versions import installed_versions
from drzero.preflight.models import wanted_files
from drzero.preflight.run import require
from drzero.recipe.compose import resolve
from drzero.recipe.indices import index_of
from search.chroma.location import connect
from search.chroma.sharded_store import ChromaIndex
from search.chroma.store import collection_names
from search.faiss.location import find_files

_MARGIN_BYTES = 16 * 2**20  # the card, the manifest, and what a file system adds

Copies = dict[str, Path]
"""Files to copy, by their path in the bundle."""


def run_bundle(arguments: Sequence[str]) -> None:
    """Write the bundle, and push it if asked. Raises BundleError, PreflightFailed or OverrideError."""
    config = compose_agent("bundle", arguments)
    set_verbose(config.verbose)
    target = _target(config)
    if config.push:
        check_push(config.push)
    require(config, "bundle")
    config = resolve(config)
    recover(target)
    model = model_folder(config.solver.model_path)
    copies = {name: model / name for name in wanted_files([path.name for path in model.iterdir()])}
    places = dict[str, str]()
    if config.with_index:
        inside, places = _index(config)
        copies |= inside
    _check_room(target, copies)
    with staging_folder(target) as folder:
        for name, source in copies.items():
            copied(source, folder / name)
        manifest = _manifest(config, places, files_of(folder))
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        write_card(folder / CARD, config, manifest, model)
        publish(folder, target)
    size = sum((target / name).stat().st_size for name in manifest.files)
    say("bundle", f"{target}: {len(manifest.files)} files, {size / 1e9:.2f} GB, {described(manifest.index)}")
    if config.push:
        push(target, config.push)


def _target(config: DictConfig) -> Path:
    if OmegaConf.is_missing(config, "out"):
        raise BundleError("out: name the folder to write, out=FOLDER")
    target = Path(config.out).expanduser().absolute()
    is_other = target.exists() and not (
        target.is_dir() and ((target / MANIFEST).is_file() or not any(target.iterdir()))
    )
    if is_other:
        raise BundleError(
            f"out: {target} exists and is no bundle (it has no {MANIFEST}): name another folder"
        )
    return target


def _index(config: DictConfig) -> tuple[Copies, dict[str, str]]:
    """The index's files and places, and the embedder's if it is a folder."""
    if config.retrieval.url is not None or index_of(config).folder is None:
        raise BundleError("with_index: the index is a server's or in several places: leave with_index out")
    copies, places = _chroma(config) if config.index == "chroma" else _faiss(config)
    embedder = Path(config.retrieval.embedder)
    if embedder.is_dir():
        place = f"embedder/{embedder.absolute().name}"
        places["retrieval.embedder"] = place
        copies |= _below(embedder, place)
    return copies, places


def _chroma(config: DictConfig) -> tuple[Copies, dict[str, str]]:
    index = index_of(config)
    assert isinstance(index, ChromaIndex) and index.folder
    for place, name in index.each():
        with connect(place) as client:
            others = [other for other in collection_names(client) if other != name]
        if others:
            raise BundleError(
                f"with_index: {place} also holds {', '.join(others)}, which the bundle would carry along: "
                "index this corpus into a separate folder (chroma.path=), or leave with_index out"
            )
    return _below(index.folder, "index"), {"chroma.path": "index"}


def _faiss(config: DictConfig) -> tuple[Copies, dict[str, str]]:
    files = find_files(config.faiss.path, config.faiss.corpus)
    paths = [files.index, files.corpus, *([files.record] if files.record.is_file() else [])]
    places = {"faiss.path": f"index/{files.index.name}", "faiss.corpus": f"index/{files.corpus.name}"}
    return {f"index/{path.name}": path for path in paths}, places


def _below(folder: Path, place: str) -> Copies:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lines")
    return {f"{place}/{path.relative_to(folder).as_posix()}": path for path in found}


def _manifest(config: DictConfig, places: dict[str, str], files: dict[str, str]) -> Manifest:
    settings = {key: OmegaConf.select(config, key) for key in (*answer_keys(), *INDEX_SETTINGS)}
    if Path(config.retrieval.embedder).is_dir():  # elsewhere it is another folder
        del settings["retrieval.embedder"]
    return Manifest(
        form=FORM,
        iteration=config.iteration or None,
        base_model=shown_model(config.base_model),
        settings=settings,
        places=places,
        index=identity_of(config),
        versions=installed_versions(),
        files=files,
    )


def shown_model(model: str) -> str:
    """A hub id, or the name of a folder without its place."""
    return model if HUB_ID.fullmatch(model) and not Path(model).exists() else PurePath(model).name


def _check_room(target: Path, copies: Copies) -> None:
    place = next(path for path in target.parents if path.exists())
    needed = sum(path.stat().st_size for path in copies.values()) + _MARGIN_BYTES
    if (free := shutil.disk_usage(place).free) < needed:
        raise BundleError(
            f"out: {place} has {free / 1e9:.2f} GB free and the bundle takes {needed / 1e9:.2f}: make room, "
            "or name another folder"
        )
