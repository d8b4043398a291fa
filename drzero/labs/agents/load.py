"""Load an agent and its items. Modules are searched in the current folder first, as for a script.

load_agent("my_agent:MyAgent", {}), load_items(Path("questions.jsonl"))
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq

from drzero.labs.agents.contract import AgentClass
from drzero.recipe.errors import CheckError
from environments.fault import one_line
from search.sources.files import Hints
from search.sources.records import Bad, read_jsonl

EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "List 3 countries and their capitals."}]}


def is_class(name: str) -> bool:
    """Whether a name is a class and not an environment."""
    return "." in name or (":" in name and not name.startswith("verifiers:"))


def load_agent(name: str, options: Mapping[str, Any]) -> AgentClass:
    """Load `module:Class`, `module.Class` or `path.py:Class`. Raises CheckError unless it is an agent."""
    place, _, member = name.partition(":") if ":" in name else name.rpartition(".")
    if not place or not member:
        raise CheckError(f"{name!r} names no class: write module:Class, module.Class or path.py:Class")
    module = _from_file(Path(place), name) if place.endswith(".py") else _imported(place, name)
    cls = getattr(module, member, None)
    if not isinstance(cls, type):
        found = sorted(
            one for one, value in vars(module).items() if isinstance(value, type) and hasattr(value, "run")
        )
        there = f"it has {', '.join(found)}" if found else "it has no class with a method run"
        raise CheckError(f"{name}: {place} has no class {member!r}; {there}")
    _check_run(name, cls)
    return AgentClass(name, lambda: cls(**options), Path(inspect.getfile(cls)).resolve().parent)


def _check_run(name: str, cls: type) -> None:
    wanted = "an agent has `async def run(self, data, **extra_kwargs)`"
    run = getattr(cls, "run", None)
    if not callable(run):
        raise CheckError(f"{name} has no method run: {wanted}")
    if not inspect.iscoroutinefunction(run):
        raise CheckError(f"{name}.run is not async: {wanted}")
    try:
        inspect.signature(run).bind(None, {}, base_url="", api_key="")
    except TypeError as error:
        raise CheckError(
            f"{name}.run does not take data, base_url and api_key ({error}): {wanted}"
        ) from error


def _imported(module: str, name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module inside the agent's code is a fault of that code.
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise CheckError(f"{name}: there is no module {module!r} here or among the packages") from error
        raise CheckError(f"{name} cannot be imported: {one_line(error)}") from error
    # Any error in the user's code is reported in one line with its place.
    except Exception as error:
        raise CheckError(f"{name} cannot be imported: {one_line(error)}") from error


def _from_file(file: Path, name: str) -> ModuleType:
    if not file.is_file():
        raise CheckError(f"{name}: there is no file {file}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # so it can import its neighbours, like a script
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(f"drzero_agent_{file.stem}", file.resolve())
    assert spec is not None and spec.loader is not None  # it is a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs, as its dataclasses look there
    try:
        spec.loader.exec_module(module)
    # As above.
    except Exception as error:
        raise CheckError(f"{name} cannot be imported: {one_line(error)}") from error
    return module


def load_items(file: Path) -> list[Any]:
    """The rows of a .jsonl or .parquet file. Raises CheckError for any other, empty or broken file."""
    try:
        if file.suffix == ".parquet":
            items = pq.read_table(file).to_pylist()
        elif file.suffix == ".jsonl":
            items = _json_lines(file)
        else:
            raise CheckError(f"data={file}: give a .jsonl or .parquet file")
    except (OSError, ValueError) as error:
        raise CheckError(f"data={file} cannot be read: {error}") from error
    if not items:
        raise CheckError(f"data={file} has no items")
    return items


def _json_lines(file: Path) -> list[Any]:
    items = []
    for number, item in read_jsonl(file, Hints()):
        if not isinstance(item, dict):
            why = item.why if isinstance(item, Bad) else f"{type(item).__name__}, not a JSON object"
            raise CheckError(f"data={file}, line {number}: {why}")
        items.append(item)
    return items
