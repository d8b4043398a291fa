"""Verifies an export: complete, and equal to the checkpoint rounded to the export's type, bit by bit.

Then a model built from the checkpoint and the export must give a few texts the same log-probabilities. Both
compute in float32, so they agree on any machine. Without enough memory only weights are compared.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drzero.checkpoints.weights import FsdpCheckpoint, HfWeights
from drzero.recipe.errors import CheckError
from verl_ext.engine.loading import load_model

REQUIRED = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
TEXTS = (
    "The abbey stands on the river; its founder came from the north in 1187.",
    "<think>I need the town first.</think><question>Who founded the abbey?</question><answer>Vell</answer>",
    '<tool_call>\n{"name": "search", "arguments": {"query_list": ["founder of the abbey"]}}\n</tool_call>',
)
QUESTION = "Who founded the abbey?"
TOLERANCE = 1e-4  # tolerated difference of log-probabilities, which depend on the order of summation
_ROOM = 1.5  # the model in float32, and its activations


@dataclass(frozen=True)
class ExportCheck:
    """The extent of a check. Without log-probabilities, their fields are None."""

    weights: int  # number of weights compared, all equal, tied ones counted once
    texts: int
    tokens: int
    max_log_prob_difference: float | None
    skipped: str | None


def check_export(checkpoint: FsdpCheckpoint, export: Path) -> ExportCheck:
    """Raises CheckError for a missing or wrong file or weight, or log-probabilities beyond `TOLERANCE`."""
    check_files(export)
    dtype = check_weights(checkpoint, HfWeights(export))
    ids = _ids_of_texts(export)
    if ids != _ids_of_texts(checkpoint.huggingface):
        raise CheckError(f"the tokenizer in {export} differs from {checkpoint.huggingface}: rerun the merge")
    weights = checkpoint.layout.size
    needed, available = int(4 * weights * _ROOM), psutil.virtual_memory().available
    if needed > available:
        skipped = f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are free"
        return ExportCheck(weights, 0, 0, None, skipped)
    texts = [torch.tensor(text) for text in ids]
    exported = _log_probs(load_model(str(export))[0], texts)
    rebuilt = AutoModelForCausalLM.from_config(
        checkpoint.config, dtype=torch.float32, attn_implementation="sdpa"
    )
    for name, tensor in rebuilt.state_dict().items():
        tensor.copy_(checkpoint.tensor(name).to(dtype))
    trained = _log_probs(rebuilt, texts)
    del rebuilt
    difference = max(float((a - b).abs().max()) for a, b in zip(exported, trained, strict=True))
    if not difference <= TOLERANCE:
        raise CheckError(
            f"{export} has the checkpoint's weights but not its log-probabilities (they differ by "
            f"{difference:.2g}): its config.json describes another model than {checkpoint.huggingface}"
        )
    return ExportCheck(weights, len(texts), 2 * sum(map(len, texts)), difference, None)


def check_files(export: Path) -> None:
    """Check that all files besides the weights exist. Raises CheckError."""
    if missing := [name for name in REQUIRED if not (export / name).is_file()]:
        raise CheckError(
            f"{export} lacks {', '.join(missing)}: the checkpoint's huggingface/ folder was incomplete. Copy "
            "the files from the model that the run started from into it, and rerun the merge"
        )


def check_weights(checkpoint: FsdpCheckpoint, export: HfWeights) -> torch.dtype:
    """Check that the export has exactly the checkpoint's weights, rounded. Returns their type."""
    layout = checkpoint.layout
    if unknown := export.handles.keys() - layout.shapes.keys():
        raise CheckError(
            f"{export.folder} has weights that the checkpoint lacks: {', '.join(sorted(unknown))}"
        )
    types = set()
    for name in layout.shapes:
        trained, exported = checkpoint.tensor(name), export.find(layout.tied.get(name, [name]))
        types.add(exported.dtype)
        if not torch.isfinite(trained).all():
            raise CheckError(
                f"{checkpoint.folder}: {name} holds values that are not finite, so training diverged: go "
                "back to an earlier checkpoint"
            )
        if not torch.equal(exported, trained.to(exported.dtype)):
            raise CheckError(f"{export.folder}: {name} is not the checkpoint's weight: rerun the merge")
    if len(types) != 1:
        raise CheckError(f"{export.folder} mixes the types {', '.join(sorted(map(str, types)))}")
    return types.pop()


def _ids_of_texts(folder: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        raise CheckError(
            f"the tokenizer in {folder} has no chat template, so the model cannot get our prompts: "
            "copy the chat_template.jinja of the model that the run started from into the checkpoint's "
            "huggingface/ folder"
        )
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*TEXTS, chat)]


@torch.no_grad()
def _log_probs(model: Any, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of the whole vocabulary at every position, (T, V) per text. Frees the model."""
    model.eval()
    result = [model(input_ids=text[None]).logits[0].float().log_softmax(-1) for text in texts]
    del model
    gc.collect()  # the next one needs the room
    return result
