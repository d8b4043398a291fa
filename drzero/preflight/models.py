"""Checks of models: they must exist, be complete, fit the disk and hold our conversations."""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError, safe_open

from drzero.checkpoints.reading import read_json
from drzero.ops.hub import HUB_ID, hub_fault
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, note, warning
from drzero.preflight.index_size import source_bytes
from drzero.preflight.model_shape import model_config, shape_of
from drzero.preflight.tokenizers import token_drift
from drzero.recipe.errors import CheckError
from drzero.recipe.indices import corpus_of
from search.embedders import (
    DEFAULT_EMBEDDER,
    OTHER_EMBEDDER,
    PACKAGED_EMBEDDER,
    SAMPLED,
    WEIGHT_PATTERNS,
    Embedder,
    EmbedderError,
    EmbedderSpec,
    local_folder,
)
from search.sources.corpus import Reading
from search.sources.document import CorpusError
from search.sources.hub import is_data_set
from verl_ext.method.chat import call_form, opened_thinking, render_prompt_ids

# SGLang and Transformers take the first of these that is there.
_FORMATS = ("model.safetensors", "pytorch_model.bin")
_QUICKLY_READ = 256 * 2**20  # bytes of a source that is read for a sample
_AGAIN = "download, upload or export the model again"
_CONFIGS = (".json", ".txt", ".model", ".jinja", ".py")
"""Endings of configs, tokenizer, chat template and code, which every repository needs."""
_OTHER_FORMATS = ("onnx/", "openvino/", "original/", "coreml/", "metal/")
"""Folders with the same weights in other programs' formats."""
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
        # It may be a run, whose last checkpoint is merged first (inputs.check_challenger).
        is_challenger = ctx.stage == "synthesize" and key == "challenger" and folder.is_absolute()
        is_no_model = is_challenger and not (folder / "config.json").is_file()
        if ctx.is_to_come(model) or is_elsewhere or is_no_model:
            continue
        if folder.is_dir():
            yield from _folder(ctx, key, folder)
        elif folder.is_absolute():
            made_by = "download it first. The demo's models come with `drzero demo-data`"
            if folder.name in ("demo-policy", "smollm2-135m"):
                own = "your corpus's `drzero prepare-data` makes it: run that again (it embeds nothing twice)"
                made_by = f"{own}. The demo's is `drzero demo-data paths.corpus={ctx.config.paths.corpus}`"
            if exported := re.fullmatch(r"(solver|challenger)_iter(\d+)_hf", folder.name):
                stage = "merge" if exported[1] == "solver" else "challenger"
                base = ", take the base model (iteration=0)" if ctx.stage == "evaluate" else ""
                made_by = f"make it with `drzero {stage} iteration={exported[2]}`{base}, or name another"
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


def weights_fault(folder: Path) -> str | None:
    """The fault in the set of a model folder's weight files ("lacks 2 of 3 …"), or None."""
    there = {path.name for pattern in WEIGHT_PATTERNS for path in folder.rglob(pattern) if path.is_file()}
    for whole in _FORMATS:
        index = folder / f"{whole}.index.json"
        if index.is_file():
            try:
                wanted = set(read_json(index, "the list of weight files")["weight_map"].values())
                missing = sorted(wanted - there)
            except (CheckError, KeyError, AttributeError, TypeError) as reason:
                return f"holds weights whose list {index.name} is damaged ({reason})"
            if not wanted:
                return f"holds weights whose list {index.name} is empty"
            lacks = f"lacks {len(missing)} of {len(wanted)} weight files, e.g. {', '.join(missing[:1])}"
            return lacks if missing else None
        if whole in there:
            return None
    return None if there else "holds no weights (*.safetensors)"


def wanted_files(names: Sequence[str]) -> list[str]:
    """The files of a repository that our programs load: configs, and weights in one format."""
    own = [name for name in names if not name.startswith(_OTHER_FORMATS)]
    configs = [name for name in own if name.endswith(_CONFIGS)]
    weights = [name for name in own if name.endswith(".safetensors")]
    return sorted({*configs, *(weights or [name for name in own if name.endswith(".bin")])})


def _weights(key: str, folder: Path) -> Iterator[Finding]:
    if fault := weights_fault(folder):
        yield error(key, f"{folder} {fault}", _AGAIN)
        return
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="np"):
                pass
        except (OSError, SafetensorError) as reason:
            yield error(key, f"{path} is damaged or cut off ({reason})", _AGAIN)


def hub_folder(model: str) -> Path | None:
    """The folder of a hub model in the hub's cache, None without its config.json."""
    config = try_to_load_from_cache(model, "config.json")
    return Path(config).parent if isinstance(config, str) else None


def hub_gap(model: str) -> str | None:
    """The parts of a model's weights that the hub's cache lacks: words, "" if it lacks the model, or None."""
    folder = hub_folder(model)
    fault = weights_fault(folder) if folder else ""
    return f"the hub's cache {fault}" if fault else fault


def _hub_id(ctx: CheckContext, key: str, model: str) -> Iterator[Finding]:
    gb = _gigabytes(ctx, model)
    gap = hub_gap(model) if HUB_ID.fullmatch(model) else None
    if gap is None:
        gb = 0.0
    elif gb or gap:
        size = f", about {gb:.0f} GB" if gb else ""
        yield note(key, f"the weights are downloaded first{size}{gap and f': {gap}'}")
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
    if ctx.stage == "warm_start" and (form := call_form(tokenizer)) != "hermes":
        why = f"it writes calls as {form}, and demonstrations have them as JSON in <tool_call> tags (hermes)"
        yield error(key, why, "choose a model that does too, such as Qwen's")
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
            f"the index will need {name}, the demo policy's embedder; a run of another model defaults to "
            f"{DEFAULT_EMBEDDER} and would refuse it"
        )
        fix = (
            "for such a run name its model here too (model=qwen2.5-3b), which words the prompts as well, "
            f"or set retrieval.embedder={name} there"
        )
        yield warning("retrieval.embedder", why, fix)
    if ctx.stage in ("prepare_data", "preview") and ctx.config.source is not None:
        yield from _language(ctx, name)
    if not (name == PACKAGED_EMBEDDER or Path(name).is_dir() or HUB_ID.fullmatch(name)):
        fix = f"name one, such as intfloat/e5-base-v2, or {PACKAGED_EMBEDDER}"
        yield error("retrieval.embedder", f"{name!r} is neither a folder nor a hub id", fix)


def _language(ctx: CheckContext, name: str) -> Iterator[Finding]:
    """An embedder that is here must know the language of the source's first documents."""
    folder = local_folder(name)
    source = ctx.config.source
    if folder is None or not (folder / "tokenizer.json").is_file() or is_data_set(source):
        return
    if source_bytes(ctx) > _QUICKLY_READ:  # the index build samples it
        return
    try:
        texts = [document.text for _, document in islice(corpus_of(ctx.config).read(Reading()), SAMPLED)]
        reading = Embedder(EmbedderSpec(name)).reads(texts)
    except (OSError, CorpusError, EmbedderError):  # other checks, or the stage, report them with their place
        return
    if reading.fault:
        why = f"{name} {reading.fault} of the first {len(texts)} documents of {source}"
        finding = error if reading.is_hopeless else warning
        yield finding("retrieval.embedder", f"{why}, so searches will not find them", OTHER_EMBEDDER)


def check_hub(ctx: CheckContext) -> Iterator[Finding]:
    """One finding for all models of a hub that does not answer, and a warning per licence.

    A loop's later stages add only what the earlier ones do not load.
    """
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
    told = ctx.readings.out_of_reach
    if not (unseen := [model for model in keys if model not in told and is_out_of_reach(model)]):
        return
    told.update(unseen)
    sizes = {model: f", about {gb:.0f} GB" for model in unseen if (gb := _gigabytes(ctx, model))}
    gaps = {model: f"; {gap}" for model in unseen if (gap := hub_gap(model))}
    names = " and ".join(
        f"{model} ({keys[model]}{sizes.get(model, '')}{gaps.get(model, '')})" for model in unseen
    )
    cause = f"neither in a folder nor whole in the hub's cache, and {hub_fault()}"
    if ctx.starting:
        fix = "restore the connection, or download it first (`drzero fetch-models`, or a folder)"
        yield error(keys[unseen[0]], f"there is no model at {names}: {cause}", fix)
        return
    fix = "download it first and name its folder, so that no hub time-out can end the run"
    yield warning(keys[unseen[0]], f"{names} could not be checked: {cause}. The run would download it", fix)


def is_out_of_reach(model: str) -> bool:
    """Whether the cache lacks some of a hub id, and the hub does not answer."""
    return hub_gap(model) is not None and hub_fault() is not None
