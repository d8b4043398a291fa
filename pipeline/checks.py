"""What can be known before anything starts: each check raises one error that says what to do about it.

The checks read the composed config, the prompts file and the index's metadata; they load no model.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from transformers import AutoTokenizer

from data.parquet_io import read_parquet
from pipeline.summary import saved_step
from search.embedders import model_identity
from search.store import open_collection
from verl_ext.method.chat import render_prompt_ids
from verl_ext.method.prompts import challenger_messages
from verl_ext.method.search_tool_schema import SEARCH_TOOL_SCHEMA


class CheckError(ValueError):
    """Something that would have ended the run later, found before it began."""


def check_challenger(config: DictConfig) -> None:
    """Everything the challenger stage can know in advance; raises CheckError, StoreError or ValueError."""
    check_on_policy(config)
    check_batch(config)
    check_engines(config)
    check_same_run(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path")
    load_tokenizer(config.solver.model_path, "solver.model_path")
    check_index(config)
    check_prompts(config, tokenizer)


def check_on_policy(config: DictConfig) -> None:
    """HRPO is on-policy: an asynchronous trainer mode must be asked for twice."""
    mode = config.trainer.v1.trainer_mode
    if mode != "drzero_hrpo_sync" and not config.allow_off_policy:
        raise CheckError(
            f"trainer mode {mode} trains on questions of an older policy, and HRPO is on-policy: "
            "use mode=sync, or say allow_off_policy=true"
        )
    actor = config.actor_rollout_ref.actor
    one_update = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    if not one_update and not config.allow_off_policy:
        raise CheckError(
            "several updates a batch train on an older policy without any ratio: keep ppo_mini_batch_size at "
            "data.train_batch_size and ppo_epochs at 1, or say allow_off_policy=true"
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


def load_tokenizer(path: str, key: str) -> Any:
    """The tokenizer of the model that `key` names, a folder or a hub id; CheckError when it is neither."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise CheckError(
            f"{key}: there is no model at {path}, neither a folder nor on a hub within reach ({error}). "
            "The demo's models come with `drzero demo`"
        ) from error


def check_engines(config: DictConfig) -> None:
    """What the chosen engines need must be installed and switched on."""
    engines = {config.solver.engine, config.actor_rollout_ref.rollout.name}
    if "sglang" in engines and find_spec("sglang") is None:
        raise CheckError(
            "this profile needs SGLang, which is not installed (see 'GPUs' in the README): install it, or "
            "use hardware=cpu"
        )
    model = config.actor_rollout_ref.model
    if "reference" in engines and model.lora_rank > 0 and not model.lora.merge:
        raise CheckError(
            "the reference engine takes whole weights, not adapters: set "
            "actor_rollout_ref.model.lora.merge=true"
        )


def check_same_run(config: DictConfig) -> None:
    """A folder with a checkpoint may only be resumed by the run that made it."""
    folder = Path(config.run.dir)
    if not saved_step(folder) or not (folder / "resolved.yaml").is_file():
        return
    before = OmegaConf.load(folder / "resolved.yaml")
    for key in ("actor_rollout_ref.model.path", "data.train_files", "data.train_batch_size"):
        was, now = OmegaConf.select(before, key), OmegaConf.select(config, key)
        if was != now:
            raise CheckError(
                f"{folder} holds a run with {key}={was}, and this one has {now}: set another run.name"
            )


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


def check_prompts(config: DictConfig, tokenizer: Any) -> None:
    """The prompts file must be there, fill a batch, be worded for this run, and fit the prompt length."""
    path = Path(config.data.train_files)
    if not path.exists():
        raise CheckError(f"no prompts at {path} (data.train_files): make them with `drzero prepare-data`")
    table = read_parquet(path, ["prompt", "extra_info"])
    prompts = table.column("prompt").to_pylist()
    if len(prompts) < config.data.train_batch_size:
        raise CheckError(
            f"{path} has {len(prompts)} rows, less than one batch (data.train_batch_size="
            f"{config.data.train_batch_size}): write more with `drzero prepare-data rows=…`"
        )
    info = table.column("extra_info")[0].as_py()
    turns = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
    if prompts[0] != challenger_messages(info["document"], info["hop"], config.prompts.form, turns):
        raise CheckError(
            f"the prompts in {path} are not worded for this run (prompts.form={config.prompts.form}, "
            f"{turns} turns): make them again with `drzero prepare-data` and the same model="
        )
    _check_lengths(path, prompts, tokenizer, config.data.max_prompt_length)


def _check_lengths(path: Path, prompts: list[list[dict[str, Any]]], tokenizer: Any, limit: int) -> None:
    blank = [{"role": role, "content": ""} for role in ("system", "user")]
    frame = len(render_prompt_ids(tokenizer, blank, [SEARCH_TOOL_SCHEMA]))
    # A token is at least one byte, so only prompts of more bytes than the limit need counting.
    long = {
        row: prompt
        for row, prompt in enumerate(prompts)
        if frame + sum(len(message["content"].encode()) for message in prompt) > limit
    }
    lengths = {row: len(render_prompt_ids(tokenizer, p, [SEARCH_TOOL_SCHEMA])) for row, p in long.items()}
    over = {row: length for row, length in lengths.items() if length > limit}
    if over:
        worst = max(over, key=lambda row: over[row])
        raise CheckError(
            f"{len(over)} of {len(prompts)} prompts in {path} are longer than data.max_prompt_length={limit} "
            f"tokens (row {worst}: {over[worst]}): raise it, or use a smaller max_document_tokens"
        )
