"""A run file as the Modal guide for `verifiers` writes it, in the words of our own run files.

    translate({"modal": {"gpu": {"type": "A100-40GB"}}, "training": {"environment": "vf-wordle"}}, "run.yaml")
    # {"compute": {"type": "A100-40GB"}, "env": "vf-wordle", "overrides": []}

`KEYS` is the whole mapping, the table of docs/modal.md (a test compares them and tries each row). The guide's
trainer and server are TRL's and vLLM's; here they are veRL and SGLang, so some keys have another shape.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean

SECTIONS = ("modal", "model", "training", "vllm", "wandb")
PROMPT_TOKENS = 1024
"""Of a length that the guide gives for prompt and response together; half of it where that is less."""
GROUP = 8
"""Episodes of one task (`actor_rollout_ref.rollout.n`), of which an update has several."""
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_LENGTHS = "`data.max_prompt_length` + `data.max_response_length`"
_ROWS = "`data.train_batch_size` × `actor_rollout_ref.rollout.n`, the rows of an update"
_NUMBER = (int, float)


@dataclass(frozen=True)
class Key:
    """A key of the guide's."""

    name: str
    kinds: tuple[type, ...]
    ours: str
    """What it is here, for people."""
    place: str | None = None
    """A key of a run file that takes its value."""
    overrides: Callable[[Any], list[str]] = lambda value: []
    """The overrides that it becomes."""


def _file(name: str, kinds: tuple[type, ...], place: str) -> Key:
    return Key(name, kinds, f"`{place}`", place)


def _config(name: str, kinds: tuple[type, ...], *keys: str) -> Key:
    shown = ", ".join(f"`{key.lstrip('+')}`" for key in keys)
    return Key(name, kinds, shown, overrides=lambda value: [f"{key}={_plain(value)}" for key in keys])


def _plain(value: Any) -> str:
    """A value in Hydra's grammar."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lengths(value: int) -> list[str]:
    prompt = min(PROMPT_TOKENS, value // 2)
    return [f"data.max_prompt_length={prompt}", f"data.max_response_length={value - prompt}"]


def _logger(is_on: bool) -> list[str]:
    return [f"trainer.logger=[file,tensorboard{',wandb' if is_on else ''}]"]


KEYS = (
    _file("modal.cpus", _NUMBER, "compute.cpu"),
    _file("modal.memory", (int,), "compute.memory"),
    _file("modal.gpu.type", (str,), "compute.type"),
    _file("modal.gpu.count", (int,), "compute.count"),
    _file("modal.timeout", (int,), "compute.timeout"),
    _file("model.base_model", (str,), "model"),
    Key("model.max_token_length", (int,), _LENGTHS, overrides=_lengths),
    _config("model.dtype", (str,), f"{_ROLLOUT}.dtype", "solver.dtype"),
    _config(
        *("model.attn_implementation", (str,)),
        "++actor_rollout_ref.model.override_config.attn_implementation",
    ),
    _file("model.overrides", (dict,), "models_by_env"),
    _file("training.environment", (str,), "env"),
    _file("training.steps", (int,), "steps"),
    Key("training.batch_size", (int,), f"its product with the next is {_ROWS}"),
    Key("training.gradient_accumulation_steps", (int,), "see the one before"),
    _config("training.learning_rate", _NUMBER, f"{_ACTOR}.optim.lr"),
    _config("training.max_grad_norm", _NUMBER, f"{_ACTOR}.grad_clip"),
    _config(
        *("vllm.gpu_memory_utilization", _NUMBER),
        f"{_ROLLOUT}.gpu_memory_utilization",
        "solver.mem_fraction_static",
    ),
    Key("vllm.max_model_len", (int,), _LENGTHS, overrides=_lengths),
    _config("vllm.block_size", (int,), "rollout.server_args.page_size", "solver.server_args.page_size"),
    _config("vllm.enforce_eager", (bool,), f"{_ROLLOUT}.enforce_eager"),
    Key("vllm.enable_auto_tool_choice", (bool,), "nothing: calls are read from the text, not by the server"),
    _config("vllm.tool_call_parser", (str,), "environment.call_form"),
    _config("wandb.project", (str,), "trainer.project_name"),
    Key("wandb.enabled", (bool,), "`trainer.logger`", overrides=_logger),
)
"""In the guide's order."""
_BY_NAME = {key.name: key for key in KEYS}
_FACTORS = ("training.batch_size", "training.gradient_accumulation_steps")


def is_guides(values: Mapping[str, Any]) -> bool:
    """Whether a run file has a section of the guide's; `model` is a name in ours."""
    return any(isinstance(values.get(section), dict) for section in SECTIONS)


def translate(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The run file in our words; its keys of ours stay, and its overrides win.

    Raises LaunchError for a key that the guide does not have, or a value of another kind.
    """
    ours: dict[str, Any] = {key: value for key, value in values.items() if key not in SECTIONS}
    # Its server is a real one, which one GPU does not have by default here.
    overrides = ["rollout=sglang"] if "vllm" in values else []
    rows: int | None = None
    for name, value in _leaves({key: values[key] for key in SECTIONS if key in values}):
        key, value = _judged(name, value, path)
        overrides += key.overrides(value)
        if key.place:
            _put(ours, key.place, value)
        if name in _FACTORS:
            rows = value if rows is None else rows * value
    if rows is not None:
        if rows < 1 or rows % GROUP:
            raise LaunchError(
                f"{path}: {' × '.join(_FACTORS)} = {rows} are the rows of an update: make it a multiple of "
                f"{GROUP}, the episodes of one task"
            )
        overrides += [f"data.train_batch_size={rows // GROUP}", f"{_ROLLOUT}.n={GROUP}"]
    typed = ours.get("overrides", [])
    # What is no list is judged with the other keys of ours.
    return {**ours, "overrides": [*overrides, *typed] if isinstance(typed, list) else typed}


def _judged(name: str, value: Any, path: str) -> tuple[Key, Any]:
    key = _BY_NAME.get(name)
    if key is None:
        known = ", ".join(_BY_NAME)
        raise LaunchError(f"{path}: {name}: no such key{did_you_mean(name, _BY_NAME)}. Keys: {known}")
    if float in key.kinds and isinstance(value, str):
        # YAML takes 3e-6, which has no dot, for text.
        with suppress(ValueError):
            value = float(value)
    if not isinstance(value, key.kinds) or (isinstance(value, bool) and bool not in key.kinds):
        wanted = " or ".join(kind.__name__ for kind in key.kinds)
        raise LaunchError(f"{path}: {name}: {value!r} is not {wanted}")
    return key, value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in _BY_NAME:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _put(values: dict[str, Any], place: str, value: Any) -> None:
    first, _, rest = place.partition(".")
    if not rest:
        values[first] = value
        return
    inner = values.get(first) or {}
    values[first] = {"base": inner} if isinstance(inner, str) else dict(inner)
    values[first][rest] = value
