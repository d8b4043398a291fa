"""`drzero list-models`: the models that `model=` names, what of each is here, and what would be downloaded.

    drzero list-models
    drzero list-models paths.corpus=my/corpus

A model is either a folder below `paths.corpus` or a hub id, whose weights are looked for in the hub cache
(HF_HOME). Sizes to download are those of bfloat16 weights, by the model's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.compose import CONFIG_DIR, compose_stage
from pipeline.model_shape import load_shape

BYTES_PER_WEIGHT = 2
"""bfloat16, as hub weights are."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True)
class ListedModel:
    """One option of the group model/."""

    name: str
    base_model: str
    place: Path | None
    """Where its weights are; None where they are not here."""
    gb: float | None
    """On disk, or to download; None where its shape is not known."""
    from_hub: bool


def run_list_models(overrides: Sequence[str]) -> None:
    """Print the table."""
    table = Table(title="models", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("model=", "weights", "state", "GB"):
        table.add_column(column, justify="right" if column == "GB" else "left", overflow="fold")
    for model in list_models(overrides):
        table.add_row(model.name, model.base_model, _state(model), f"{model.gb:.1f}" if model.gb else "–")
    Console(width=118).print(table)


def list_models(overrides: Sequence[str]) -> list[ListedModel]:
    """Every option of the group model/, as `overrides` place it."""
    paths = {"paths": compose_stage("merge", overrides).paths}
    options = sorted((CONFIG_DIR / "model").glob("*.yaml"))
    return [_look_up(file.stem, OmegaConf.merge(paths, OmegaConf.load(file)).base_model) for file in options]


def _look_up(name: str, base_model: str) -> ListedModel:
    from_hub = not Path(base_model).is_absolute()
    folder = Path(base_model)
    if from_hub:
        folder = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=base_model, repo_type="model") / "snapshots"
    if size := weights_bytes(folder):
        return ListedModel(name, base_model, folder, size / 1e9, from_hub)
    shape = load_shape(base_model)
    gb = shape.parameters * BYTES_PER_WEIGHT / 1e9 if shape else None
    return ListedModel(name, base_model, None, gb, from_hub)


def weights_bytes(folder: Path) -> int:
    """Bytes of the weight files below a folder; 0 where there are none."""
    files = [file for pattern in _WEIGHTS for file in folder.rglob(pattern)] if folder.is_dir() else []
    return sum(file.stat().st_size for file in files)


def _state(model: ListedModel) -> str:
    if model.place is not None:
        return "cached" if model.from_hub else "here"
    if model.from_hub:
        return "would be downloaded from the hub"
    if model.name in ("demo-policy", "smollm2-135m"):
        return "unpacked by drzero demo-data"
    return "upload it there"
