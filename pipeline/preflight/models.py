"""Checks that models exist locally or on the hub, are complete, fit the disk and can hold conversations."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open

from pipeline.preflight.context import CheckContext
from pipeline.preflight.finding import Finding, error, note, warning
from pipeline.preflight.model_shape import model_config
from pipeline.preflight.tokenizers import load_tokenizer, token_drift
from search.embedders import PACKAGED_EMBEDDER
from verl_ext.checkpoints import saved_step

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Hub organisations whose models require a signed licence; the hub shows no more without a token.
_GATED = re.compile(r"(meta-llama|google/gemma|mistralai)", re.IGNORECASE)


def check_models(ctx: CheckContext) -> Iterator[Finding]:
    """Every model of the stage must be a complete folder, in the hub's cache, or on the hub."""
    seen: set[str] = set()
    for key, model in ctx.models().items():
        if model in seen:
            continue
        seen.add(model)
        if ctx.is_to_come(model) or not _is_visible(ctx, model):
            continue
        is_run = ctx.stage == "synthesize" and key == "challenger" and saved_step(Path(model))
        if is_run:  # its checkpoint is merged first
            continue
        folder = Path(model)
        if folder.is_dir():
            yield from _folder(ctx, key, folder)
        elif folder.is_absolute():
            yield _missing(ctx, key, folder)
        elif is_offline() and HUB_ID.fullmatch(model) and model_config(model) is None:
            yield from _not_cached_offline(ctx, key, model)
        else:
            if HUB_ID.fullmatch(model) and not folder.exists() and not _has_weights(model):
                yield from _download(ctx, key, model)
            yield from _conversation(ctx, key, model)


def _has_weights(model: str) -> bool:
    """Whether the weights of a hub id, or the index of their files, are in the local cache."""
    return any(isinstance(try_to_load_from_cache(model, name), str) for name in (_WHOLE, _INDEX))


def _download(ctx: CheckContext, key: str, model: str) -> Iterator[Finding]:
    """A note on the download and its size, if known, and a warning if there is no room for it."""
    shape = ctx.shape(model)
    if shape is None or ctx.stage == "prepare_data":  # it needs only the tokenizer
        return
    size = 2 * shape.parameters
    yield note(key, model, f"the weights are downloaded first, about {size / 1e9:.0f} GB")
    yield from _room(ctx, key, model, size)


def _missing(ctx: CheckContext, key: str, folder: Path) -> Finding:
    made_by = "download it first. The demo's models come with `drzero demo-data`"
    if exported := re.fullmatch(r"(solver|challenger)_iter(\d+)_hf", folder.name):
        stage = "merge" if exported[1] == "solver" else "challenger"
        made_by = f"make it with `drzero {stage} iteration={exported[2]}`, or name another"
    return error(
        key,
        folder,
        f"there is no model at {folder}, neither a folder nor on a reachable hub",
        f"correct it, or {made_by}",
    )


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids access to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _is_visible(ctx: CheckContext, model: str) -> bool:
    """Whether a model can be checked from here: not a folder on another machine's volume."""
    return ctx.sees("corpus") or not Path(model).is_absolute()


def _folder(ctx: CheckContext, key: str, folder: Path) -> Iterator[Finding]:
    try:
        config = model_config(str(folder))
    except ValueError as reason:
        yield error(
            key,
            folder,
            f"config.json in {folder} is not JSON ({reason})",
            "download or export the model again",
        )
        return
    if config is None:
        yield error(
            key,
            folder,
            f"{folder} has no config.json, so it is no model folder",
            "name the folder of a model",
        )
        return
    if ctx.stage != "prepare_data":  # it needs only the tokenizer
        yield from _weights(key, folder)
    yield from _conversation(ctx, key, str(folder))


def _weights(key: str, folder: Path) -> Iterator[Finding]:
    """Check weights for completeness by their index and the header of every file; nothing is loaded."""
    names = {path.name for path in folder.glob("*.safetensors")}
    if (folder / _INDEX).is_file():
        wanted = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(wanted - names):
            yield error(
                key,
                folder,
                f"{folder} lacks {len(missing)} of {len(wanted)} weight files, {missing[0]} for one",
                "download or upload the model again",
            )
            return
    if not names and not list(folder.glob("*.bin")):
        yield error(
            key, folder, f"{folder} holds no weights (*.safetensors)", "download or export the model again"
        )
    for name in sorted(names):
        try:
            with safe_open(str(folder / name), framework="pt"):
                pass
        except (OSError, SafetensorError) as reason:
            yield error(
                key,
                folder,
                f"{folder / name} is damaged or cut off ({reason})",
                "download or export the model again",
            )


def _not_cached_offline(ctx: CheckContext, key: str, model: str) -> Iterator[Finding]:
    """Findings for a hub id that is not cached while HF_HUB_OFFLINE is set."""
    shape = ctx.shape(model)
    size = f", about {2 * shape.parameters / 1e9:.0f} GB" if shape else ""
    if ctx.starting:
        yield error(
            key,
            model,
            f"there is no model at {model}: it is neither a folder nor on a reachable hub (HF_HUB_OFFLINE is "
            "set, and the cache lacks it)",
            "unset HF_HUB_OFFLINE, or download it first",
        )
        return
    yield warning(
        key,
        model,
        f"could not be checked (HF_HUB_OFFLINE is set): the run would download it{size}",
        "download it first and name its folder, so that no hub time-out can end the run",
    )
    if shape:
        yield from _room(ctx, key, model, 2 * shape.parameters)
    if _GATED.match(model) and not os.environ.get("HF_TOKEN"):
        yield _gated(key, model)


def _gated(key: str, model: str) -> Finding:
    return warning(
        key,
        model,
        "models of this name require a signed licence, and HF_TOKEN is not set",
        "accept the licence on the hub and put HF_TOKEN into .env",
    )


def _room(ctx: CheckContext, key: str, model: str, size: int) -> Iterator[Finding]:
    if not ctx.machine.is_here:  # another machine has another disk
        return
    place = Path(HF_HUB_CACHE)
    place = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < size:
        yield warning(
            key,
            model,
            f"the download of {size / 1e9:.0f} GB does not fit the hub's cache here ({free / 1e9:.0f} GB "
            "free)",
            "set HF_HOME to a disk with room",
        )


def _conversation(ctx: CheckContext, key: str, model: str) -> Iterator[Finding]:
    """Check that a model can hold our conversations; raises PreflightFailed if not."""
    if _GATED.match(model) and not Path(model).exists() and not os.environ.get("HF_TOKEN"):
        yield _gated(key, model)
    if ctx.stage == "prepare_data":  # which only counts tokens
        load_tokenizer(model, key)
        return
    tokenizer = ctx.load_tokenizer(model, key)
    if drift := token_drift(tokenizer):
        yield warning(
            key,
            model,
            f"a conversation of the model at {model} changes when re-tokenised ({drift} tokens): training "
            "keeps the sampled ids, but a server that gets text would see another conversation",
            "use token ids with such a server, as this project does",
        )


def check_embedder(ctx: CheckContext) -> Iterator[Finding]:
    """The embedding model must be local, or a hub id that can be downloaded."""
    name = ctx.config.retrieval.embedder
    if name == PACKAGED_EMBEDDER or Path(name).is_dir():
        return
    if not HUB_ID.fullmatch(name):
        yield error(
            "retrieval.embedder",
            name,
            f"{name!r} is neither a folder nor a hub id",
            f"name one, such as intfloat/e5-base-v2, or {PACKAGED_EMBEDDER}",
        )
    elif is_offline() and model_config(name) is None:
        yield warning(
            "retrieval.embedder",
            name,
            "could not be checked (HF_HUB_OFFLINE is set): the retrieval service would download it",
            "download it first and name its folder",
        )
