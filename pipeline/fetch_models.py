"""`drzero fetch-models STAGE overrides…`: what a stage would download from the hub, into the cache, first.

    drzero fetch-models challenger model=qwen2.5-3b

A machine with GPUs costs the same while it downloads, and trainer and servers would all wait for the same
files. So the launcher has this done on a CPU, between preflight and the machine. Models that are folders are
left alone, so is what the cache has whole; a download that was cut is gone on with by the hub's own client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from huggingface_hub import list_repo_files, snapshot_download
from omegaconf import DictConfig

from ops.logs import say
from pipeline.compose import compose_stage, resolve
from pipeline.finding import CheckError
from pipeline.loop import compose_loop, plan_loop
from pipeline.machine import declared_machine
from pipeline.model_checks import HUB_ID, is_offline
from pipeline.subject import Readings, Subject

_CONFIGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""Of every repository: configs, tokenizer, chat template, code."""
_OTHER_FORMATS = ("onnx/", "openvino/", "original/", "coreml/", "metal/")
"""Folders with the same weights once more, for programs that are not ours."""


def run_fetch_models(arguments: Sequence[str]) -> None:
    """Fetch the models of a stage, or of all stages of `evolve`.

    Raises OverrideError for what cannot be composed, CheckError with the model's key when the hub has no
    such model, wants a licence to be signed for it, or cannot be reached.
    """
    if not arguments:
        raise CheckError("fetch-models: say which stage's, for example `drzero fetch-models challenger`")
    stage, *overrides = arguments
    wanted: dict[str, str] = {}
    for name, config in _configs(stage.replace("-", "_"), overrides):
        for key, model in _hub_models(name, config):
            wanted.setdefault(model, key)
    if is_offline():
        say("fetch-models", "HF_HUB_OFFLINE is set: nothing is fetched")
        return
    for model, key in wanted.items():
        _fetch(key, model)


def _configs(stage: str, overrides: Sequence[str]) -> Iterator[tuple[str, DictConfig]]:
    if stage != "evolve":
        yield stage, resolve(compose_stage(stage, overrides))
        return
    for run in plan_loop(compose_loop(overrides)):
        yield run.stage, resolve(compose_stage(run.stage, run.overrides))


def _hub_models(stage: str, config: DictConfig) -> Iterator[tuple[str, str]]:
    """Key and hub id of every model that the stage loads, its embedder included."""
    machine = declared_machine(config, starting=False)
    subject = Subject(config, stage, machine, starting=False, ahead=False, readings=Readings())
    models = dict(subject.models())
    if stage == "merge":
        models["start_model"] = str(config.start_model)
    if subject.searches or stage == "prepare_data":
        models["retrieval.embedder"] = str(config.retrieval.embedder)
    for key, model in models.items():
        if HUB_ID.fullmatch(model) and not Path(model).exists():
            yield key, model


def _fetch(key: str, model: str) -> None:
    try:
        files = wanted_files(list_repo_files(model))
        say("fetch-models", f"{model}: {len(files)} files from the hub, or from the cache")
        snapshot_download(model, allow_patterns=files)
    # The hub's own errors are both; a connection that fails is httpx's.
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise CheckError(
            f"{key}: {model} could not be fetched from the hub: {' '.join(str(error).split())}. Correct the "
            "name, sign its licence and set HF_TOKEN, or name a folder that has it"
        ) from error


def wanted_files(names: Sequence[str]) -> list[str]:
    """Of a repository's files those that our programs load: configs, and the weights in one format."""
    own = [name for name in names if not name.startswith(_OTHER_FORMATS)]
    configs = [name for name in own if any(Path(name).match(pattern) for pattern in _CONFIGS)]
    weights = [name for name in own if name.endswith(".safetensors")]
    return sorted({*configs, *(weights or [name for name in own if name.endswith(".bin")])})
