"""Finds environments by name, in order: folder, built-in, entry points `drzero.environments`, `verifiers`.

    find("wordle").load()                      # also vf-wordle, vf_wordle
    find("sums", folder="environments")        # environments/sums/ or sums.py, next to the checkout
    find("verifiers:gsm8k").load()

Each is a module with a function `load(**options)` that returns a `Taskset`.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from drzero.ops.text import did_you_mean
from environments.fault import EnvironmentUnusable, one_line
from environments.taskset import Taskset

GROUP = "drzero.environments"
BUILT_IN: dict[str, str] = {
    "bfcl-multi-turn": "environments.bfcl.multi_turn",
    "bfcl-single-turn": "environments.bfcl.single_turn",
    "search": "data.search_taskset",
    "wordle": "environments.wordle",
}  # the module of each built-in one
ALIASES: dict[str, str] = {"tool-test": "bfcl-single-turn"}
FAMILIES: dict[str, str] = {"agent": "environments.agent", "verifiers": "environments.verifiers"}
"""By prefix, a module with `load(name, **options)` and `names()`, which is empty without its library."""

_HERE = Path(__file__).resolve().parent
_INTERFACE = ("call", "conversation", "episode", "fault", "registry", "row", "score", "taskset", "turn_text")


@dataclass(frozen=True)
class Found:
    """An environment that was found but not yet imported."""

    name: str  # as in reports, run names and rows
    source: str
    module: Callable[[], ModuleType]
    member: str = "load"
    inner: str | None = None

    def load(self, **options: Any) -> Taskset:
        """Its taskset. Raises EnvironmentUnusable with one line for anything that goes wrong."""
        what = f"the environment {self.name!r} ({self.source})"
        try:
            module = self.module()
            load = getattr(module, self.member, None)
            if load is None:
                raise EnvironmentUnusable(
                    f"{what} has no function {self.member}(): it returns the taskset (docs/environments.md)"
                )
            taskset = load(**options) if self.inner is None else load(self.inner, **options)
        except EnvironmentUnusable:
            raise
        # The environment's code and libraries may raise anything.
        except Exception as error:
            raise EnvironmentUnusable(f"{what} cannot be loaded: {one_line(error)}") from error
        if not isinstance(taskset, Taskset):
            gave = f"{self.member}() gave a {type(taskset).__name__}, not a Taskset (docs/environments.md)"
            raise EnvironmentUnusable(f"{what}: {gave}")
        if wrong := _limits_fault(taskset):
            raise EnvironmentUnusable(f"{what}: {wrong}")
        taskset.name = self.name
        return taskset


def _limits_fault(taskset: Taskset) -> str | None:
    turns, seconds = taskset.max_turns, taskset.timeout_s
    if not isinstance(turns, int) or turns < 1:
        return f"max_turns is a number of turns, 1 or more, not {turns!r}"
    if not isinstance(seconds, int | float) or not seconds > 0:
        return f"timeout_s is a number of seconds above 0, not {seconds!r}"
    return None


def canonical(name: str) -> str:
    """A name as it is looked up: `vf_wordle`, `vf-wordle` and `Wordle` are one. A family's names stay."""
    family, colon, inner = name.partition(":")
    plain = family.strip().lower().replace("_", "-").removeprefix("vf-")
    return f"{plain}{colon}{inner}"


def find(name: str, folder: str | Path | None = None) -> Found:
    """The environment of this name, also in the user's `folder`. Raises EnvironmentUnusable."""
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
    if (target := ALIASES.get(wanted)) is not None:
        return find(target, folder)
    for family in FAMILIES:
        for one in family_names(family):
            if canonical(one) == wanted:
                return _of_family(family, one)
    raise _unknown(name, folder)


def names(folder: str | Path | None = None) -> list[str]:
    """Every environment once. Tasksets of a family are `family:name`."""
    plain = [found.name for places in (_own(folder), _built_in(), _installed()) for found in places]
    of_families = [f"{family}:{name}" for family in FAMILIES for name in family_names(family)]
    return [*dict.fromkeys([*sorted(plain), *of_families])]


def own_names(folder: str | Path) -> list[str]:
    """The environments in the user's own folder."""
    return [found.name for found in _own(folder)]


def family_names(family: str) -> list[str]:
    """The names a family has after its colon. Empty without its library."""
    return list(importlib.import_module(FAMILIES[family]).names())


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
    if folder is None or not (root := Path(folder).resolve()).is_dir():
        return
    # In the checkout this folder is our package, and the built-in ones are imported as such.
    modules = [module.split(".") for module in (*BUILT_IN.values(), *FAMILIES.values())]
    here = {path[1] for path in modules if path[0] == __package__} | set(_INTERFACE)
    ours = here if root == _HERE else set()
    for path in sorted(root.iterdir()):
        file = _module_file(path)
        if file is None or path.stem in ours:
            continue
        yield Found(canonical(path.stem), str(path), _loading(file))


def _module_file(path: Path) -> Path | None:
    """The file to import: a single file, a folder's `__init__.py`, or a module with the folder's name."""
    if path.name.startswith(("_", ".")):
        return None
    if path.is_file():
        return path if path.suffix == ".py" else None
    under = path.name.replace("-", "_")
    candidates = (path / "__init__.py", path / f"{under}.py", path / under / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _loading(file: Path) -> Callable[[], ModuleType]:
    """Imports a file under a name that no other module has."""

    def load() -> ModuleType:
        stem = (file.parent.name if file.name == "__init__.py" else file.stem).replace("-", "_")
        name = f"drzero_environment_{stem}"
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(file):
            return known
        return module_of(file, name)

    return load


def module_of(file: Path, name: str) -> ModuleType:
    """Import a file that ends in .py under this name. Raises whatever its code raises."""
    places = [str(file.parent)] if file.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=places)
    assert spec is not None and spec.loader is not None  # a file with the suffix .py has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # first: its dataclasses and submodules look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _installed() -> Iterator[Found]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        module, _, member = entry.value.partition(":")
        source = f"the package {entry.dist.name}" if entry.dist is not None else entry.value
        yield Found(canonical(entry.name), source, _importing(module), member or "load")


def _of_family(family: str, inner: str) -> Found:
    module = FAMILIES[family]
    return Found(shown(f"{family}:{inner}"), module, _importing(module), inner=inner)


def shown(name: str) -> str:
    """A name as in reports and run names: an agent's file without its folders."""
    return re.sub(r"/\S*/", "", name)
