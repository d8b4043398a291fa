"""A run file (`--config-path`): one YAML with machine, model, environment, steps and image additions.

`compute` is a name of config/compute/, or a mapping with `base` and the differences. Overrides by environment
win over plain ones, and overrides by model over both. A file of Modal's `verifiers` guide is translated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from drzero.launch.compute import CONFIG, Compute, load_compute
from drzero.launch.environments import is_task
from drzero.launch.errors import LaunchError
from drzero.launch.verifiers_guide_format import check_type, is_guides, translate
from drzero.ops.text import did_you_mean
from environments.registry import canonical

GENERAL = CONFIG / "runs" / "general.yaml"


@dataclass(frozen=True)
class RunFile:
    """The contents of a run file, or None for what it leaves out."""

    compute: Any = None
    model: str | None = None
    models_by_env: dict[str, str] = field(default_factory=dict)
    env: str | None = None
    iteration: int | None = None
    steps: int | None = None
    hop_ratio: str | None = None
    overrides: list[str] = field(default_factory=list)
    overrides_by_env: dict[str, list[str]] = field(default_factory=dict)
    overrides_by_model: dict[str, list[str]] = field(default_factory=dict)
    scripts_by_env: dict[str, str] = field(default_factory=dict)
    image: dict[str, list[str]] = field(default_factory=dict)

    @property
    def base(self) -> str | None:
        """The file of `config/compute/` its machine starts from, or None for the default one."""
        return self.compute.get("base") if isinstance(self.compute, dict) else self.compute

    def machine(self, base: str) -> Compute:
        """The machine `base` with this file's changes."""
        changes = self.compute if isinstance(self.compute, dict) else {}
        return load_compute(base).changed(**{str(key): changes[key] for key in changes if key != "base"})

    def in_environment(self, env: str | None) -> "RunFile":
        """The file with its `…_by_env` values for this environment merged into `model` and `overrides`."""
        return replace(
            self,
            model=self.models_by_env.get(env or "") or environment_defaults(env).model or self.model,
            overrides=[*self.overrides, *self.overrides_by_env.get(env or "", [])],
        )

    def on_general(self, env: str, *, is_general: bool) -> "RunFile":
        """On top of `config/runs/general.yaml`. `is_general`: no run file is given, or the general one.

        The environment's needs win over a file that was written for another one.
        """
        general = read_runfile(str(GENERAL))
        changes, settings = machine_changes(general.overrides_by_env.get(env, []))
        defaults = {**general.compute, **changes}
        overrides = [*general.overrides, *settings]
        whole = replace(general.in_environment(env), overrides=overrides, compute=defaults)
        if is_general:
            return whole
        own = self.in_environment(env)
        overrides += own.overrides
        if canonical(self.env or "") != env:
            by_env = own.overrides[len(self.overrides) :]
            overrides = [*general.overrides, *self.overrides, *settings, *by_env]
        return replace(
            own,
            compute=_on_base(self.compute, defaults),
            model=own.model or whole.model,
            overrides=overrides,
            overrides_by_model={**general.overrides_by_model, **own.overrides_by_model},
            scripts_by_env={**general.scripts_by_env, **own.scripts_by_env},
        )


def _on_base(compute: Any, general: dict[str, Any]) -> Any:
    """Without a base it starts from the general machine, or from one for several GPUs."""
    if isinstance(compute, str) or "base" in (compute or {}):
        return compute
    changes = compute or {}
    if changes.get("count", 1) == 1:
        memory = changes.get("memory")
        more = {"memory": max(memory, general["memory"])} if isinstance(memory, int) else {}
        return {**general, **changes, **more}
    of_general = {key: general[key] for key in ("timeout", "max_usd")}
    return {"base": "8xh100", "type": load_compute(general["base"]).type, **of_general, **changes}


def machine_changes(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of `compute.KEY` overrides, and the overrides that are for the stage."""
    changes, rest = {}, []
    for word in overrides:
        key, _, value = word.partition("=")
        if key.startswith("compute."):
            try:
                changes[key.removeprefix("compute.")] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise LaunchError(f"{word}: {value!r} is no value of a machine") from None
        elif key != "compute":
            rest.append(word)
    return changes, rest


_BY_ENV = ("models_by_env", "overrides_by_env", "scripts_by_env")
_TYPES: dict[str, tuple[type, ...]] = {
    "compute": (str, dict),
    **dict.fromkeys(("model", "env", "hop_ratio"), (str,)),
    **dict.fromkeys(("iteration", "steps"), (int,)),
    "overrides": (list,),
    **dict.fromkeys((*_BY_ENV, "overrides_by_model", "image"), (dict,)),
}
_IMAGE_KEYS = ("pip", "apt", "scripts")


def read_runfile(path: str | None) -> RunFile:
    """Read a run file. Raises LaunchError with file, key and the nearest known key."""
    if path is None:
        return RunFile()
    file = Path(path)
    if not file.is_file():
        raise LaunchError(f"--config-path {path}: no such file; config/runs/ has examples")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise LaunchError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise LaunchError(f"{path}: not a mapping; its top-level keys are: {', '.join(_TYPES)}")
    if is_guides(values):
        values = translate(values, path)
    for key, value in values.items():
        if key not in _TYPES:
            hint = did_you_mean(str(key), _TYPES)
            raise LaunchError(f"{path}: {key}: no such key{hint}. Keys: {', '.join(_TYPES)}")
        check_type(f"{path}: {key}", value, _TYPES[key])
    _check_texts(values, path)
    for key in _BY_ENV:
        if key in values:
            values[key] = {canonical(str(env)): value for env, value in values[key].items()}
    return RunFile(**values)


def _check_texts(values: dict[str, Any], path: str) -> None:
    lists: dict[str, Iterable[Any]] = {"overrides": values.get("overrides", ())}
    for part, items in values.get("image", {}).items():
        if part not in _IMAGE_KEYS or not isinstance(items, list):
            raise LaunchError(f"{path}: image.{part}: image has lists named {', '.join(_IMAGE_KEYS)}")
        lists[f"image.{part}"] = items
    lists |= {key: values.get(key, {}).values() for key in ("models_by_env", "scripts_by_env")}
    for key in ("overrides_by_env", "overrides_by_model"):
        for name, items in values.get(key, {}).items():
            if not isinstance(items, list):
                raise LaunchError(f"{path}: {key}.{name}: {items!r} is not a list of overrides")
            lists[f"{key}.{name}"] = items
    for place, items in lists.items():
        for item in items:
            if not isinstance(item, str):
                raise LaunchError(f"{path}: {place}: {item!r} is not text, as in [trainer.save_freq=5]")


# What files of config/ say, read without Hydra --------------------------------------------------------------


@dataclass(frozen=True)
class EnvironmentDefaults:
    """The model and limit in `config/env/NAME.yaml`."""

    model: str | None = None
    max_usd: float | None = None


def environment_defaults(name: str | None) -> EnvironmentDefaults:
    """The defaults of a corpus. Empty without a name, or for an environment that is played."""
    if name is None or is_task(name):
        return EnvironmentDefaults()
    values = _read_option("env", name)
    choices = [entry for entry in values.get("defaults", ()) if isinstance(entry, dict)]
    models = [entry["override /model"] for entry in choices if "override /model" in entry]
    return EnvironmentDefaults(models[-1] if models else None, values.get("compute", {}).get("max_usd"))


def model_of_loop(name: str) -> str | None:
    """The model `config/loop/NAME.yaml` gives all stages, if it does."""
    if not (CONFIG / "loop" / f"{name}.yaml").is_file():
        return None
    words = _read_option("loop", name).get("common", ())
    return next((word.removeprefix("model=") for word in words if word.startswith("model=")), None)


def model_option(name: str) -> str | None:
    """The option of `config/model/`, None for a hub id or folder. Raises LaunchError for other names."""
    known = {file.stem: file for file in sorted((CONFIG / "model").glob("*.yaml"))}
    if "/" in name:
        return next((one for one in known if _read_option("model", one).get("base_model") == name), None)
    if name not in known:
        raise LaunchError(f"--model {name}: no such model{did_you_mean(name, known)}. {', '.join(known)}")
    return name


def _read_option(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIG / group / f"{name}.yaml").read_text(encoding="utf-8")) or {}
