"""Whether the package `verifiers` is installed, and which tasksets are: `print(installed_tasksets())`.

By its convention, a package that depends on it exports a class of `Taskset` in the module with its name.
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

NEEDED = "0.4"  # the release the extra pins. Earlier ones have another interface
INSTALL = 'install the extra: uv pip install -c constraints.txt -e ".[environments]"'
_REQUIRES_IT = re.compile(r"^verifiers(?![\w.-])")
_BUILT_IN = "verifiers.v1.tasksets"


def library() -> Any:
    """The module `verifiers.v1`. Raises EnvironmentUnusable without it, or for another release."""
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
    """The module for `gsm8k`, `vf-gsm8k` or `owner/gsm8k@1.0`. Raises EnvironmentUnusable."""
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
    # Another project's module may raise anything.
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
    """The tasksets of the library, then of installed packages. Empty without the library."""
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
