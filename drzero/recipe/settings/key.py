"""One config key: the values it takes, and what depends on it.

topk: int = key(3, "Passages per query.", low=1, high=100, results=CONVERSING, journal=SAMPLING)
"""

import dataclasses
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from drzero.ops.text import did_you_mean

MISSING: Any = "???"
"""OmegaConf's mark for a key without a value. Importing OmegaConf would slow down `--help`."""

Number = int | float  # a float that stays a whole number when written as one

TRAINING = ("challenger", "solver", "train")
SAMPLING = ("synthesize", "evaluate", "preview", "warm_start")
"""The stages that keep a journal of conversations."""
CONVERSING = ("challenger", "synthesize", "solver", "evaluate", "preview", "warm_start")
SERVING = ("challenger", "synthesize", "evaluate", "preview", "warm_start")
"""The stages in which a model is served outside veRL."""

TORCH_DEVICE = (r"cpu|cuda(:\d+)?|mps", "cpu, cuda, cuda:N or mps")
FLOATS = ("bfloat16", "float16", "float32")

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
# Hydra reads an unquoted 7 as a number.
_TAKEN_FOR: dict[Any, Any] = {str: str | int | float, float: int | float, int: int}


@dataclass(frozen=True)
class KeyLimits:
    """A key's help line, its allowed values, and what depends on it."""

    doc: str
    low: float | None = None
    above: float | None = None  # an exclusive lower bound
    high: float | None = None
    choices: tuple[str, ...] = ()
    pattern: tuple[str, str] | None = None  # a regular expression for the whole text, and the same in words
    results: tuple[str, ...] = ()  # Stages whose results can change with it. A loop then runs them again.
    journal: tuple[str, ...] = ()
    """Stages that do not resume their journal of conversations with another value."""
    run: bool = False  # whether a checkpoint cannot be resumed with another value
    pace: bool = False  # whether the time of a training step depends on it
    closed: bool = False  # Whether a mapping has fixed entries. Each is then a key by itself.


def key(default: Any = MISSING, doc: str = "", **limits: Any) -> Any:
    """A dataclass field that is a config key. `limits` are fields of `KeyLimits`."""
    metadata = {"limits": KeyLimits(doc, **limits)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def group(cls: type) -> Any:
    """A dataclass field that is a group of keys."""
    return dataclasses.field(default_factory=cls)


@dataclass(frozen=True)
class Key:
    """A config key by its dotted name."""

    name: str
    type: Any
    default: Any
    limits: KeyLimits

    @property
    def allowed(self) -> str:
        """The values that it takes, in words."""
        limits, kinds = self.limits, _kinds(self.type)
        if limits.choices:
            words = ", ".join(limits.choices)
        elif limits.pattern:
            words = limits.pattern[1]
        else:
            # A number may be a whole one.
            plain = [k for k in kinds if k is not type(None) and not (k is int and float in kinds)]
            words = " or ".join(dict.fromkeys(map(_word, plain)))
        bounds = [
            f"{name} {bound:g}"
            for name, bound in (("at least", limits.low), ("above", limits.above), ("at most", limits.high))
            if bound is not None
        ]
        words += f" {' and '.join(bounds)}" if bounds else ""
        return f"{words}, or null" if type(None) in kinds else words

    def fault(self, value: Any) -> str | None:
        """Why a plain value (no interpolation) is not allowed; None if it is."""
        limits, kinds = self.limits, _kinds(self.type)
        if value is None and type(None) in kinds:
            return None
        if limits.choices:
            if value in limits.choices:
                return None
            meant = did_you_mean(str(value), map(str, limits.choices))
            return f"is {value!r}, not one of {self.allowed}{meant}"
        is_fit = any(_fits(value, kind) for kind in kinds)
        if limits.pattern:
            is_fit = is_fit and re.fullmatch(limits.pattern[0], str(value)) is not None
        if is_fit and all(_in_range(one, limits) for one in (value if isinstance(value, list) else [value])):
            return None
        return f"is {value!r}, not {self.allowed}{self._as_list(value)}"

    def _as_list(self, value: Any) -> str:
        """How to write a text where a list is wanted. Numbers may also be written as 4:3:2:1."""
        if get_origin(self.type) is not list or not isinstance(value, str):
            return ""
        if value.startswith("["):  # a list that Hydra's grammar refuses
            return f': write each text of it in quotes, {self.name}=["…","…"]'
        parts = value if str in _kinds(get_args(self.type)[0]) else value.replace(":", ",")
        return f": write {self.name}=[{parts}]"


def keys_of(cls: type, prefix: str = "") -> Iterator[Key]:
    """The keys of a settings dataclass and of its groups."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, hint = prefix + field.name, hints[field.name]
        factory = field.default_factory
        default: Any = field.default if factory is dataclasses.MISSING else factory()
        if "limits" not in field.metadata:
            yield from keys_of(hint, f"{name}.")
        elif field.metadata["limits"].closed:
            for part, inner in default.items():
                yield Key(f"{name}.{part}", get_args(hint)[1], inner, field.metadata["limits"])
        else:
            yield Key(name, hint, default, field.metadata["limits"])


def at(tree: Any, name: str, otherwise: Any = None) -> Any:
    """What nested mappings and lists have at a dotted name."""
    for part in name.split("."):
        if isinstance(tree, list) and part.isdecimal() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict) and part in tree:
            tree = tree[part]
        else:
            return otherwise
    return tree


def as_yaml(value: Any) -> str:
    """A default as one line of YAML."""
    if value == MISSING:
        return "(none)"
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def is_plain(hint: Any) -> bool:
    """Whether a type allows only text, numbers, truth values and null."""
    return set(_kinds(hint)) <= {str, int, float, bool, type(None)}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _in_range(value: Any, limits: KeyLimits) -> bool:
    if not _fits(value, float):
        return True
    if math.isnan(value):  # no comparison with it is true
        return False
    low, above, high = limits.low, limits.above, limits.high
    is_low = (low is not None and value < low) or (above is not None and value <= above)
    return not is_low and (high is None or value <= high)


def _word(kind: Any) -> str:
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return f"a list of {'numbers' if float in _kinds(inner) else _word(inner).removeprefix('a ') + 's'}"
    return _WORDS.get(get_origin(kind) or kind, "any value")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        inner = _kinds(get_args(kind)[0])
        return isinstance(value, list) and all(any(_fits(one, k) for k in inner) for one in value)
    if get_origin(kind) is dict:
        return isinstance(value, Mapping)
    if kind in _TAKEN_FOR:
        return isinstance(value, _TAKEN_FOR[kind]) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)
