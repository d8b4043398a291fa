"""Load an agent and its items. Modules are searched in the current folder first, as for a script.

load_agent("my_agent.py:answer", {}), load_items(Path("questions.jsonl"))
"""

import asyncio
import importlib
import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pyarrow.parquet as pq

from environments.agent.contract import Agent, Endpoint
from environments.fault import EnvironmentUnusable, one_line
from environments.registry import module_of
from search.sources.files import Hints
from search.sources.records import Bad, read_jsonl

COMMAND = "command:"
_Play: TypeAlias = Callable[[Any, Endpoint], Awaitable[Any]]
EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "List 3 countries and their capitals."}]}


def is_class(name: str) -> bool:
    """Whether a name is a class and not an environment."""
    return "." in name or (":" in name and not name.startswith("verifiers:"))


def load_agent(name: str, options: Mapping[str, Any]) -> Agent:
    """Load `module:name`, `module.name`, `path.py:name` or `command: WORDS`. Raises EnvironmentUnusable.

    A function is called with `options` too. A class gets them when it is made.
    """
    if name.startswith(COMMAND):
        return Agent(name, partial(_run_command, _words(name)))
    place, _, member = name.partition(":") if ":" in name else name.rpartition(".")
    if not place or not member:
        raise EnvironmentUnusable(f"{name!r} names no agent: write module:function, or path.py:function")
    module = _from_file(Path(place), name) if place.endswith(".py") else _imported(place, name)
    found = getattr(module, member, None)
    if not callable(found):
        raise EnvironmentUnusable(f"{name}: {place} has no function or class {member!r}; {_found_in(module)}")
    play = _of_class(name, found, options) if isinstance(found, type) else _of_function(name, found, options)
    return Agent(name, play, Path(_source(found) or str(module.__file__)).resolve())


def _words(name: str) -> list[str]:
    try:
        words = shlex.split(name.removeprefix(COMMAND))
    except ValueError as error:
        raise EnvironmentUnusable(f"{name}: {error}") from error
    program = words[0] if words else ""
    if shutil.which(program) is None:
        raise EnvironmentUnusable(f"{name}: there is no program {program!r} here")
    return words


def _source(found: Callable[..., Any]) -> str | None:
    try:
        return inspect.getfile(inspect.unwrap(found))
    except TypeError:  # a functools.partial
        return None


def _found_in(module: ModuleType) -> str:
    own = vars(module).items()
    classes = sorted(one for one, value in own if isinstance(value, type) and hasattr(value, "run"))
    functions = sorted(one for one, value in own if inspect.iscoroutinefunction(value))
    there = [*functions, *classes]
    return (
        f"it has {', '.join(there)}" if there else "it has no async function and no class with a method run"
    )


def _of_function(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> _Play:
    _check(name, function, "async def agent(task, endpoint)", {}, Endpoint("", ""), **options)
    return partial(function, **options)


def _of_class(name: str, cls: type, options: Mapping[str, Any]) -> _Play:
    run = getattr(cls, "run", None)
    wanted = "async def run(self, data, **extra_kwargs)"
    if not callable(run):
        raise EnvironmentUnusable(f"{name} has no method run: an agent has `{wanted}`")
    _check(f"{name}.run", run, wanted, None, {}, **vars(Endpoint("", "")))
    _check_fits(name, cls, "its constructor gets the agent's options alone", **options)

    async def play(task: Any, endpoint: Endpoint) -> Any:
        return await cls(**options).run(task, **vars(endpoint))

    return play


def _check(name: str, function: Callable[..., Any], wanted: str, *arguments: Any, **named: Any) -> None:
    if not inspect.iscoroutinefunction(function):
        raise EnvironmentUnusable(f"{name} is not async: an agent is `{wanted}`")
    _check_fits(name, function, f"an agent is `{wanted}`", *arguments, **named)


def _check_fits(name: str, called: Callable[..., Any], wanted: str, *arguments: Any, **named: Any) -> None:
    try:
        inspect.signature(called).bind(*arguments, **named)
    except TypeError as error:
        raise EnvironmentUnusable(f"{name} does not fit ({error}): {wanted}") from error


async def _run_command(words: Sequence[str], task: Any, endpoint: Endpoint) -> Any:
    """Raises RuntimeError with the end of its standard error. What it started ends with it."""
    env = {**os.environ, **endpoint.environ}
    # Not asyncio's: uvloop, which veRL's workers use, starts no process in two loops at once.
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, process_group=0
    )
    try:
        out, err = await asyncio.to_thread(process.communicate, json.dumps(task).encode())
    finally:
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        said = err.decode(errors="replace").strip()[-300:]
        raise RuntimeError(f"the command exited with {process.returncode}: {said}")
    last = out.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError as error:
        raise RuntimeError(f"the command's last line is no reward: {last[:100]!r}") from error


def _imported(module: str, name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module inside the agent's code is a fault of that code.
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise EnvironmentUnusable(
                f"{name}: there is no module {module!r} here or among the packages"
            ) from error
        raise EnvironmentUnusable(f"{name} cannot be imported: {one_line(error)}") from error
    # Any error in the user's code is reported in one line with its place. A script may also exit.
    except (Exception, SystemExit) as error:
        raise EnvironmentUnusable(f"{name} cannot be imported: {one_line(error)}") from error


def _from_file(file: Path, name: str) -> ModuleType:
    if not file.is_file():
        raise EnvironmentUnusable(f"{name}: there is no file {file}")
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # so it can import its neighbours, like a script
        sys.path.insert(0, folder)
    try:
        return module_of(file.resolve(), f"drzero_agent_{file.stem}")
    # As above.
    except (Exception, SystemExit) as error:
        raise EnvironmentUnusable(f"{name} cannot be imported: {one_line(error)}") from error


def load_items(file: Path) -> list[Any]:
    """The rows of a .jsonl or .parquet file, at least one. Raises EnvironmentUnusable."""
    try:
        if file.suffix == ".parquet":
            items = pq.read_table(file).to_pylist()
        elif file.suffix == ".jsonl":
            items = _json_lines(file)
        else:
            raise EnvironmentUnusable(f"tasks={file}: give a .jsonl or .parquet file")
    except (OSError, ValueError) as error:
        raise EnvironmentUnusable(f"tasks={file} cannot be read: {error}") from error
    if not items:
        raise EnvironmentUnusable(f"tasks={file} has no items")
    return items


def _json_lines(file: Path) -> list[Any]:
    items = []
    for number, item in read_jsonl(file, Hints()):
        if not isinstance(item, dict):
            why = item.why if isinstance(item, Bad) else f"{type(item).__name__}, not a JSON object"
            raise EnvironmentUnusable(f"tasks={file}, line {number}: {why}")
        items.append(item)
    return items
