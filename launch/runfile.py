"""A run file (`--config-path`): one YAML with machine, model, environment, steps and image additions.

    compute:                  # a name of config/compute/, or a mapping with `base` and the differences
      base: a100-40gb
      timeout: 14400
    model: qwen2.5-3b         # an option of config/model/
    models_by_env:            # an environment may need another
      demo: demo-policy
    env: own                  # an option of config/env/
    iteration: 1
    steps: 50
    hop_ratio: "4:3:2:1"
    overrides: [trainer.save_freq=5, +trainer.foo=1]
    image:
      pip: [my-package==1.0]
      apt: [graphviz]
      scripts: [tools/]

Merged in the order file < environment default < flag: `models_by_env`, or else the environment's own default,
takes precedence over `model`, and `--model` over all.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.compute import CONFIG, Compute, load_compute
from launch.errors import LaunchError, nearest


@dataclass(frozen=True)
class RunFile:
    """The contents of a run file; None for what it leaves out."""

    compute: Any = None
    model: str | None = None
    models_by_env: dict[str, str] = field(default_factory=dict)
    env: str | None = None
    iteration: int | None = None
    steps: int | None = None
    hop_ratio: str | None = None
    overrides: list[str] = field(default_factory=list)
    image: dict[str, list[str]] = field(default_factory=dict)

    def machine(self, default: str) -> Compute:
        """The machine it describes, else the default one of that name."""
        if self.compute is None or isinstance(self.compute, str):
            return load_compute(self.compute or default)
        values = dict(self.compute)
        base = load_compute(str(values.pop("base", default)))
        return base.changed(**values)


_TYPES: dict[str, tuple[type, ...]] = {
    "compute": (str, dict),
    "model": (str,),
    "models_by_env": (dict,),
    "env": (str,),
    "iteration": (int,),
    "steps": (int,),
    "hop_ratio": (str,),
    "overrides": (list,),
    "image": (dict,),
}
_IMAGE_KEYS = ("pip", "apt", "scripts")


def read_runfile(path: str | None) -> RunFile:
    """Read a run file; raises LaunchError that names file, key and the nearest right key."""
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
    for key, value in values.items():
        if key not in _TYPES:
            hint = nearest(str(key), _TYPES)
            raise LaunchError(f"{path}: {key}: no such key: {hint}Keys: {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            names = " or ".join(kind.__name__ for kind in _TYPES[key])
            raise LaunchError(f"{path}: {key}: {value!r} is not {names}")
    for part, items in values.get("image", {}).items():
        if part not in _IMAGE_KEYS or not isinstance(items, list):
            raise LaunchError(f"{path}: image.{part}: image has lists named {', '.join(_IMAGE_KEYS)}")
    return RunFile(**values)


def check_option(group: str, name: str) -> str:
    """The option of that name; raises LaunchError that names the nearest."""
    known = sorted(file.stem for file in (CONFIG / group).glob("*.yaml"))
    if name not in known:
        raise LaunchError(f"--{group} {name}: no such {group}: {nearest(name, known)}{', '.join(known)}")
    return name


def chooses_model(env: str) -> bool:
    """Whether an environment's own file chooses a model (`override /model`)."""
    values = yaml.safe_load((CONFIG / "env" / f"{env}.yaml").read_text(encoding="utf-8")) or {}
    return any(isinstance(entry, dict) and "override /model" in entry for entry in values.get("defaults", ()))
