"""Check Hydra overrides as users type them, before anything starts.

    config = check_overrides(["retrieval.topk=5"], CONFIG_DIR, schema_of("evaluate"))

Hydra alone would accept mistakes that only show once services are up, such as a `+key` below a dataclass.
"""

import dataclasses
import json
import os
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from drzero.ops.errors import UserError
from drzero.ops.text import nearest, suggest
from drzero.recipe.settings import verl
from drzero.recipe.settings.key import at
from drzero.recipe.settings.register import register
from drzero.recipe.settings.schema import Schema, all_keys

register()

PLAIN_MODEL = "qwen2.5-3b"
"""An option of model/ that sets only base_model. Models without an option build on it."""
WARM_START = "warm_start.json"  # in the folder of a warm-started model: what it was made from

# Users may add entries to these mappings without a sign.
_OPEN_MAPPINGS = (
    "process_env",
    "agent_options",
    "environment.options",
    "solver.server_args",
    "rollout.server_args",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
)
Tree = dict[str, Any]
_ABSENT: Any = object()
# What Hydra and OmegaConf raise for a bad override. The plain ones come where Hydra foresaw none (~list.0).
_HYDRA_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, AttributeError)
# Read by Hydra's instantiation itself, so the class needs no such field.
_INSTANTIATE_KEYS = {"_target_", "_convert_", "_recursive_", "_partial_", "_args_"}


class OverrideError(UserError, ValueError):
    """An override that cannot work. The message names it and the nearest name that exists."""

    line = ""  # the override as typed; empty if no single one is to blame

    @property
    def key(self) -> str:
        """The key that it is about, without signs."""
        return key_of(self.line) or "overrides"

    def of(self, line: str | None) -> "OverrideError":
        """This error, blamed on an override as typed."""
        self.line = self.line or line or ""
        return self


def check_overrides(overrides: list[str], config_dir: Path, schema: Schema) -> DictConfig:
    """Compose the config of the schema's stage, and check each override. Raises OverrideError."""
    overrides = [_quoted(override, schema) for override in for_stage(overrides, schema)]
    parsed = []
    for text in overrides:
        with _blaming(text):
            parsed.append(_parse(text))
    with initialize_config_dir(str(config_dir.resolve()), version_base=None):
        groups = _Groups(config_dir, schema.stage, [o for o in overrides if o.startswith("hydra.")])
        values = [o for o in parsed if not groups.selects(o)]
        config = groups.compose([o for o in parsed if o not in values])
        with open_dict(config):
            schema.prune(config)
        for override in values:
            if not override.key_or_group.startswith("hydra."):
                with _blaming(override.input_line):
                    _check_value(override, _plain(config), groups, schema)
                    _apply(override, config)
    check_settings(config, schema)
    return config


def _apply(override: Override, config: DictConfig) -> None:
    key, is_new = override.key_or_group, override.is_add() or override.is_force_add()
    try:
        if override.is_delete():
            parent, _, name = key.rpartition(".")
            node = OmegaConf.select(config, parent) if parent else config
            with open_dict(config):
                del node[int(name) if OmegaConf.is_list(node) else name]
        else:
            OmegaConf.update(config, key, override.value(), merge=True, force_add=is_new)
    except _HYDRA_ERRORS as error:
        raise _refused_by_hydra([override.input_line or ""], error) from None


def assigned(key: str, value: str | Sequence[str]) -> str:
    """The override that sets `key` to this text, or list of texts, whatever its characters."""
    if isinstance(value, str):
        return f"{key}={QuotedString(value, Quote.double).with_quotes()}"
    return f"{key}=[{','.join(QuotedString(text, Quote.double).with_quotes() for text in value)}]"


def _quoted(override: str, schema: Schema) -> str:
    """Quote a text of ours that Hydra would refuse or read as a number: `my file`, `1e3`. Expands `~`."""
    name, _, value = override.partition("=")
    key = schema.keys.get(name.lstrip("+"))
    types = () if key is None else get_args(key.type) or (key.type,)
    if key is not None and key.type == list[str]:
        return quote_in_list(override, texts=True)
    if key is None or str not in types or key.limits.choices:
        return override
    if value == "~" or value.startswith("~/"):
        value = os.path.expanduser(value)
    with suppress(HydraException, ValueError, RecursionError):
        parsed = OverridesParser.create().parse_override(f"{name}={value}")
        read = None if parsed.is_sweep_override() else type(parsed.value())
        is_text = read is not None and not (issubclass(read, bool | int | float) and read not in types)
        if is_text and not (read is NoneType and NoneType not in types):
            return f"{name}={value}"
    return assigned(name, value)


def for_stage(overrides: Sequence[str], schema: Schema) -> list[str]:
    """A stage's overrides, with old names and veRL's replaced by ours. Without veRL, its keys are skipped."""
    overrides = [quote_in_list(word) for override in overrides for word in model_by_name(override)]
    overrides = [_by_new_name(override) for override in overrides]
    if schema.stage == "evolve":
        return overrides
    kept = []
    for override in overrides:
        ours = verl.ALIASES.get(key_of(override))
        if ours and not override.startswith("~"):
            override = f"{ours}={override.partition('=')[2]}"
        if override.startswith(tuple(f"{name}{sign}" for name in _OPEN_MAPPINGS for sign in (".", "={"))):
            override = f"++{override}"
        if not schema.ignores(key_of(override)):
            kept.append(override)
    return kept


def _by_new_name(override: str) -> str:
    old = key_of(override)
    if old not in verl.OLD_KEYS:
        return override
    _say_once(f"drzero: {old} is now {verl.OLD_KEYS[old]}. The old name works for this release only.")
    return override.replace(old, verl.OLD_KEYS[old], 1)


@cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def model_by_name(override: str) -> list[str]:
    """`model=OWNER/NAME` or `model=FOLDER` as an option with `base_model`. Other names stay."""
    key, _, value = override.partition("=")
    name = value.strip("'\"")
    if key != "model" or "/" not in name:
        return [override]
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(("./", "../"))
    if not is_hub_id or Path(name).is_dir():
        # A run's processes work in other folders.
        name = os.path.abspath(os.path.expanduser(name))
    option = _options_by_model().get(name)
    return [f"model={option}"] if option else [f"model={_settings_of(name)}", assigned("base_model", name)]


def _settings_of(folder: str) -> str:
    """The option with a model's settings. A warm-started model keeps the settings it started with."""
    about = Path(folder) / WARM_START
    if not about.is_file():
        return PLAIN_MODEL
    try:
        settings = json.loads(about.read_text(encoding="utf-8"))["settings_of"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OverrideError(f"model={folder}: its {WARM_START} cannot be read ({error})") from error
    return str(settings)


@cache
def _options_by_model() -> dict[str, str]:
    files = sorted((Path(__file__).resolve().parents[2] / "config" / "model").glob("*.yaml"))
    return {yaml.safe_load(file.read_text(encoding="utf-8"))["base_model"]: file.stem for file in files}


def quote_in_list(override: str, *, texts: bool = False) -> str:
    """Quote paths in a plain list: `[exam=my/q.csv,~/b (1).jsonl]` → `["exam=my/q.csv","~/b (1).jsonl"]`.

    With `texts`, everything is one: `[1e3]` → `["1e3"]`.
    """
    key, _, value = override.partition("=")
    if not (value.startswith("[") and value.endswith("]")) or set(value[1:-1]) & set("[]{}\\$"):
        return override
    parts = [part.strip() for part in value[1:-1].split(",")]
    if any(part.startswith(("'", '"')) for part in parts):
        return override
    quoted = [
        QuotedString(part, Quote.double).with_quotes()
        if (texts and part) or set(part) & set("=()'\"") or part.startswith("~")
        else part
        for part in parts
    ]
    return f"{key}=[{','.join(quoted)}]" if quoted != parts else override


def key_of(override: str) -> str:
    """The key or group of an override, without signs."""
    return override.partition("=")[0].lstrip("+~")


def check_settings(config: DictConfig, schema: Schema) -> None:
    """Check every value of ours, wherever it was set. Raises OverrideError. Readers refuse missing ones."""
    for name, key in schema.keys.items():
        try:
            value = _plain(OmegaConf.select(config, name))
        except InterpolationValidationError as error:
            refused = OverrideError(f"{name} is not {key.allowed}: {_first_paragraph(error)}")
            raise refused.of(f"{name}=") from None
        # Arithmetic on text raises Python's own errors.
        except (OmegaConfBaseException, TypeError, ValueError):
            continue
        parent, _, last = name.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        if value is None and OmegaConf.is_missing(node, last):
            continue
        if fault := key.fault(value):
            raise OverrideError(f"{name} {fault}").of(f"{name}={value}")


@contextmanager
def _blaming(line: str | None) -> Iterator[None]:
    try:
        yield
    except OverrideError as refused:
        raise refused.of(line) from refused.__cause__


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        # The parser stopped at a character that begins no token, or at a token out of place.
        cause: Any = error.__cause__
        token = getattr(cause, "offendingToken", None)
        start = getattr(cause, "startIndex", getattr(token, "start", None))
        position = len(text) if start is None else min(max(start, 0), len(text))
        raise OverrideError(
            f"override {text!r} is not valid: {_first_paragraph(error)}\n"
            f"  {text}\n  {' ' * position}^ at position {position + 1}\n"
            "An override reads key=value, +key=value (a new key) or ~key (delete). Quote a value with "
            "special characters twice, once for the shell and once for Hydra: 'key=\"a, b: {c}\"'."
        ) from None
    if not override.key_or_group:
        raise OverrideError(f"override {text!r} has no key: write key=value")
    if override.is_sweep_override():
        key = override.key_or_group
        raise OverrideError(
            f"override {text!r} is a sweep over several values, and a run takes one. "
            f"A list is written {key}=[a,b]; a text with a comma is quoted: '{key}=\"a,b\"'."
        )
    return override


def _refused_by_hydra(overrides: list[str], error: BaseException) -> OverrideError:
    return OverrideError(f"Hydra cannot compose {' '.join(overrides)!r}: {_first_paragraph(error)}")


def _first_paragraph(error: BaseException) -> str:
    lines = str(error).split("\nConfig search path")[0].split("\n")
    return " ".join(line.strip() for line in lines if line.strip() and "hydra.cc/docs" not in line)


class _Groups:
    """The config groups on Hydra's search path, inside an `initialize_config_dir`."""

    def __init__(self, config_dir: Path, config_name: str, hydra_overrides: list[str]) -> None:
        self._dir, self._config_name = config_dir, config_name
        self._context = hydra_overrides  # they may set the search path
        self._roots = set(self._list("", ObjectType.GROUP))

    def names(self) -> list[str]:
        """All top-level groups that users can choose from."""
        return sorted(self._roots - {"settings"})

    def options(self, group: str) -> list[str]:
        """The options of `group`: the recipe's own files if it has any, else veRL's."""
        own = sorted(path.stem for path in (self._dir / group).glob("*.yaml"))
        return own or self._list(group, ObjectType.CONFIG)

    def selects(self, override: Override) -> bool:
        """Whether Hydra takes `override` as a group choice rather than a value."""
        group = override.key_or_group
        if override.package is not None:
            return True
        # Hydra reads the config file again for each list.
        if isinstance(override.value(), dict) or group.partition("/")[0] not in self._roots:
            return False
        return bool(self._list(group, ObjectType.CONFIG) or self._list(group, ObjectType.GROUP))

    def compose(self, choices: list[Override]) -> DictConfig:
        """Compose the config with group choices alone. The caller may change it."""
        for choice in choices:
            value = choice.value()
            names = value if isinstance(value, list) else [value]
            if not choice.is_delete() and not all(isinstance(name, str) for name in names):
                raise OverrideError(
                    f"{choice.input_line!r}: {choice.key_or_group!r} is a config group and takes "
                    f"the name of an option: {', '.join(self.options(choice.key_or_group))}"
                ).of(choice.input_line)
        lines = [choice.input_line or "" for choice in choices]
        try:
            pickled = _compose_choices(self._dir, self._config_name, *self._context, *lines)
        except MissingConfigException as error:
            group, slash, option = (error.missing_cfg_file or "").partition("/")
            if not lines or not slash:
                raise
            options = self.options(group)
            other = ". Any other model is named by its hub id or folder: model=OWNER/NAME, model=./FOLDER"
            raise OverrideError(
                f"config group {group!r} has no option {option!r}{suggest(nearest(option, options, n=3))}. "
                f"Options: {', '.join(options)}{other if group == 'model' else ''}"
            ).of(f"{group}={option}") from None
        except _HYDRA_ERRORS as error:
            if not (lines or self._context):  # the config itself is broken
                raise
            raise _refused_by_hydra(self._context + lines, error) from None
        composed: DictConfig = pickle.loads(pickled)
        return composed

    def _list(self, group: str, kind: ObjectType) -> list[str]:
        return _group_options(self._dir, self._config_name, group, kind, *self._context)


@cache
def _group_options(
    config_dir: Path, config_name: str, group: str, kind: ObjectType, *overrides: str
) -> list[str]:
    """The names on the search path, inside an `initialize_config_dir`. Hydra reads the folders each time."""
    loader = GlobalHydra.instance().config_loader()
    return loader.get_group_options(group, kind, config_name, list(overrides))


@cache
def _compose_choices(config_dir: Path, config_name: str, *overrides: str) -> bytes:
    """Compose, inside an `initialize_config_dir`. Cached, because a loop's stages differ in values alone.

    Pickled, because OmegaConf's own copy takes several times as long.
    """
    return pickle.dumps(compose(config_name, overrides=list(overrides)))


def _check_value(override: Override, config: Tree, groups: _Groups, schema: Schema) -> None:
    key, line = override.key_or_group, override.input_line
    found = at(config, key, _ABSENT)
    if override.is_delete():
        if found is _ABSENT:
            raise OverrideError(f"{line!r}: there is no key {key!r} to delete{_nearest(key, config)}")
        if key in schema or schema.is_group(key):
            raise OverrideError(f"{line!r}: {key!r} cannot be deleted; set it to another value")
        if override.value() is not None and override.value() != found:
            raise OverrideError(f"{line!r}: {key} is {found!r}, not {override.value()!r}")
        return
    if found is _ABSENT and key in verl.RENAMED:
        new = f"{verl.RENAMED[key]}={override.get_value_element_as_str()}"
        raise OverrideError(f"{line!r}: {key!r} is now {verl.RENAMED[key]!r}. Write {new}")
    _check_setting(override, groups, schema)
    paths = [key]
    if isinstance(found, dict) or found is _ABSENT:
        paths = [path for path, _ in leaf_values(key, override.value())]
    for path in paths:
        if ours := verl.ALIASES.get(path):
            raise OverrideError(f"{line!r}: {path!r} takes its value from {ours!r}: write {ours}=VALUE")
    new_paths = [path for path in paths if at(config, path, _ABSENT) is _ABSENT]
    if override.is_add() and not new_paths:
        raise OverrideError(f"{line!r}: {key!r} exists already. To set it, write {str(line)[1:]}")
    if override.is_add() or override.is_force_add():
        for path in new_paths:
            _check_field(override, path, config)
    elif new_paths:
        raise OverrideError(
            f"{line!r}: there is no key {new_paths[0]!r}{_nearest(new_paths[0], config, groups.names())}"
            + (f" To add a new key on purpose, write +{line}" if _is_named_in_verl(new_paths[0]) else "")
        )
    if isinstance(found, dict):
        _check_mapping(override, found, groups)
    for path, part in leaf_values(key, override.value()):
        old = at(config, path, _ABSENT)
        if not _is_interpolation(part) and (kind := _kind_missed(old, _plain(part))):
            raise OverrideError(f"{line!r}: {path} is {part!r}, not {kind}")


def _kind_missed(old: Any, new: Any) -> str | None:
    """The kind of a veRL default that a new value lacks, or None. null and texts may stand for others."""
    if old is _ABSENT or new is None or isinstance(old, str | dict | None):
        return None
    if isinstance(old, bool):
        return None if isinstance(new, bool) else "true or false"
    if isinstance(old, list):
        return None if isinstance(new, list | str) else "a list"
    is_number = isinstance(new, int | float) and not isinstance(new, bool)
    return None if is_number else "a number"


@cache
def _is_named_in_verl(key: str) -> bool:
    """Whether veRL's source has the name at all. A new key of another name would be read by nobody."""
    spec = find_spec("verl")
    assert spec is not None and spec.origin is not None
    name = key.rpartition(".")[2].encode()
    sources = (file.read_bytes() for file in Path(spec.origin).parent.rglob("*.py"))
    return any(name in source and re.search(rb"\b%s\b" % re.escape(name), source) for source in sources)


def _check_setting(override: Override, groups: _Groups, schema: Schema) -> None:
    key, line, value = override.key_or_group, override.input_line, override.value()
    if schema.is_group(key) and value is None:
        raise OverrideError(f"{line!r}: {key!r} is a group of settings, and cannot be null")
    for path, part in leaf_values(key, value) if key not in schema else [(key, value)]:
        if schema.is_unknown(path):
            raise OverrideError(f"{line!r}: there is no key {path!r}{_nearest_of_ours(path, schema, groups)}")
        if path in schema and not _is_interpolation(part) and (fault := schema[path].fault(_plain(part))):
            raise OverrideError(f"{line!r}: {path} {fault}")


def _nearest_of_ours(key: str, schema: Schema, groups: _Groups) -> str:
    if others := next((having for known, having in all_keys() if known.name == key), ()):
        return f" in {schema.stage}: it is one of {', '.join(others).replace('_', '-')}"
    parent, _, name = key.rpartition(".")
    in_group = [known for known in schema.keys if known.rpartition(".")[0] == parent]
    near = nearest(name, [known.rpartition(".")[2] for known in in_group], n=2)
    meant = [f"{parent}.{one}" if parent else one for one in near]
    meant = meant or [known for known in schema.keys if known.rpartition(".")[2] == name]
    has_group = bool(parent and in_group)
    if not (meant or has_group):
        meant = nearest(key, [*schema.keys, *groups.names()], n=2)
    if meant or not has_group:
        return f"{suggest(meant)}. `drzero config` lists the keys"
    return f". Keys of {parent!r}: {', '.join(in_group)}"


def _is_interpolation(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_interpolation(one) for one in value)
    return isinstance(value, str) and ("${" in value or value == "???")


def _check_mapping(override: Override, found: Tree, groups: _Groups) -> None:
    key, value = override.key_or_group, override.value()
    if value is None or isinstance(value, dict) or str(value).startswith("${"):
        return
    meant = [
        f"{group}={option}"
        for group in groups.names()
        for option in groups.options(group)
        if value == option or value in option.split("_")
    ]
    hint = f" A config group has that option: {', '.join(meant)}." if meant else ""
    raise OverrideError(
        f"{override.input_line!r} would replace the whole mapping {key!r} by a plain value.{hint} "
        f"To change one of its keys, write {key}.{next(iter(found), 'KEY')}=VALUE. Keys: {', '.join(found)}"
    )


def _check_field(override: Override, path: str, config: Tree) -> None:
    parts = path.split(".")
    for depth in range(len(parts) - 1, 0, -1):  # the nearest dataclass above decides
        owner, name = ".".join(parts[:depth]), parts[depth]
        node = at(config, owner)
        if isinstance(node, dict) and "_target_" in node:
            break
    else:
        return
    try:
        cls = get_class(str(node["_target_"]))  # imports that module only, and only now: it takes seconds
    except Exception:  # importing somebody's module can fail in any way, and is not this override's fault
        return
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {name}
    # veRL itself removes keys of its YAML that are no fields.
    if name in fields or name in node or name in _INSTANTIATE_KEYS:
        return
    raise OverrideError(
        f"{override.input_line!r}: veRL makes {owner!r} into {node['_target_']}, which has no field {name!r}"
        f"{suggest(f'{owner}.{near}' for near in nearest(name, fields | set(node), n=2))}. "
        "A + cannot add a field to a dataclass."
    )


def _plain(node: Any) -> Any:
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, dict):
        return {str(name): _plain(inner) for name, inner in node.items()}
    return [_plain(inner) for inner in node] if isinstance(node, list) else node


def leaf_values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key that `key=value` sets, with its value. An empty `key` is the whole config."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaf_values(f"{key}.{name}" if key else str(name), inner)
    else:
        yield key, value


def _dotted_keys(node: Tree, prefix: str = "") -> Iterator[str]:
    for name, inner in node.items():
        yield prefix + name
        if isinstance(inner, dict):
            yield from _dotted_keys(inner, f"{prefix}{name}.")


def _nearest(key: str, config: Tree, groups: Iterable[str] = ()) -> str:
    keys = [*_dotted_keys(config), *groups]
    names = {known: known.rpartition(".")[2] for known in keys}
    name = key.rpartition(".")[2]
    same = [known for known in keys if names[known] == name]
    candidates = same or nearest(key, keys, n=2)
    if not candidates:
        similar = nearest(name, dict.fromkeys(names.values()), n=1, cutoff=0.8)
        candidates = [known for known in keys if names[known] in similar]
    candidates = sorted(candidates, key=lambda known: -SequenceMatcher(None, key, known).ratio())
    return suggest(candidates[:2]) + "."
