"""The package `verifiers`: whether it is there, and which tasksets are.

    python -c "from environments.verifiers.installed import installed_tasksets as t; print(t())"

A taskset is a module that exports one class derived from `Taskset`. Packages announce it in no way; those
that depend on `verifiers` are taken to have one, in a module of their own name, which is that library's
convention.
"""

import functools
import importlib
import importlib.util
import pkgutil
import re
from importlib.metadata import PackageNotFoundError, distributions, version
from types import ModuleType
from typing import Any

from environments.fault import EnvironmentUnusable, one_line

NEEDED = "0.4"
"""The release that has tasksets, and that the extra pins: those before 0.4 have another interface."""
INSTALL = 'install the extra: uv pip install -c constraints.txt -e ".[environments]"'
_REQUIRES_IT = re.compile(r"^verifiers(?![\w.-])")
_BUILT_IN = "verifiers.v1.tasksets"


def library() -> Any:
    """The module `verifiers.v1`; raises EnvironmentUnusable where it is missing or of another release."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise EnvironmentUnusable(f"verifiers: the package verifiers is not installed; {INSTALL}") from None
    if not found.startswith(f"{NEEDED}."):
        raise EnvironmentUnusable(
            f"verifiers: release {found} is installed, and {NEEDED} is needed; {INSTALL}"
        )
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise EnvironmentUnusable(
            f"verifiers: the library cannot be imported: {one_line(error)}; {INSTALL}"
        ) from error


def taskset_module(name: str) -> ModuleType:
    """The module of a taskset as users name it: `gsm8k`, `vf-gsm8k`, `owner/gsm8k@1.0`, also for a
    `gsm8k-v1`.

    Raises EnvironmentUnusable where there is none.
    """
    library()
    plain = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    spellings = dict.fromkeys([plain, plain.removeprefix("vf_")])
    for module in [spelt + suffix for suffix in ("", "_v1") for spelt in spellings if spelt.isidentifier()]:
        for path in (f"{_BUILT_IN}.{module}", module):
            if importlib.util.find_spec(path) is not None:
                return _imported(name, path)
    known = ", ".join(installed_tasksets())
    raise EnvironmentUnusable(
        f"verifiers: there is no taskset {name!r}: no module {plain} is installed. There are: {known}. "
        "A published one is a package: install it with --no-deps, then what it names beyond verifiers"
    )


def _imported(name: str, path: str) -> ModuleType:
    try:
        module = importlib.import_module(path)
    # Another project's module: whatever its import raises is its own.
    except Exception as error:
        raise EnvironmentUnusable(
            f"verifiers: the taskset {name!r} cannot be imported: {one_line(error)}"
        ) from error
    taskset = library().Taskset
    exported = [getattr(module, member, None) for member in getattr(module, "__all__", ())]
    if not any(isinstance(one, type) and issubclass(one, taskset) for one in exported):
        raise EnvironmentUnusable(
            f"verifiers: the module {path} ({name!r}) exports no Taskset: it is no environment, or one "
            f"written for a release before {NEEDED}, which this project does not play"
        )
    return module


@functools.cache
def installed_tasksets() -> tuple[str, ...]:
    """The names of the built-in tasksets and of those in installed packages; none without the library."""
    try:
        library()
    except EnvironmentUnusable:
        return ()
    built_in = [module.name for module in pkgutil.iter_modules(importlib.import_module(_BUILT_IN).__path__)]
    return tuple([*sorted(built_in), *sorted(_of_packages())])


def _of_packages() -> set[str]:
    found = set()
    for package in distributions():
        needs = [need for need in package.requires or () if "extra ==" not in need]
        module = (package.name or "").replace("-", "_").lower()
        if any(map(_REQUIRES_IT.match, needs)) and importlib.util.find_spec(module) is not None:
            found.add(module.removesuffix("_v1").replace("_", "-"))
    return found
