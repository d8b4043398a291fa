"""Models of a real size without a hub: the architecture, random weights, and the packaged tokenizer."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drzero.ops.files import publish, staging_folder
from drzero.preflight.model_shape import KNOWN, config_of
from drzero.stages.demo_models import load_base_tokenizer

SHAPES = {name.removesuffix("-instruct"): shape for name, shape in KNOWN.items()}


def shape_folder(name: str, folder: Path) -> Path:
    """A folder with a model of that shape, made where it is missing."""
    target = folder / name
    if target.exists():
        return target
    tokenizer = load_base_tokenizer()
    settings = config_of(SHAPES[name])
    config = AutoConfig.for_model(
        settings.pop("model_type"),
        **settings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with staging_folder(target) as staged:
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        publish(staged, target)
    return target
