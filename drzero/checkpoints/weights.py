"""Weights by name, one tensor at a time, from veRL's FSDP checkpoints and from Hugging Face model folders.

Memory maps read both, so a model may be larger than memory. Names are the `state_dict`'s.
"""

import logging
import pickle
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from drzero.checkpoints.reading import in_one_line, read_json
from drzero.recipe.errors import CheckError
from verl_ext.checkpoints import saved_step, shard_count, step_folder

Shapes = dict[str, tuple[int, ...]]


class Layout:
    """The tensors of a model with a given config: their shapes, and names that share one weight."""

    def __init__(self, config: PretrainedConfig) -> None:
        try:
            with torch.device("meta"):  # shapes without memory
                # The config's attention may not be installed here, and it adds no weights.
                model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        except Exception as error:  # a damaged value may fail anywhere in the model's code
            raise CheckError(
                f"no model can be made from {config.name_or_path}/config.json: {in_one_line(error)}"
            ) from error
        model.tie_weights()
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        names_of: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        self.tied: dict[str, list[str]] = {name: names for names in names_of.values() for name in names}
        """Every name of a parameter → all names of its weight."""

    @cached_property
    def distinct(self) -> list[str]:
        """One name for every weight."""
        return [name for name in self.shapes if self.tied.get(name, [name])[0] == name]

    @cached_property
    def size(self) -> int:
        """Number of single weights, tied ones counted once."""
        return sum(torch.Size(self.shapes[name]).numel() for name in self.distinct)


class FsdpCheckpoint:
    """The actor's weights in a run's checkpoint, gathered from its shards, with the adapter added."""

    def __init__(self, run: Path) -> None:
        step = saved_step(run)
        if not step:
            raise CheckError(
                f"{run} holds no whole checkpoint: train that run first, or name another one's folder"
            )
        self.step = step_folder(run, step)
        # veRL's supervised trainer writes no folder for each role.
        is_alone = (self.step / "fsdp_config.json").is_file()
        self.folder = self.step if is_alone else self.step / "actor"
        if not self.folder.is_dir():
            raise CheckError(
                f"{self.folder} is missing, though it is recorded as the last step: it was removed, perhaps "
                "after it had been merged. Repeat the run, or use its export"
            )
        self.huggingface = self.folder / "huggingface"
        self._shards = [_load_shard(path) for path in _shard_paths(self.folder)]
        self._keys = {_plain_name(key): key for key in self._shards[0] if ".lora_" not in key}
        self.adapters = {
            _plain_name(key.replace("lora_A.default.", "")): (key, key.replace(".lora_A.", ".lora_B."))
            for key in self._shards[0]
            if ".lora_A." in key
        }
        """The keys of each weight's LoRA adapter. Empty if whole weights were trained."""
        self.config = load_config(str(self.huggingface), "the checkpoint")
        self.layout = Layout(self.config)
        shapes = {name: tuple(self._shards[0][key].shape) for name, key in self._keys.items()}
        if difference := first_difference(self.layout.shapes, shapes):
            raise CheckError(
                f"the weights in {self.folder} do not fit the model that {self.huggingface.name}/config.json "
                f"describes: {difference}. The folder was put together from two runs, or the adapter was "
                "saved without the model"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """The whole weight `name` in float32, gathered from the shards, with its adapter added."""
        weight = self._gather(self._keys[name]).float()
        if name in self.adapters:
            a, b = (self._gather(key).float() for key in self.adapters[name])
            weight = weight + self._adapter_scale * (b @ a)
        return weight

    @cached_property
    def _adapter_scale(self) -> float:
        path = self.folder / "lora_train_meta.json"
        meta = read_json(path, "rank and alpha of the adapter")
        try:
            return float(meta["lora_alpha"]) / float(meta["r"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise CheckError(f"{path} does not say the adapter's rank and alpha") from error

    def _gather(self, key: str) -> torch.Tensor:
        parts = [shard[key] for shard in self._shards]
        first = parts[0]
        if not isinstance(first, DTensor):
            return first
        # A mesh of two dimensions replicates along the first and shards along the last.
        placement, count = first.placements[-1], first.device_mesh.mesh.shape[-1]
        pieces = [part.to_local() for part in parts[:count]]
        whole = torch.cat(pieces, placement.dim) if isinstance(placement, Shard) else pieces[0]
        if whole.shape != first.shape:
            raise CheckError(
                f"{self.folder}: the shards of {key} make up {tuple(whole.shape)}, not {tuple(first.shape)}: "
                "they are not of one checkpoint. Repeat the last steps"
            )
        return whole


class HfWeights:
    """The safetensors of a Hugging Face model folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            listed = read_json(index, "the list of the weight files").get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
                raise CheckError(f"{index} does not say which file holds which weight")
            files = [folder / name for name in sorted(set(listed.values()))]
        if not files:
            raise CheckError(f"{folder} holds no safetensors: save the model in that format")
        try:
            handles = [safe_open(str(file), framework="pt") for file in files]
        except (OSError, SafetensorError) as error:
            raise CheckError(f"a weight file in {folder} is missing or damaged: {error}") from error
        self.handles = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        """The file of each weight. Of tied weights, usually one name is there."""

    def find(self, names: Sequence[str]) -> torch.Tensor:
        """The weight stored under any of `names`, as stored. Raises CheckError without one."""
        for name in names:
            if name in self.handles:
                return self.handles[name].get_tensor(name)
        raise CheckError(f"{self.folder} has no weight {' or '.join(names)}: it is no model of that layout")


def model_folder(model: str) -> Path:
    """The folder `model`, or its folder in the hub's cache. Raises CheckError without either."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as error:
        raise CheckError(f"there is no model at {model}, neither a folder nor in the hub's cache") from error


def load_config(model: str, what: str) -> PretrainedConfig:
    """The config of a model folder or hub id. Raises CheckError, which names `what` needed it."""
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:  # a damaged file makes Transformers raise anything
        raise CheckError(f"{what}: no usable model config at {model} ({in_one_line(error)})") from error


def first_difference(expected: Shapes, found: Shapes) -> str | None:
    """Describe the first difference between two sets of named shapes, None if they are equal."""
    for name in sorted({*expected, *found}):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not of this model"
        if expected[name] != found[name]:
            return f"{name} is {found[name]}, not {expected[name]}"
    return None


def _shard_paths(folder: Path) -> list[Path]:
    world = shard_count(folder)
    if world is None:
        raise CheckError(
            f"{folder / 'fsdp_config.json'} does not say world_size: it is missing or damaged, or this is no "
            "FSDP checkpoint"
        )
    paths = []
    for rank in range(world):
        paths.append(folder / f"model_world_size_{world}_rank_{rank}.pt")
        if not paths[-1].is_file():
            raise CheckError(
                f"{folder} lacks {paths[-1].name}: a checkpoint of {world} processes has {world} shards. "
                "Copy the missing ones, or repeat the last steps"
            )
    return paths


def _load_shard(path: Path) -> dict[str, Any]:
    # Silences a warning that a mesh without process groups cannot compute: we only read local tensors.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        # Pickled DTensors, written by our own trainer.
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckError(
            f"{path} cannot be read as a checkpoint's shard ({str(error).splitlines()[0]}): it is cut off or "
            "not a shard. Repeat the last steps"
        ) from error


def _plain_name(key: str) -> str:
    return key.removeprefix("base_model.model.").replace(".base_layer.", ".")
