"""Tokenizers of other families: the packaged one with a family's special tokens and chat template."""

import copy
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "chat_templates"
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
SPECIAL = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", *_HEADERS),
    "mistral": ("<s>", "</s>", "[TOOL_CALLS]", *_INST),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}
"""The first two begin and end a text."""


def family(tokenizer: Any, name: str) -> Any:
    """A copy of the packaged tokenizer as one of the family `name`, or with its own tokens (qwen3)."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    if name in SPECIAL:
        begin, end, *rest = SPECIAL[name]
        others = {"additional_special_tokens": rest, "bos_token": begin, "eos_token": end}
        other.add_special_tokens(others)
    return other
