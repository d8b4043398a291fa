"""Checks of veRL's values: rules that veRL checks late or never, then its own dataclasses."""

import contextlib
import dataclasses
import io
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, get_type_hints

from hydra.errors import HydraException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error
from drzero.recipe.indices import places_of
from drzero.recipe.overrides import key_of
from drzero.recipe.settings.key import FLOATS, Key, KeyLimits, is_plain
from search.errors import StoreError


def _rule(name: str, kind: Any, **limits: Any) -> Key:
    return Key(name, kind, None, KeyLimits("", **limits))


_ACTOR, _ROLLOUT, _MODEL, _REF = (
    f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref")
)
_DATACLASSES = ("actor_rollout_ref", "algorithm")
PRECISIONS = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
LOGGERS = tuple(
    "clearml console file mlflow rl_insight swanlab tensorboard trackio vemlp_wandb wandb".split()  # noqa: SIM905
)
NUMBERS = (
    _rule("trainer.total_training_steps", int, low=1),
    _rule("trainer.total_epochs", int, low=1),
    _rule("trainer.critic_warmup", int, low=0),
    _rule("data.train_max_samples", int, low=-1),
    _rule("data.train_batch_size", int, low=1),
    _rule(f"{_ROLLOUT}.n", int, low=1),
    _rule(f"{_ROLLOUT}.tensor_model_parallel_size", int, low=1),
    _rule(f"{_ROLLOUT}.gpu_memory_utilization", float, above=0, high=1),
    _rule(f"{_ACTOR}.ppo_mini_batch_size", int, low=1),
    _rule(f"{_ACTOR}.ppo_epochs", int, low=1),
    # Adam moves every weight by about this much per step, and weights are around 0.02.
    _rule(f"{_ACTOR}.optim.lr", float, above=0, high=0.1),
    _rule(f"{_MODEL}.lora_rank", int, low=0),
    _rule("trainer.test_freq", int, low=-1),
    _rule("trainer.save_freq", int, low=-1),
    # With 0 nothing would ever run.
    _rule(f"{_ROLLOUT}.max_num_seqs", int, low=1),
    _rule(f"{_ROLLOUT}.agent.num_workers", int, low=1),
    _rule("reward.num_workers", int, low=1),
    _rule("transfer_queue.backend.SimpleStorage.num_data_storage_units", int, low=1),
)
"""veRL's keys that training checks compute with."""
RULES = (
    *NUMBERS,
    _rule("trainer.val_only", bool),
    _rule("data.shuffle", bool),
    _rule("trainer.max_actor_ckpt_to_keep", int | None, low=1),
    _rule("trainer.logger", list[str] | str, choices=LOGGERS),
    _rule("trainer.resume_mode", str, choices=("auto", "disable", "resume_path")),
    _rule("data.truncation", str, choices=("error", "left", "right", "middle")),
    _rule(f"{_ROLLOUT}.dtype", str, choices=FLOATS),
    *(
        _rule(f"actor_rollout_ref.{part}.fsdp_config.{name}", str | None, choices=PRECISIONS)
        for part in ("actor", "ref")
        for name in ("dtype", "model_dtype", *(f"mixed_precision.{of}_dtype" for of in ("param", "reduce")))
    ),
)


def has_valid_numbers(ctx: CheckContext) -> bool:
    """Whether NUMBERS are numbers in range. Python would multiply text too, into gigabytes."""
    return not ctx.trains or not any(rule.fault(OmegaConf.select(ctx.config, rule.name)) for rule in NUMBERS)


def check_values(ctx: CheckContext) -> Iterator[Finding]:
    """Values must follow RULES, chunks must fit, and data must be one file each."""
    config = ctx.config
    if ctx.stage in ("prepare_data", "preview", "warm_start"):
        from search.indexing.chunking import Chunking, ChunkingError

        try:
            Chunking(config.indexing.chunk_tokens, config.indexing.chunk_overlap)
        except ChunkingError as refused:
            yield error("indexing.chunk_overlap", str(refused), "change one of the two")
    if ctx.stage == "prepare_data" and config.indexing.embed_only:
        yield from _embedding_alone(config)
    for key in ("data.train_files", "data.val_files"):
        # veRL would read several, but our checks and manifests expect one.
        if OmegaConf.is_list(OmegaConf.select(config, key)):
            yield error(key, "is a list, and one parquet file is read", "write them into one file first")
    if not ctx.trains:
        return
    for rule in RULES:
        yield from _judge(rule, OmegaConf.select(config, rule.name))


def _embedding_alone(config: DictConfig) -> Iterator[Finding]:
    key = "indexing.embed_only"
    if config.source is None:
        yield error(key, "there is no corpus to embed", "name one: source=…")
    with contextlib.suppress(StoreError):  # `check_index` reports it
        if config.index == "chroma" and not all(place.folder for place in places_of(config)):
            why = "a Chroma server is written as it is embedded"
            yield error(key, why, "leave it out, or set chroma.path to a folder")


def _judge(rule: Key, value: Any) -> Iterator[Finding]:
    for fault in filter(None, map(rule.fault, value if OmegaConf.is_list(value) else [value])):
        yield error(
            rule.name, fault, f"{'choose one of' if rule.limits.choices else 'set it to'} {rule.allowed}"
        )


def _kinds(config: DictConfig) -> Iterator[Finding]:
    ruled = {rule.name for rule in RULES}
    for place, node, cls in _dataclass_nodes(config):
        for name, hint in get_type_hints(cls).items():
            key, value = f"{place}.{name}", node.get(name)
            # null often has a meaning, whatever the declared type.
            if value is not None and key not in ruled and is_plain(hint):
                yield from _judge(_rule(key, hint), value)


def _dataclass_nodes(config: DictConfig) -> Iterator[tuple[str, DictConfig, type]]:
    """The dataclass nodes below `_DATACLASSES` with their classes, inner ones first."""

    def below(node: DictConfig, place: str) -> Iterator[tuple[str, DictConfig, type]]:
        for name, inner in node.items():
            if OmegaConf.is_dict(inner):
                yield from below(inner, f"{place}.{name!s}")
        if "_target_" in node and dataclasses.is_dataclass(cls := get_class(node["_target_"])):
            yield place, node, cls

    for root in _DATACLASSES:
        yield from below(config[root], root)


def concerns_verl(overrides: Sequence[str]) -> bool:
    """Whether an override changes something that `check_with_verl` checks."""
    keys = {key_of(override) for override in overrides} - {rule.name for rule in RULES}
    return any(key.partition(".")[0] in _DATACLASSES for key in keys)


def check_with_verl(ctx: CheckContext) -> Iterator[Finding]:
    """veRL itself must accept a config without other errors."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    import_module("verl_ext.trainer.policy_loss")  # registers ours
    yield from _kinds(ctx.config)
    config, loss_mode = ctx.config, f"{_ACTOR}.policy_loss.loss_mode"
    for key, known in (
        ("algorithm.adv_estimator", ADV_ESTIMATOR_REGISTRY),
        (loss_mode, POLICY_LOSS_REGISTRY),
    ):
        yield from _judge(_rule(key, str, choices=tuple(known)), OmegaConf.select(config, key))
    place = ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints success
            for place, node, _ in _dataclass_nodes(config):
                # The model loads a tokenizer, and veRL removes keys of the reference policy first.
                if place not in (_MODEL, _REF):
                    omega_conf_to_dataclass(node)
            place = "actor_rollout_ref"
            validate_config(config, need_reference_policy(config), use_critic=False)
    except (HydraException, AssertionError, ValueError, TypeError, NotImplementedError) as refused:
        yield error(place, f"veRL refuses it: {_reason(refused)}", "correct the value", value="")


def _reason(refused: BaseException) -> str:
    cause = refused.__cause__ if isinstance(refused, HydraException) and refused.__cause__ else refused
    message = " ".join(str(cause).split())
    return message or str(traceback.extract_tb(cause.__traceback__)[-1].line)
