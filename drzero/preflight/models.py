"""Checks of models: they must exist, be complete, fit the disk and hold our conversations."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open

from drzero.checkpoints.reading import read_json
from drzero.ops.hub import hub_fault
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note, warning
from drzero.preflight.model_shape import model_config, shape_of
from drzero.preflight.tokenizers import token_drift
from drzero.recipe.errors import CheckError
from search.embedders import DEFAULT_EMBEDDER, PACKAGED_EMBEDDER
from verl_ext.checkpoints import saved_step
from verl_ext.method.chat import TURN_END, opened_thinking, render_prompt_ids

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "download or export the model again"
# Organisations whose models need a signed licence and a token.
_GATED = re.compile(r"(meta-llama|google/gemma|mistralai)", re.IGNORECASE)


def check_models(ctx: CheckContext) -> Iterator[Finding]:
    """Every model of the stage must be a complete folder, in the hub's cache, or on the hub."""
    keys: dict[str, str] = {}
    for key, model in ctx.models().items():
        keys.setdefault(model, key)
    for model, key in keys.items():
        if ctx.config.prompts.form == "short" and HUB_ID.fullmatch(model):
            turns = f"turns of {ctx.config.rollout.max_tokens_per_turn} tokens"
            why = f"it gets the demo policy's short prompts and {turns}, which model= sets"
            yield warning(key, why, f"name the model by model={model}, which sets the usual ones")
        folder = Path(model)
        is_elsewhere = folder.is_absolute() and not ctx.sees("corpus")
        # The last checkpoint of a run is merged first.
        is_run = ctx.stage == "synthesize" and key == "challenger" and saved_step(folder)
        if ctx.is_to_come(model) or is_elsewhere or is_run:
            continue
        if folder.is_dir():
            yield from _folder(ctx, key, folder)
        elif folder.is_absolute():
            made_by = "download it first. The demo's models come with `drzero demo-data`"
            if exported := re.fullmatch(r"(solver|challenger)_iter(\d+)_hf", folder.name):
                stage = "merge" if exported[1] == "solver" else "challenger"
                made_by = f"make it with `drzero {stage} iteration={exported[2]}`, or name another"
            why = f"there is no model at {folder}, neither a folder nor on a reachable hub"
            yield error(key, why, f"correct it, or {made_by}")
        elif not (HUB_ID.fullmatch(model) and is_out_of_reach(model)):
            yield from _hub_id(ctx, key, model)


def _folder(ctx: CheckContext, key: str, folder: Path) -> Iterator[Finding]:
    try:
        config = model_config(str(folder))
        if config is not None:
            shape_of(config)
    except ValueError as reason:
        yield error(key, f"config.json in {folder} is damaged ({reason})", _AGAIN)
        return
    if config is None:
        why = f"{folder} has no config.json, so it is not a model folder"
        yield error(key, why, "name the folder of a model")
        return
    yield from _weights(key, folder)
    yield from _conversation(ctx, key, str(folder))


def _weights(key: str, folder: Path) -> Iterator[Finding]:
    names = {path.name for path in folder.glob("*.safetensors")}
    if (folder / _INDEX).is_file():
        try:
            wanted = set(read_json(folder / _INDEX, "the list of weight files")["weight_map"].values())
        except (CheckError, KeyError, AttributeError, TypeError) as reason:
            yield error(key, f"{folder / _INDEX} is damaged ({reason})", _AGAIN)
            return
        if missing := sorted(wanted - names):
            why = f"{folder} lacks {len(missing)} of {len(wanted)} weight files, e.g. {missing[0]}"
            yield error(key, why, "download or upload the model again")
            return
    if not names and not list(folder.glob("*.bin")):
        yield error(key, f"{folder} holds no weights (*.safetensors)", _AGAIN)
    for name in sorted(names):
        try:
            with safe_open(str(folder / name), framework="np"):
                pass
        except (OSError, SafetensorError) as reason:
            yield error(key, f"{folder / name} is damaged or cut off ({reason})", _AGAIN)


def _hub_id(ctx: CheckContext, key: str, model: str) -> Iterator[Finding]:
    gb = _gigabytes(ctx, model)
    if not HUB_ID.fullmatch(model) or any(
        isinstance(try_to_load_from_cache(model, name), str) for name in (_WHOLE, _INDEX)
    ):
        gb = 0.0
    elif gb:
        yield note(key, f"the weights are downloaded first, about {gb:.0f} GB")
    cache = Path(HF_HUB_CACHE)
    free_gb = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free / 1e9
    if free_gb < gb and ctx.machine.is_here:  # another machine has another disk
        why = f"the download of {gb:.0f} GB does not fit the hub's cache here ({free_gb:.0f} GB free)"
        yield warning(key, why, "set HF_HOME to a disk with room")
    yield from _conversation(ctx, key, model)


def _gigabytes(ctx: CheckContext, model: str) -> float:
    shape = ctx.shape(model)
    return 2 * shape.parameters / 1e9 if shape else 0.0


def _conversation(ctx: CheckContext, key: str, model: str) -> Iterator[Finding]:
    tokenizer = ctx.load_tokenizer(model, key)
    if ctx.trains and tokenizer.eos_token != TURN_END:
        yield warning(
            key,
            f"the model at {model} writes {TURN_END} at the end of a turn, but its end token is "
            f"{tokenizer.eos_token!r}: a rollout engine may go on until max_tokens_per_turn",
            "train the model's instruction-tuned version, or set eos_token in tokenizer_config.json and "
            "eos_token_id in generation_config.json of a copy",
        )
    prompt = render_prompt_ids(tokenizer, [{"role": "user", "content": "Who?"}], None)
    if opened := opened_thinking(tokenizer, prompt):
        yield note(key, f"its chat template ends a prompt with {opened!r}: a turn is read as if it began so")
    if drift := token_drift(tokenizer):
        yield warning(
            key,
            f"re-tokenising a conversation of the model at {model} changes {drift} tokens: training keeps "
            "the sampled ids, but a server that gets text would see another conversation",
            "use token ids with such a server, as this project does",
        )


def check_embedder(ctx: CheckContext) -> Iterator[Finding]:
    """The embedding model must be a folder, the packaged one, or a hub id."""
    name = ctx.config.retrieval.embedder
    if name == PACKAGED_EMBEDDER and ctx.stage == "prepare_data" and ctx.config.source is not None:
        why = (
            f"the index will need {name}, the embedder for machines without a GPU; a run on GPUs defaults to "
            f"{DEFAULT_EMBEDDER} and would refuse it"
        )
        fix = (
            "for a run on GPUs name its machine here too (compute=8xh100), or set "
            f"retrieval.embedder={name} there"
        )
        yield warning("retrieval.embedder", why, fix)
    if name == PACKAGED_EMBEDDER or Path(name).is_dir():
        return
    if not HUB_ID.fullmatch(name):
        fix = f"name one, such as intfloat/e5-base-v2, or {PACKAGED_EMBEDDER}"
        yield error("retrieval.embedder", f"{name!r} is neither a folder nor a hub id", fix)


def check_hub(ctx: CheckContext) -> Iterator[Finding]:
    """One finding for all models of a hub that does not answer, and a warning per licence."""
    models = ctx.models()
    if ctx.embeds or (ctx.stage == "prepare_data" and ctx.config.source is not None):
        models["retrieval.embedder"] = str(ctx.config.retrieval.embedder)
    keys: dict[str, str] = {}
    for key, model in models.items():
        if HUB_ID.fullmatch(model) and not Path(model).is_dir():
            keys.setdefault(model, key)
    for model, key in keys.items():
        if _GATED.match(model) and not os.environ.get("HF_TOKEN"):
            why = "models of this name require a signed licence, and HF_TOKEN is not set"
            yield warning(key, why, "accept the licence on the hub and put HF_TOKEN into .env")
    if not (unseen := [model for model in keys if is_out_of_reach(model)]):
        return
    sizes = {model: f", about {gb:.0f} GB" for model in unseen if (gb := _gigabytes(ctx, model))}
    names = " and ".join(f"{model} ({keys[model]}{sizes.get(model, '')})" for model in unseen)
    cause = f"neither in a folder nor in the hub's cache, and {hub_fault()}"
    if ctx.starting:
        fix = "restore the connection, or download it first (`drzero fetch-models`, or a folder)"
        yield error(keys[unseen[0]], f"there is no model at {names}: {cause}", fix)
        return
    fix = "download it first and name its folder, so that no hub time-out can end the run"
    yield warning(keys[unseen[0]], f"{names} could not be checked: {cause}. The run would download it", fix)


def is_out_of_reach(model: str) -> bool:
    """Whether a hub id is not cached, and the hub does not answer."""
    return model_config(model) is None and hub_fault() is not None
