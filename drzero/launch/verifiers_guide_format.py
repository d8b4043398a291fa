"""A run file in the format of the Modal guide for `verifiers`, translated into ours.

`KEYS` is the whole mapping and the table of docs/modal.md. The guide trains with TRL and vLLM, we with veRL
and SGLang, so some keys have another shape.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean

SECTIONS = ("modal", "model", "training", "vllm", "wandb")
PROMPT_TOKENS = 1024
"""The prompt's share of the guide's one length for prompt and response, at most half of it."""
GROUP = 8
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_NUMBER = (int, float)


def _lengths(value: int) -> list[str]:
    prompt = min(PROMPT_TOKENS, value // 2)
    return [f"data.max_prompt_length={prompt}", f"data.max_response_length={value - prompt}"]


def _call_form(parser: str) -> list[str]:
    return [f"environment.call_form={parser.removesuffix('_json')}"]  # vLLM's llama3_json


def _logger(is_on: bool) -> list[str]:
    return [f"trainer.logger=[file,tensorboard{',wandb' if is_on else ''}]"]


@dataclass(frozen=True)
class GuideKey:
    """A key of the guide, and where its value goes."""

    name: str
    kinds: tuple[type, ...]
    file: str | None = None
    hydra: tuple[str, ...] = ()
    note: str | None = None  # for the docs, where it is neither
    convert: Callable[[Any], list[str]] | None = None  # makes the overrides, where a value is not copied

    @property
    def ours(self) -> str:
        """Its column in docs/modal.md."""
        keys = [self.file] if self.file else [key.lstrip("+") for key in self.hydra]
        return self.note or ", ".join(f"`{key}`" for key in keys)

    def overrides(self, value: Any) -> list[str]:
        """The value as overrides."""
        if self.convert:
            return self.convert(value)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return [f"{key}={text}" for key in self.hydra]


_LENGTH_NOTE = "`data.max_prompt_length` + `data.max_response_length`"
_ROWS_NOTE = f"times the next: `data.train_batch_size` × `{_ROLLOUT}.n`, the rows of an update"
_ATTENTION = ("++actor_rollout_ref.model.override_config.attn_implementation",)
_MEMORY = (f"{_ROLLOUT}.gpu_memory_utilization", "solver.mem_fraction_static")
_PAGE = ("rollout.server_args.page_size", "solver.server_args.page_size")
_CALLS_NOTE = "nothing: calls are read from the text, not by the server"
KEYS = (
    GuideKey("modal.cpus", _NUMBER, "compute.cpu"),
    GuideKey("modal.memory", (int,), "compute.memory"),
    GuideKey("modal.gpu.type", (str,), "compute.type"),
    GuideKey("modal.gpu.count", (int,), "compute.count"),
    GuideKey("modal.timeout", (int,), "compute.timeout"),
    GuideKey("model.base_model", (str,), "model"),
    GuideKey("model.max_token_length", (int,), note=_LENGTH_NOTE, convert=_lengths),
    GuideKey("model.dtype", (str,), hydra=(f"{_ROLLOUT}.dtype", "solver.dtype")),
    GuideKey("model.attn_implementation", (str,), hydra=_ATTENTION),
    GuideKey("model.overrides", (dict,), "models_by_env"),
    GuideKey("training.environment", (str,), "env"),
    GuideKey("training.steps", (int,), "steps"),
    GuideKey("training.batch_size", (int,), note=_ROWS_NOTE),
    GuideKey("training.gradient_accumulation_steps", (int,), note="see the row above"),
    GuideKey("training.learning_rate", _NUMBER, hydra=(f"{_ACTOR}.optim.lr",)),
    GuideKey("training.max_grad_norm", _NUMBER, hydra=(f"{_ACTOR}.grad_clip",)),
    GuideKey("vllm.gpu_memory_utilization", _NUMBER, hydra=_MEMORY),
    GuideKey("vllm.max_model_len", (int,), note=_LENGTH_NOTE, convert=_lengths),
    GuideKey("vllm.block_size", (int,), hydra=_PAGE),
    GuideKey("vllm.enforce_eager", (bool,), hydra=(f"{_ROLLOUT}.enforce_eager",)),
    GuideKey("vllm.enable_auto_tool_choice", (bool,), note=_CALLS_NOTE),
    GuideKey("vllm.tool_call_parser", (str,), hydra=("environment.call_form",), convert=_call_form),
    GuideKey("wandb.project", (str,), hydra=("trainer.project_name",)),
    GuideKey("wandb.enabled", (bool,), note="`trainer.logger`", convert=_logger),
)
_BY_NAME = {key.name: key for key in KEYS}
_FACTORS = ("training.batch_size", "training.gradient_accumulation_steps")


def is_guides(values: Mapping[str, Any]) -> bool:
    """Whether a run file has a section of the guide. Our own `model` is a text, not a section."""
    return any(isinstance(values.get(section), dict) for section in SECTIONS)


def translate(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Our own keys are kept, and its overrides win. Raises LaunchError for an unknown key or a wrong type."""
    ours: dict[str, Any] = {key: value for key, value in values.items() if key not in SECTIONS}
    # The guide always has a real server; our default on one GPU is the reference engine.
    overrides = ["rollout=sglang"] if "vllm" in values else []
    rows: int | None = None
    for name, given in _leaves({key: values[key] for key in SECTIONS if key in values}):
        key, value = _judged(name, given, path)
        overrides += key.overrides(value)
        if key.file:
            _put(ours, key.file, value)
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
    # `read_runfile` reports it if it is no list.
    return {**ours, "overrides": [*overrides, *typed] if isinstance(typed, list) else typed}


def _judged(name: str, value: Any, path: str) -> tuple[GuideKey, Any]:
    key = _BY_NAME.get(name)
    if key is None:
        known = ", ".join(_BY_NAME)
        raise LaunchError(f"{path}: {name}: no such key{did_you_mean(name, _BY_NAME)}. Keys: {known}")
    if float in key.kinds and isinstance(value, str):
        # YAML reads 3e-6, which has no dot, as text.
        with suppress(ValueError):
            value = float(value)
    check_type(f"{path}: {name}", value, key.kinds)
    return key, value


def check_type(place: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raise LaunchError unless the value has one of these types. A bool is not an int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise LaunchError(f"{place}: {value!r} is not {' or '.join(kind.__name__ for kind in kinds)}")


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
