"""The keys that overrides may set, known without Hydra and veRL, so that a misspelt one builds no image.

`python -m drzero.launch.known_keys` writes `verl_keys.yaml` and the known environments, and a test keeps both
current. An empty mapping there may have any key. `drzero preflight` judges values, in the container.
"""

import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from drzero.launch import environments
from drzero.launch.compute import CONFIG
from drzero.launch.environments import check_environment
from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean
from drzero.recipe.settings.schema import STAGES as CONFIGS
from drzero.recipe.settings.schema import schema_of
from drzero.recipe.settings.verl import OLD_KEYS, RENAMED, ROOTS

FILE = Path(__file__).with_name("verl_keys.yaml")
STAGES = ("challenger", "synthesize", "solver", "merge", "evaluate")
"""The stages of a loop, as `drzero.loop.plan` has them. `stages.STAGE.` starts an override of one."""
SOME = "some"
OPEN = ("critic", "distillation", "global_profiler", "reward_model")
"""Parts of veRL's config that the recipe does not use, so their keys are not listed."""


def check_keys(overrides: Sequence[str], installs: Sequence[str] = ()) -> None:
    """Raise LaunchError for an unknown key or option. `installs`: packages that may have environments."""
    for word in overrides:
        sign, key, value = _parts(word)
        if "=" not in word and not sign.startswith("~"):
            raise LaunchError(f"{word!r}: an override is KEY=VALUE, +KEY=VALUE or ~KEY")
        if key.startswith("hydra."):
            continue
        if sign.startswith("+"):
            _check_added(word, sign, key, value)
        elif key == "env":
            check_environment(value, installs=installs)
        elif (CONFIG / key).is_dir():
            known = sorted(file.stem for file in (CONFIG / key).glob("*.yaml"))
            # A model may also be a hub id or a folder.
            if value and value not in known and not (key == "model" and "/" in value):
                raise LaunchError(
                    f"{word}: no such {key}{did_you_mean(value, known)}. Options: {', '.join(known)}"
                )
        elif not _is_known(key):
            near = did_you_mean(key, _known())
            raise LaunchError(f"{word}: there is no key {key!r}{near}. To add one on purpose, write +{word}")


def _check_added(word: str, sign: str, key: str, value: str) -> None:
    """Refuse what a container would refuse: to add a key that is always there, or that has a new name."""
    if key in RENAMED and key not in _known():
        raise LaunchError(f"{word}: {key!r} is now {RENAMED[key]!r}. Write {RENAMED[key]}={value}")
    if (CONFIG / key).is_dir() or (sign == "+" and key in _always()):
        raise LaunchError(f"{word}: {key!r} exists already. To set it, write {word.lstrip('+')}")


def _parts(word: str) -> tuple[str, str, str]:
    """An override's sign, key and value. For a loop's stage, the stage's own key."""
    key, _, value = word.partition("=")
    sign = key[: len(key) - len(key.lstrip("+~"))]
    key = key.removeprefix(sign).partition("@")[0]
    first, _, rest = key.partition(".")
    stage, _, of_stage = rest.partition(".")
    if first == "stages" and stage not in STAGES:
        raise LaunchError(f"{word}: no such stage{did_you_mean(stage, STAGES)}. Stages: {', '.join(STAGES)}")
    if first == "stages" and of_stage:
        return _parts(f"{of_stage}={value}") if not sign else (sign, of_stage, value)
    return sign, key, value


@cache
def _verls() -> dict[str, Any]:
    return dict(_dotted(yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)))


@cache
def _always() -> set[str]:
    """The keys that every config of a stage has, once the stage has them."""
    ours = (name for stage in CONFIGS for name in schema_of(stage).keys)
    return {*ours, *(name for name, value in _verls().items() if value is None)}


@cache
def _known() -> dict[str, bool]:
    names = [
        *_verls(),
        *OLD_KEYS,
        "tasks",
        "from",
        *(name for stage in CONFIGS for name in schema_of(stage).keys),
    ]
    groups = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    return {name: name in groups for name in (*groups, *names)}


def _is_known(key: str) -> bool:
    known = _known()
    while key:
        if key in known:
            return True
        key = key.rpartition(".")[0]
        if known.get(key):
            return False
    return False


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in tree.items():
        yield prefix + name, inner
        if isinstance(inner, dict):
            yield from _dotted(inner, f"{prefix}{name}.")


def verl_keys() -> dict[str, Any]:
    """The tree of veRL's keys. Keys that only some files of `config/` set have the value SOME."""
    from omegaconf import OmegaConf

    from drzero.recipe.compose import compose_plain

    tree: dict[str, Any] = {}
    _add(tree, OmegaConf.to_container(compose_plain("challenger", ["hardware=8xh100"]), resolve=False))
    for file in sorted(CONFIG.glob("*/*.yaml")):
        if file.parent.name not in ("runs", "loop"):
            _add(tree, yaml.safe_load(file.read_text(encoding="utf-8")) or {}, SOME)
    return {name: {} if name in OPEN else tree[name] for name in sorted(tree) if name in ROOTS}


def _add(tree: dict[str, Any], values: Any, leaf: str | None = None) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            if not isinstance(tree.get(name), dict):
                tree[name] = {}
            _add(tree[name], value, leaf)
        else:
            tree.setdefault(str(name), leaf)


def as_text(tree: dict[str, Any]) -> str:
    """The tree as the file has it, in flow mappings."""
    words = textwrap.wrap(_flow(tree), 118, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["# Written by `python -m drzero.launch.known_keys`.", *words]) + "\n"


def _flow(tree: dict[str, Any]) -> str:
    shown = {key: _flow(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return f"{{{', '.join(key if value is None else f'{key}: {value}' for key, value in shown.items())}}}"


if __name__ == "__main__":
    FILE.write_text(as_text(verl_keys()), encoding="utf-8")
    environments.FILE.write_text(environments.as_text(), encoding="utf-8")
