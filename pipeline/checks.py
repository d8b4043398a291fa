"""What can be known before anything starts: each check raises one error that says what to do about it.

The checks read the composed config, the prompts file and the index's metadata; they load no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers import AutoTokenizer

from data.parquet_io import read_parquet
from search.embedders import model_identity
from search.store import open_collection
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.search_tool_schema import SEARCH_TOOL_SCHEMA


class CheckError(ValueError):
    """Something that would have ended the run later, found before it began."""


def check_challenger(config: DictConfig) -> None:
    """Everything the challenger stage can know in advance; raises CheckError, StoreError or ValueError."""
    check_on_policy(config)
    check_batch(config)
    check_model_folder(config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path")
    check_model_folder(config.solver.model_path, "solver.model_path")
    check_index(config)
    check_prompts(config)


def check_on_policy(config: DictConfig) -> None:
    """HRPO is on-policy: an asynchronous trainer mode must be asked for twice."""
    mode = config.trainer.v1.trainer_mode
    if mode != "drzero_hrpo_sync" and not config.allow_off_policy:
        raise CheckError(
            f"trainer mode {mode} trains on questions of an older policy, and HRPO is on-policy: "
            "use mode=sync, or say allow_off_policy=true"
        )
    if config.actor_rollout_ref.rollout.name == "reference" and mode != "drzero_hrpo_sync":
        raise CheckError("the reference engine has no partial rollouts: use mode=sync or another engine")


def check_batch(config: DictConfig) -> None:
    """The batch must divide evenly over micro-batches and devices."""
    actor = config.actor_rollout_ref.actor
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    unit = actor.ppo_micro_batch_size_per_gpu * devices
    if rows % unit:
        raise CheckError(
            f"data.train_batch_size × rollout.n = {rows} is no multiple of ppo_micro_batch_size_per_gpu × "
            f"devices = {actor.ppo_micro_batch_size_per_gpu} × {devices} = {unit}: change one of them"
        )


def check_model_folder(path: str, key: str) -> None:
    """A model given as a path must be there; anything else is taken for a hub id."""
    if path.startswith(("/", ".", "~")) and not (Path(path).expanduser() / "config.json").is_file():
        raise CheckError(f"{key}: there is no model at {path}: the demo's models come with `drzero demo`")


def check_index(config: DictConfig) -> None:
    """The collection must be there and built with the embedder that will serve it."""
    with open_collection(Path(config.chroma.path), config.chroma.collection) as store:
        built_with = store.info.embedder
    if model_identity(built_with) != model_identity(config.retrieval.embedder):
        raise CheckError(
            f"collection {config.chroma.collection!r} in {config.chroma.path} was built with {built_with}, "
            f"but retrieval.embedder is {config.retrieval.embedder}: set retrieval.embedder={built_with}, "
            "or index the corpus again"
        )


def check_prompts(config: DictConfig) -> None:
    """The prompts file must be there, have its columns, fill a batch, and fit the prompt length."""
    path = Path(config.data.train_files)
    if not path.exists():
        raise CheckError(f"no prompts at {path} (data.train_files): make them with `drzero prepare-data`")
    prompts = read_parquet(path, ["prompt"]).column("prompt").to_pylist()
    if len(prompts) < config.data.train_batch_size:
        raise CheckError(
            f"{path} has {len(prompts)} rows, less than one batch (data.train_batch_size="
            f"{config.data.train_batch_size}): write more with `drzero prepare-data rows=…`"
        )
    _check_lengths(path, prompts, config)


def _check_lengths(path: Path, prompts: list[list[dict[str, Any]]], config: DictConfig) -> None:
    limit = config.data.max_prompt_length
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    # A token is at least one character, so only prompts of more characters than the limit need counting.
    long = [
        (row, prompt) for row, prompt in enumerate(prompts) if sum(len(m["content"]) for m in prompt) > limit
    ]
    lengths = {row: len(render_prompt_ids(tokenizer, prompt, [SEARCH_TOOL_SCHEMA])) for row, prompt in long}
    over = {row: length for row, length in lengths.items() if length > limit}
    if over:
        worst = max(over, key=lambda row: over[row])
        raise CheckError(
            f"{len(over)} of {len(prompts)} prompts in {path} are longer than data.max_prompt_length={limit} "
            f"tokens (row {worst}: {over[worst]}): raise it, or use a smaller max_document_tokens"
        )
