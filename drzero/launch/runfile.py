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
    overrides_by_env:         # and other settings, which win over `overrides`
      bfcl-single-turn: [data.max_prompt_length=3072]
    overrides_by_model:       # what a model needs, which wins over both
      Salesforce/xLAM-2-3b-fc-r: [environment.call_form=xlam]
    scripts_by_env:           # what trains in an environment, in place of `drzero train`
      mine: examples/grpo/train_mine.py
    image:
      pip: [my-package==1.0]
      apt: [graphviz]
      scripts: [tools/]

A file in the words of the Modal guide for `verifiers` is read as well
(`drzero.launch.verifiers_guide_format`).

Merged in the order file < environment default < flag: `models_by_env`, or else the environment's own default,
takes precedence over `model`, and `--model` over all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from drzero.launch.compute import CONFIG, Compute, load_compute
from drzero.launch.environments import is_task
from drzero.launch.errors import LaunchError
from drzero.launch.verifiers_guide_format import is_guides, translate
from drzero.ops.text import did_you_mean
from environments.registry import canonical


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
    overrides_by_env: dict[str, list[str]] = field(default_factory=dict)
    overrides_by_model: dict[str, list[str]] = field(default_factory=dict)
    scripts_by_env: dict[str, str] = field(default_factory=dict)
    image: dict[str, list[str]] = field(default_factory=dict)

    @property
    def base(self) -> str | None:
        """The file of `config/compute/` that its machine starts from; None for the default one."""
        return self.compute.get("base") if isinstance(self.compute, dict) else self.compute

    def machine(self, base: str) -> Compute:
        """The machine of that name with the changes that it describes."""
        changes = self.compute if isinstance(self.compute, dict) else {}
        return load_compute(base).changed(**{str(key): changes[key] for key in changes if key != "base"})


_TYPES: dict[str, tuple[type, ...]] = {
    "compute": (str, dict),
    "model": (str,),
    "models_by_env": (dict,),
    "env": (str,),
    "iteration": (int,),
    "steps": (int,),
    "hop_ratio": (str,),
    "overrides": (list,),
    "overrides_by_env": (dict,),
    "overrides_by_model": (dict,),
    "scripts_by_env": (dict,),
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
    if is_guides(values):
        values = translate(values, path)
    for key, value in values.items():
        if key not in _TYPES:
            hint = did_you_mean(str(key), _TYPES)
            raise LaunchError(f"{path}: {key}: no such key{hint}. Keys: {', '.join(_TYPES)}")
        if not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            names = " or ".join(kind.__name__ for kind in _TYPES[key])
            raise LaunchError(f"{path}: {key}: {value!r} is not {names}")
    for part, items in values.get("image", {}).items():
        if part not in _IMAGE_KEYS or not isinstance(items, list):
            raise LaunchError(f"{path}: image.{part}: image has lists named {', '.join(_IMAGE_KEYS)}")
        _require_text(f"{path}: image.{part}", items)
    _require_text(f"{path}: overrides", values.get("overrides", ()))
    for key in ("models_by_env", "scripts_by_env"):
        _require_text(f"{path}: {key}", values.get(key, {}).values())
    for key in ("overrides_by_env", "overrides_by_model"):
        for name, items in values.get(key, {}).items():
            if not isinstance(items, list):
                raise LaunchError(f"{path}: {key}.{name}: {items!r} is not a list of overrides")
            _require_text(f"{path}: {key}.{name}", items)
    for key in ("models_by_env", "overrides_by_env", "scripts_by_env"):
        if key in values:
            values[key] = {canonical(str(env)): value for env, value in values[key].items()}
    return RunFile(**values)


def _require_text(place: str, items: Iterable[Any]) -> None:
    for item in items:
        if not isinstance(item, str):
            raise LaunchError(f"{place}: {item!r} is not text, as in [trainer.save_freq=5]")


def check_option(group: str, name: str) -> str:
    """The option of that name; raises LaunchError that names the nearest."""
    known = sorted(file.stem for file in (CONFIG / group).glob("*.yaml"))
    if name not in known:
        raise LaunchError(f"--{group} {name}: no such {group}{did_you_mean(name, known)}. {', '.join(known)}")
    return name


@dataclass(frozen=True)
class Environment:
    """What an environment's own file says of models and money; None for what it leaves open."""

    model: str | None = None
    """The option of `config/model/` that it chooses (`override /model`)."""
    max_usd: float | None = None


def read_environment(name: str | None) -> Environment:
    """`config/env/NAME.yaml`; of no name, or one that is no corpus, an environment that leaves all open."""
    if name is None or is_task(name):
        return Environment()
    values = _read_option("env", name)
    choices = [entry for entry in values.get("defaults", ()) if isinstance(entry, dict)]
    models = [entry["override /model"] for entry in choices if "override /model" in entry]
    return Environment(models[-1] if models else None, values.get("compute", {}).get("max_usd"))


def model_of_loop(name: str) -> str | None:
    """The model that `config/loop/NAME.yaml` gives all stages, if there is such a file and it does."""
    if not (CONFIG / "loop" / f"{name}.yaml").is_file():
        return None
    words = _read_option("loop", name).get("common", ())
    return next((word.removeprefix("model=") for word in words if word.startswith("model=")), None)


def model_group(hub_id: str) -> str | None:
    """The option of `config/model/` for a model on the hub; None if it has none of its own."""
    files = sorted((CONFIG / "model").glob("*.yaml"))
    return next((f.stem for f in files if _read_option("model", f.stem).get("base_model") == hub_id), None)


def _read_option(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIG / group / f"{name}.yaml").read_text(encoding="utf-8")) or {}
