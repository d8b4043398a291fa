"""The keys that overrides may set, known without Hydra and veRL, so that a mistyped one builds no image.

    check_keys(["trainer.save_frek=5"])       # LaunchError: … did you mean 'trainer.save_freq'?

`known_keys.yaml` is the tree of all keys of all stages' configs; an empty mapping may have any key below
it. `python -m drzero.launch.known_keys` writes it, and the environments (`drzero.launch.environments`),
where the whole project is installed; a test keeps both current. What a value may be, and which key a stage
has, is judged in the container, by `drzero preflight`.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from drzero.launch import environments
from drzero.launch.compute import CONFIG
from drzero.launch.environments import check_environment
from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean

FILE = Path(__file__).with_suffix(".yaml")
STAGES = ("challenger", "synthesize", "solver", "merge", "evaluate")
"""Those of a loop, whose own overrides begin with `stages.STAGE.`."""
OPEN = ("critic", "distillation", "global_profiler", "reward_model", "process_env")
"""Parts of veRL's config that the recipe does not use, and what takes any key: not listed."""


def check_keys(overrides: Sequence[str], installs: Sequence[str] = ()) -> None:
    """Raise LaunchError for an override of a key or an option of a group that does not exist.

    `installs`: packages that the image gets in addition, which may have environments.
    """
    tree: dict[str, Any] = {}
    for word in overrides:
        sign, key, value = _parts(word)
        if "=" not in word and not sign.startswith("~"):
            raise LaunchError(f"{word!r}: an override is KEY=VALUE, +KEY=VALUE or ~KEY")
        if sign.startswith("+") or key.startswith("hydra."):
            continue
        if key == "env":
            check_environment(value, installs=installs)
            continue
        if (CONFIG / key).is_dir():
            known = sorted(file.stem for file in (CONFIG / key).glob("*.yaml"))
            # A model may also be a hub id or a folder.
            if value and value not in known and not (key == "model" and "/" in value):
                raise LaunchError(
                    f"{word}: no such {key}{did_you_mean(value, known)}. Options: {', '.join(known)}"
                )
            continue
        tree = tree or yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
        if not _is_in(tree, key):
            near = did_you_mean(key, _dotted(tree))
            raise LaunchError(f"{word}: there is no key {key!r}{near}. To add one on purpose, write +{word}")


def _parts(word: str) -> tuple[str, str, str]:
    """An override's sign, its key (of a loop's stage, the stage's key), and its value."""
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


def _is_in(tree: dict[str, Any], key: str) -> bool:
    node: Any = tree
    for part in key.split("."):
        if not node:  # a value, or a mapping that may have any key
            return True
        if part not in node:
            return False
        node = node[part]
    return True


def _dotted(tree: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, inner in tree.items():
        keys += [prefix + name, *_dotted(inner or {}, f"{prefix}{name}.")]
    return keys


def all_keys() -> dict[str, Any]:
    """The tree as it is now: veRL's config and ours, and what the options of the groups add."""
    from omegaconf import OmegaConf

    from drzero.recipe.compose import compose_plain
    from drzero.recipe.settings.schema import STAGES as CONFIGS
    from drzero.recipe.settings.schema import schema_of

    tree: dict[str, Any] = {}
    _add(tree, OmegaConf.to_container(compose_plain("challenger", ["hardware=8xh100"]), resolve=False))
    for key in sorted({key for stage in CONFIGS for key in schema_of(stage).keys}):
        _add(tree, _nested(key.split(".")))
    for file in sorted(CONFIG.glob("*/*.yaml")):
        if file.parent.name not in ("runs", "loop"):
            values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            _add(tree, {name: value for name, value in values.items() if name != "defaults"})
    return {name: {} if name in OPEN else tree[name] for name in sorted(tree)}


def _nested(names: Sequence[str]) -> Any:
    return {names[0]: _nested(names[1:])} if names else None


def _add(tree: dict[str, Any], values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            if not isinstance(tree.get(name), dict):
                tree[name] = {}
            _add(tree[name], value)
        else:
            tree.setdefault(str(name), None)


def as_text(tree: dict[str, Any]) -> str:
    """The tree as the file has it: flow mappings, a value's key without a colon."""
    words = textwrap.wrap(_flow(tree), 118, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["# Written by `python -m drzero.launch.known_keys`.", *words]) + "\n"


def _flow(tree: dict[str, Any]) -> str:
    inner = (key if value is None else f"{key}: {_flow(value)}" for key, value in tree.items())
    return f"{{{', '.join(inner)}}}"


if __name__ == "__main__":
    FILE.write_text(as_text(all_keys()), encoding="utf-8")
    environments.FILE.write_text(environments.as_text(), encoding="utf-8")
