"""Room in TransferQueue, and limits that would block it. veRL 0.9.1 holds at most

    (1 + w) × B × (n + 1)   rows in an asynchronous mode: B prompts of n rollouts, w batches ahead
    B × n                   rows in mode=sync

and a validation's rows. Without room an asynchronous trainer waits forever.
"""

import math
from collections.abc import Iterator

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from drzero.ops.text import is_number
from drzero.preflight.context import CheckContext
from drzero.preflight.finding import Finding, error, warning

_BATCH, _GEN = "data.train_batch_size", "data.gen_batch_size"
ROOM = "transfer_queue.backend.SimpleStorage.total_storage_size"
LIMIT = "trainer.v1.sampler.max_off_policy_threshold"
_STRATEGY = "trainer.v1.sampler.max_off_policy_strategy"
NEAR = 0.8
"""The share of room from which the flow monitor calls a queue nearly full (`drzero.ops.flow.checks`)."""


def async_mode(config: DictConfig) -> str | None:
    """veRL's name of the asynchronous mode; None in mode=sync."""
    name = str(config.trainer.v1.trainer_mode)
    return next((mode for mode in ("colocate_async", "separate_async") if name.endswith(mode)), None)


def batches_ahead(config: DictConfig) -> float:
    """Batches requested before the first is trained on; 0 in mode=sync or for an invalid value."""
    mode = async_mode(config)
    ahead = config.trainer.v1[mode].num_warmup_batches if mode else 0
    return max(float(ahead), 0.0) if is_number(ahead) else 0.0


def check_limits(ctx: CheckContext) -> Iterator[Finding]:
    """Staleness and fetch limits must let batches fill up and run ahead."""
    config, mode = ctx.config, async_mode(ctx.config)
    limit, strategy = OmegaConf.select(config, LIMIT), OmegaConf.select(config, _STRATEGY)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        why = f"{limit!r} versions: a sample spans at least one, so none could be used"
        yield error(LIMIT, why, "set it to a whole number above 0, or to null for no limit")
        return
    if strategy not in ("drop", "wait"):
        yield error(_STRATEGY, f"veRL knows drop and wait, not {strategy!r}", "choose one of them")
        return
    batch, fetched = config.data.train_batch_size, config.data.get("gen_batch_size")
    if mode is None:
        if fetched and batch % fetched:
            why = f"prompts come {fetched} at a time, and {_BATCH}={batch} is no multiple of that"
            yield error(_GEN, why, f"choose a divisor of {batch}, or null")
        return
    ahead = config.trainer.v1[mode].num_warmup_batches
    if isinstance(ahead, bool) or not is_number(ahead):
        key = f"trainer.v1.{mode}.num_warmup_batches"
        yield error(key, f"is {ahead!r}, not a number of batches", f"write {key}=1")
    elif limit is not None:
        yield from _staleness(config, mode, strategy, limit)


def _staleness(config: DictConfig, mode: str, strategy: str, limit: int) -> Iterator[Finding]:
    ahead, batch = batches_ahead(config), config.data.train_batch_size
    spans = 1 + math.ceil(ahead)
    key = f"trainer.v1.{mode}.num_warmup_batches"
    fix = f"set {LIMIT} to {spans} or more (null for no limit), or lower {key}"
    sum_ = f"with {key}={ahead:g} a sample spans 1 + {ahead:g}"
    if strategy == "wait" and limit == 1:
        held = math.floor((1 + ahead) * batch)
        why = (
            "with max_off_policy_strategy=wait each step waits for all prompts in flight of 1 version, "
            f"and all {held} = (1 + {ahead:g}) × {batch} do: nothing would be asynchronous"
        )
        yield error(LIMIT, why, "set it to 2 or more, or use mode=sync")
    elif strategy == "drop" and limit < spans:
        # `limit` of the 1 + w batches in flight are young enough.
        lost = 1 - limit / (1 + ahead)
        why = (
            f"{sum_} = {1 + ahead:g} versions, and samples of more than {limit} are dropped: about "
            f"{lost:.0%} of all rollouts would be thrown away"
        )
        if limit == 1:
            yield error(LIMIT, f"{why}, including all requested ahead", fix)
        else:
            yield warning(LIMIT, why, fix)


def check_room(ctx: CheckContext) -> Iterator[Finding]:
    """TransferQueue must have room for the rows that the run holds at once."""
    config = ctx.config
    backend = config.transfer_queue.backend
    room = OmegaConf.select(config, ROOM)
    if backend.storage_backend != "SimpleStorage" or room is None:
        return
    if isinstance(room, bool) or not isinstance(room, int) or room < 1:
        yield error(ROOM, f"{room!r} is no number of rows", "set it to the rows that it may hold, or null")
        return
    rows, sum_ = most_rows(config)
    in_validation, val_sum = _rows_in_validation(config)
    if in_validation > rows:
        rows, sum_ = in_validation, val_sum
    why = f"it has room for {room} rows, and the run holds up to {rows} at once: {sum_}"
    fix = f"set it to {math.ceil(rows / NEAR)} or more"
    if rows > room:
        end = "a row without room fails its group"
        if async_mode(config):
            end += ", and so does its replacement: the trainer would wait for ever"
        yield error(ROOM, f"{why}; {end}", fix)
    elif rows > NEAR * room:
        yield warning(ROOM, why, f"{fix}, so that it is never nearly full")


def most_rows(config: DictConfig) -> tuple[int, str]:
    """The most rows in TransferQueue during a step, and the arithmetic as text."""
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    if async_mode(config) is None:
        return batch * n, f"{batch} prompts × {n} rollouts"
    ahead = batches_ahead(config)
    rows = math.floor((1 + ahead) * batch) * (n + 1)
    return rows, f"(1 + {ahead:g} batches ahead) × {batch} prompts × ({n} rollouts + 1)"


def _rows_in_validation(config: DictConfig) -> tuple[int, str]:
    """The same while validating; 0 if it does not validate or the file cannot be read."""
    trainer, rollout, batch = config.trainer, config.actor_rollout_ref.rollout, config.data.train_batch_size
    try:
        held_out = pq.read_metadata(config.data.val_files).num_rows if trainer.test_freq > 0 else 0
    except (OSError, ValueError, TypeError):  # the data checks report it
        return 0, ""
    if not held_out:
        return 0, ""
    held_out = min(held_out, config.data.val_batch_size or held_out) * rollout.val_kwargs.n
    ahead = math.floor(batches_ahead(config) * batch) * (rollout.n + 1)
    sum_ = f"{batch} prompts × {rollout.n} rollouts of the step and {held_out} of the validation"
    return batch * rollout.n + held_out + ahead, f"{sum_}, {ahead} requested ahead" if ahead else sum_
