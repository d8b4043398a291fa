"""Loads a model with its tokenizer, and new weights into a model in use."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging


class ModelLoadError(ValueError):
    """A model or tokenizer cannot be loaded. The message names the place and the cause."""


def load_model(
    path: str, *, dtype: str = "float32", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a language model and tokenizer from a folder, GGUF file or hub id. Raises ModelLoadError."""
    element_type = getattr(torch, dtype, None)
    if not isinstance(element_type, torch.dtype):
        raise ModelLoadError(f"dtype {dtype!r} is not one of torch's, such as float32 or bfloat16")
    logging.disable_progress_bar()  # it overwrites our own lines
    folder = Path(path)
    source = {}
    if folder.is_dir() and not (folder / "config.json").exists():
        gguf_files = sorted(folder.glob("*.gguf"))
        if len(gguf_files) != 1:
            raise ModelLoadError(f"{path} has neither a config.json nor exactly one .gguf file")
        source["gguf_file"] = gguf_files[0].name
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=element_type, attn_implementation="sdpa", **source
        )
        return model.to(device), tokenizer
    except Exception as error:  # the libraries raise many kinds, and all mean that loading failed
        raise ModelLoadError(
            f"cannot load a model from {path} onto {device}: {type(error).__name__}: {error}"
        ) from error


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a response, from the tokenizer and the model's generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return frozenset(token_id for token_id in ids if token_id is not None)


def load_weights(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a complete set of tensors into `model`. One name of tied weights is enough.

    Raises ValueError for an unknown name, a wrong shape or missing names. `model` may be partly updated then.
    """
    # state_dict shares memory with the parameters: copying into its tensors changes the model.
    targets = model.state_dict()
    loaded: set[int] = set()
    for name, tensor in weights:
        target = targets.get(name)
        if target is None:
            raise ValueError(f"weight update: the model has no weight named {name!r}")
        if target.shape != tensor.shape:
            raise ValueError(
                f"weight update: {name} has shape {tuple(tensor.shape)}, in the model {tuple(target.shape)}"
            )
        target.copy_(tensor)
        loaded.add(target.data_ptr())
    missing = [name for name, target in targets.items() if target.data_ptr() not in loaded]
    if missing:
        raise ValueError(
            f"weight update: {len(missing)} of {len(targets)} weights are missing, the first is {missing[0]}"
        )
