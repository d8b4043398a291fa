"""The names `--env` takes, known without installing anything: a mistyped one builds no image.

`known_environments.yaml` lists the built-in ones and the images' libraries. Your own are found in
`environments/`. Packages of a run file (`image.pip`) may bring more, which preflight checks in the container.
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
PUBLISHED = ("verifiers:gsm8k",)
"""Tasksets in separate packages (`image.pip`). Guides name them without `verifiers:`."""


def corpora() -> list[str]:
    """The corpora an agent can search: options of `config/env/`."""
    return sorted(file.stem for file in (CONFIG / "env").glob("*.yaml"))


def is_task(name: str | None) -> bool:
    """Whether episodes are played in this environment. A corpus is searched."""
    return name is not None and name not in corpora()


def check_environment(name: str, *, installs: Iterable[str] = ()) -> str:
    """The name as stages take it. Raises LaunchError for an unknown one, unless `installs` may bring it."""
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
    listed = _listed()
    of_families = [f"{family}:{name}" for family, names in listed["families"].items() for name in names]
    names = [*registry.own_names(OWN), *listed["built_in"], *of_families, *PUBLISHED]
    return {name: name for name in names} | listed["aliases"]


def _listed() -> dict[str, Any]:
    listed: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return listed


def as_text() -> str:
    """The current content of the file. Keeps the names of libraries that are not installed here."""
    before = _listed()["families"]
    families = {
        family: sorted(registry.family_names(family)) or before.get(family, [])
        for family in registry.FAMILIES
    }
    values = {"built_in": sorted(registry.BUILT_IN), "aliases": dict(registry.ALIASES), "families": families}
    head = "# Written by `python -m drzero.launch.known_keys`.\n"
    return head + yaml.safe_dump(values, sort_keys=False, width=118)
