"""The environments that `--env` takes, known where they are not installed: a mistyped one builds no image.

    check_environment("vf-wordle")      # "wordle"
    is_task("wordle"), is_task("demo")  # True, False: a corpus to search, an option of config/env/

`known_environments.yaml` lists those that come along and those of the libraries in the images; `python -m
drzero.launch.known_keys` writes it. The user's own, in `environments/` of the checkout, are found there.
What a run file installs (`image.pip`) may bring others, and so may a package of a family
(`verifiers:NAME`): such a name is left to `drzero preflight`, in the container.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from drzero.launch.compute import CONFIG
from drzero.launch.errors import LaunchError
from drzero.ops.text import did_you_mean
from environments import registry
from environments.registry import canonical

FILE = Path(__file__).with_name("known_environments.yaml")
OWN = CONFIG.parent / "environments"
"""Where `paths.environments` looks by default, in the checkout and in a container."""
PUBLISHED = ("verifiers:gsm8k",)
"""Tasksets that guides name by their bare name, and that are packages of their own (`image.pip`)."""


def corpora() -> list[str]:
    """The options of `config/env/`: corpora that an agent searches."""
    return sorted(file.stem for file in (CONFIG / "env").glob("*.yaml"))


def is_task(name: str | None) -> bool:
    """Whether an environment is one in which episodes are played, and not a corpus to search."""
    return name is not None and name not in corpora()


def check_environment(name: str, *, installs: Iterable[str] = ()) -> str:
    """The name as the stages take it; raises LaunchError, with those there are, for one that is unknown.

    `installs`: packages that the image gets in addition, which may have environments.
    """
    if name in corpora():
        return name
    known, wanted = _known(), canonical(name)
    for one, target in known.items():
        if wanted in (canonical(one), canonical(one.partition(":")[2])):
            return target
    family, _, inner = wanted.partition(":")
    if list(installs) or (inner and family in registry.FAMILIES):
        return wanted
    raise LaunchError(
        f"--env {name}: no such environment{did_you_mean(wanted, [*corpora(), *known])}. Corpora to search: "
        f"{', '.join(corpora())}. Environments: {', '.join(dict.fromkeys(known.values()))}. Your own go into "
        "environments/NAME/ of the checkout, or into a package in the run file's image.pip"
    )


def _known() -> dict[str, str]:
    """What may be typed, and what the stages take for it."""
    listed = _listed()
    of_families = [f"{family}:{name}" for family, names in listed["families"].items() for name in names]
    names = [*registry.own_names(OWN), *listed["built_in"], *of_families, *PUBLISHED]
    return {name: name for name in names} | listed["aliases"]


def _listed() -> dict[str, Any]:
    listed: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return listed


def as_text() -> str:
    """The file as it is now; those of a library that is not installed stay as they are listed."""
    before = _listed()["families"]
    families = {
        family: sorted(registry.family_names(family)) or before.get(family, [])
        for family in registry.FAMILIES
    }
    built_in, aliases = sorted(registry.BUILT_IN), dict(registry.ALIASES)
    values = {"built_in": built_in, "aliases": aliases, "families": families}
    head = "# Written by `python -m drzero.launch.known_keys`.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=118)
