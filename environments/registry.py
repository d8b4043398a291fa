"""Where environments are found, by the names that users type.

    find("wordle").load()                      # also vf-wordle, vf_wordle
    find("sums", folder="environments")        # environments/sums/ or sums.py, beside the checkout
    find("verifiers:gsm8k").load()

A name is looked for in the user's own folder, among those that come along, among the installed packages that
declare the entry point group `drzero.environments`, and, where the package `verifiers` is installed, among
its tasksets. What is found is a module with a function `load(**options)` that returns a `Taskset`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from drzero.ops.text import did_you_mean
from environments.fault import EnvironmentUnusable, one_line
from environments.taskset import Taskset

GROUP = "drzero.environments"
"""The entry point group of installed packages."""
BUILT_IN: dict[str, str] = {
    "bfcl-multi-turn": "environments.bfcl.multi_turn",
    "bfcl-single-turn": "environments.bfcl.single_turn",
    "search": "data.search_taskset",
    "wordle": "environments.wordle",
}
"""Those that come along, and the module of each."""
ALIASES: dict[str, str] = {"tool-test": "bfcl-single-turn"}
"""Further names of those that come along."""
FAMILIES: dict[str, str] = {"verifiers": "environments.verifiers"}
"""Prefixes of names, and the module whose `load(name, **options)` takes what follows the colon; its `names()`
says what there is, and nothing where the library it needs is not installed."""

_HERE = Path(__file__).resolve().parent
_INTERFACE = ("call", "conversation", "episode", "fault", "registry", "row", "score", "taskset")
"""The modules of this package that are no environments."""


@dataclass(frozen=True)
class Found:
    """An environment that has been found, and not yet imported."""

    name: str
    """As it is called in reports, run names and rows."""
    source: str
    """Its origin, for the reader."""
    module: Callable[[], ModuleType]
    member: str = "load"
    """What to call in it."""
    inner: str | None = None
    """The name within a family."""

    def load(self, **options: Any) -> Taskset:
        """Its taskset; raises EnvironmentUnusable with one line for whatever goes wrong."""
        try:
            module = self.module()
            load = getattr(module, self.member, None)
            if load is None:
                raise EnvironmentUnusable(
                    f"the environment {self.name!r} ({self.source}) has no function {self.member}(): "
                    "it returns the taskset (docs/environments.md)"
                )
            taskset = load(**options) if self.inner is None else load(self.inner, **options)
        except EnvironmentUnusable:
            raise
        # Its own code, or a library that it needs: any error there is the environment's.
        except Exception as error:
            raise EnvironmentUnusable(
                f"the environment {self.name!r} ({self.source}) cannot be loaded: {one_line(error)}"
            ) from error
        if not isinstance(taskset, Taskset):
            raise EnvironmentUnusable(
                f"the environment {self.name!r} ({self.source}): {self.member}() gave a "
                f"{type(taskset).__name__}, not a Taskset (docs/environments.md)"
            )
        if wrong := _limits_fault(taskset):
            raise EnvironmentUnusable(f"the environment {self.name!r} ({self.source}): {wrong}")
        taskset.name = self.name
        return taskset


def _limits_fault(taskset: Taskset) -> str | None:
    """What is wrong with a taskset's own limits; None if nothing is."""
    turns, seconds = taskset.max_turns, taskset.timeout_s
    if not isinstance(turns, int) or turns < 1:
        return f"max_turns is a number of turns, 1 or more, not {turns!r}"
    if not isinstance(seconds, int | float) or not seconds > 0:
        return f"timeout_s is a number of seconds above 0, not {seconds!r}"
    return None


def canonical(name: str) -> str:
    """A name as it is looked up: `vf_wordle`, `vf-wordle` and `Wordle` are one; a family's names stay."""
    family, colon, inner = name.partition(":")
    plain = family.strip().lower().replace("_", "-").removeprefix("vf-")
    return f"{plain}{colon}{inner}"


def find(name: str, folder: str | Path | None = None) -> Found:
    """The environment of a name; `folder` holds the user's own.

    Raises EnvironmentUnusable, with the names that there are.
    """
    wanted = canonical(name)
    family, colon, inner = wanted.partition(":")
    if colon:
        if family not in FAMILIES:
            raise _unknown(name, folder)
        return _of_family(family, inner)
    for places in (_own(folder), _built_in(), _installed()):
        for found in places:
            if found.name == wanted:
                return found
    target = ALIASES.get(wanted)
    if target is not None:
        return find(target, folder)
    for family in FAMILIES:
        if wanted in map(canonical, _names(family)):
            return _of_family(family, next(one for one in _names(family) if canonical(one) == wanted))
    raise _unknown(name, folder)


def names(folder: str | Path | None = None) -> list[str]:
    """Every environment that can be named, each once, those of a family as `family:name`."""
    plain = [found.name for places in (_own(folder), _built_in(), _installed()) for found in places]
    of_families = [f"{family}:{name}" for family in FAMILIES for name in _names(family)]
    return [*dict.fromkeys([*sorted(plain), *of_families])]


def own_names(folder: str | Path) -> list[str]:
    """The environments of the user's own folder."""
    return [found.name for found in _own(folder)]


def family_names(family: str) -> list[str]:
    """The environments of a family, by the names that follow its colon; none where its library is missing."""
    return _names(family)


def _unknown(name: str, folder: str | Path | None) -> EnvironmentUnusable:
    known = names(folder)
    meant = did_you_mean(canonical(name), known)
    place = f" (and {folder}, for your own)" if folder else ""
    return EnvironmentUnusable(
        f"there is no environment {name!r}{meant}. There are: {', '.join(known)}{place}. "
        "docs/environments.md says how to write one"
    )


def _built_in() -> Iterator[Found]:
    for name, module in BUILT_IN.items():
        yield Found(name, module, _importing(module))


def _importing(module: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(module)


def _own(folder: str | Path | None) -> Iterator[Found]:
    """The user's: a folder with an `__init__.py`, or with a module of its own name, or a single file."""
    if folder is None or not (root := Path(folder).resolve()).is_dir():
        return
    # In the checkout, the folder is this package: what came along is imported as such.
    modules = [module.split(".") for module in (*BUILT_IN.values(), *FAMILIES.values())]
    here = {path[1] for path in modules if path[0] == __package__} | set(_INTERFACE)
    ours = here if root == _HERE else set()
    for path in sorted(root.iterdir()):
        file = _module_file(path)
        if file is None or path.stem in ours:
            continue
        yield Found(canonical(path.stem), str(path), _loading(file))


def _module_file(path: Path) -> Path | None:
    """The file to import of an environment's folder, or the file itself; None for what is none."""
    if path.name.startswith(("_", ".")):
        return None
    if path.is_file():
        return path if path.suffix == ".py" else None
    under = path.name.replace("-", "_")
    candidates = (path / "__init__.py", path / f"{under}.py", path / under / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _loading(file: Path) -> Callable[[], ModuleType]:
    """Imports a file under a name of its own, so that it shadows nothing and is shadowed by nothing."""

    def load() -> ModuleType:
        # A package's folder names it, a file its stem.
        stem = (file.parent.name if file.name == "__init__.py" else file.stem).replace("-", "_")
        name = f"drzero_environment_{stem}"
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(file):
            return known
        places = [str(file.parent)] if file.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
        assert spec is not None and spec.loader is not None  # it is a file that ends in .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: its own modules and dataclasses look there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return load


def _installed() -> Iterator[Found]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        module, _, member = entry.value.partition(":")
        yield Found(canonical(entry.name), _package(entry), _importing(module), member or "load")


def _package(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else entry.value


def _of_family(family: str, inner: str) -> Found:
    module = FAMILIES[family]
    return Found(f"{family}:{inner}", module, _importing(module), inner=inner)


def _names(family: str) -> list[str]:
    return list(importlib.import_module(FAMILIES[family]).names())
