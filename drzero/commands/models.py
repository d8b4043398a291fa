"""`drzero list-models` and `drzero fetch-models STAGE overrides…`: the models by name, and their download.

    drzero list-models                                  the options of model=, their size, and which are local
    drzero fetch-models challenger model=qwen2.5-3b     downloads the stage's models into the hub's cache

A machine with GPUs costs the same while it downloads, so the launcher runs fetch-models on a CPU before it
requests GPUs. Model folders and complete cache entries are skipped. The hub's client resumes an interrupted
download.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from huggingface_hub import is_offline_mode, list_repo_files, snapshot_download
from omegaconf import DictConfig, OmegaConf

from drzero.agent.compose import AGENTS, compose_agent
from drzero.loop.plan import compose_loop, plan_loop
from drzero.loop.seeds import split_seeds
from drzero.loop.state import split_from
from drzero.ops.console import say
from drzero.ops.hub import HUB_ID
from drzero.ops.text import did_you_mean
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.machine import declared_machine
from drzero.preflight.model_shape import load_shape
from drzero.preflight.models import hub_folder, wanted_files, weights_fault
from drzero.preflight.run import STAGE_NAMES
from drzero.recipe.compose import CONFIG_DIR, compose_stage, resolve
from drzero.recipe.errors import CheckError
from drzero.recipe.tables import console, new_table
from drzero.stages.models import completed


def run_fetch_models(arguments: Sequence[str]) -> None:
    """Download the models of a stage, or of all of `evolve`. Raises OverrideError, or CheckError by key."""
    if not arguments:
        raise CheckError("fetch-models: name a stage, for example `drzero fetch-models challenger`")
    named, *overrides = arguments
    wanted: dict[str, str] = {}
    stage, command = named.replace("-", "_"), named.replace("_", "-")
    if command not in STAGE_NAMES:
        hint = did_you_mean(named, STAGE_NAMES)
        raise CheckError(f"there is no stage {named!r}{hint}. Stages: {', '.join(STAGE_NAMES)}")
    compose = compose_agent if command in AGENTS else compose_stage
    runs = [(stage, completed(stage, overrides))]
    if stage == "evolve":
        words = split_from(split_seeds(overrides)[1])[1]
        runs = [(run.stage, list(run.overrides)) for run in plan_loop(compose_loop(words))]
    for name, of_stage in runs:
        for key, model in _hub_models(name, resolve(compose(name, of_stage))):
            wanted.setdefault(model, key)
    if is_offline_mode():
        say("fetch-models", "HF_HUB_OFFLINE is set: nothing is downloaded")
        return
    for model, key in wanted.items():
        try:
            files = wanted_files(list_repo_files(model))
            say("fetch-models", f"{model}: {len(files)} files from the hub, or from the cache")
            snapshot_download(model, allow_patterns=files)
        # The hub client's errors are OSError or ValueError; a failed connection is httpx's.
        except (OSError, ValueError, httpx.HTTPError) as error:
            raise CheckError(
                f"{key}: {model} could not be downloaded from the hub: {' '.join(str(error).split())}. "
                "Correct the name, sign its licence and set HF_TOKEN, or name a folder that has it"
            ) from error


def _hub_models(stage: str, config: DictConfig) -> Iterator[tuple[str, str]]:
    machine = declared_machine(config, starting=False)
    context = CheckContext(config, stage, machine, starting=False, ahead=False, readings=Readings())
    models = dict(context.models())
    if stage == "merge":
        models["start_model"] = str(config.start_model)
    if context.searches or stage == "prepare_data":
        models["retrieval.embedder"] = str(config.retrieval.embedder)
    for key, model in models.items():
        if HUB_ID.fullmatch(model) and not Path(model).exists():
            yield key, model


BYTES_PER_WEIGHT = 2  # bfloat16, as most weights on the hub are
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def run_list_models(overrides: Sequence[str]) -> None:
    """Print every option of the group model/, with the paths that `overrides` set."""
    table = new_table("models", "model=", "weights", "state", ">GB")
    paths = {"paths": compose_stage("merge", overrides).paths}
    models = [
        (file.stem, OmegaConf.merge(paths, OmegaConf.load(file)).base_model, "")
        for file in sorted((CONFIG_DIR / "model").glob("*.yaml"))
    ]
    of_environments = models_of_environments().items()
    models += [("–", model, f" (env={', '.join(environments)})") for model, environments in of_environments]
    for name, base_model, note in models:
        state, gb = state_and_size(name, base_model)
        table.add_row(name, base_model + note, state, f"{gb:.1f}" if gb else "–")
    console().print(table)
    print("Any other model by its hub id or folder: model=OWNER/NAME, model=./FOLDER (docs/models.md)")


def models_of_environments() -> dict[str, list[str]]:
    """The hub ids that environments have by default on Modal, with the environments."""
    general = OmegaConf.load(CONFIG_DIR / "runs" / "general.yaml")
    found: dict[str, list[str]] = {str(general.model): ["of your own"]}
    for environment, model in general.models_by_env.items():
        found.setdefault(str(model), []).append(str(environment))
    return found


def state_and_size(name: str, base_model: str) -> tuple[str, float | None]:
    """Where an option's weights are or how they get here, and their size in GB, None if unknown."""
    from_hub = not Path(base_model).is_absolute()
    folder = hub_folder(base_model) if from_hub else Path(base_model)
    size = weights_bytes(folder) if folder else 0
    if folder and size and not weights_fault(folder):
        return "cached" if from_hub else "local", size / 1e9
    shape = load_shape(base_model)
    gb = shape.parameters * BYTES_PER_WEIGHT / 1e9 if shape else None
    partly = "incomplete, " if size else ""
    if from_hub:
        return f"{partly}to be downloaded from the hub", gb
    if name in ("demo-policy", "smollm2-135m"):
        return "unpacked by drzero demo-data", gb
    if name == "wordle-policy" and not partly:
        return "made by make wordle", gb
    return "incomplete: copy it again" if partly else "missing: copy it there", gb


def weights_bytes(folder: Path) -> int:
    """Bytes of the weight files below a folder, 0 without any."""
    files = [file for pattern in _WEIGHTS for file in folder.rglob(pattern)] if folder.is_dir() else []
    return sum(file.stat().st_size for file in files)
