"""How large the library is and how it hangs together: files, functions, imports, words.

    python -m bench.house                      # this checkout
    python -m bench.house ef11530 .            # before and after: git revisions or directories
    python -m bench.house ef11530 . --configs  # composes the configs too (needs the environment, 10 s each)
    python -m bench.house --once drzero/loop # the private functions there that are used once, by line

Prints a Markdown table next to the same measures of four public code bases. The library is what ships: tests,
bench and config are left out.
"""

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("verl_ext", "search", "data", "environments", "drzero")
LAUNCHERS = ("modal_train.py", "modal_search.py")
BOXED = ("drzero", "search", "verl_ext")
"""Rooms whose inner imports are counted."""
DIALECT = ("told", "tell", "look", "anew", "beside", "whoever", "goes on")
"""Words to avoid: the field says log, report, poll, again, next to, caller, resumes."""

ANCHORS: Mapping[str, Mapping[str, str]] = {
    "tinker-cookbook": {
        "files": "294",
        "lines": "80,077",
        "lines of a file, median / p90": "207 / 553",
        "lines of a function, median / p90 / max": "13 / 46 / 384",
        "functions with a return type": "76 %",
        "public functions and classes with a docstring": "71 %",
        "private functions used once, of all functions": "13 %",
    },
    "verifiers": {
        "files": "376",
        "lines": "73,850",
        "lines of a file, median / p90": "99 / 496",
        "lines of a function, median / p90 / max": "11 / 48 / 416",
        "functions with a return type": "89 %",
        "public functions and classes with a docstring": "45 %",
        "private functions used once, of all functions": "13 %",
    },
    "prime-rl": {
        "files": "214",
        "lines": "48,117",
        "lines of a file, median / p90": "119 / 606",
        "lines of a function, median / p90 / max": "9 / 41 / 669",
        "functions with a return type": "71 %",
        "public functions and classes with a docstring": "37 %",
        "private functions used once, of all functions": "12 %",
    },
    "nanochat": {
        "files": "29",
        "lines": "6,715",
        "lines of a file, median / p90": "222 / 499",
        "lines of a function, median / p90 / max": "10 / 47 / 147",
        "functions with a return type": "6 %",
        "public functions and classes with a docstring": "46 %",
        "private functions used once, of all functions": "6 %",
    },
}
"""Library code of public repositories, measured 2026-11 by these rules (copies of July and August 2026)."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: its path within the checkout, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[Function]:
        """All functions and methods, inner ones too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @property
    def is_description(self) -> bool:
        """Whether it is the `__init__.py` of a package and holds at most a docstring."""
        return self.path.name == "__init__.py" and len(self.tree.body) <= 1

    @property
    def name(self) -> str:
        """The module's dotted name."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def used_once(self) -> list[Function]:
        """The private functions and methods that their own file names once, apart from the definition."""
        nodes = list(ast.walk(self.tree))
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        return [each for each in self.functions if _is_private(each.name) and uses[each.name] == 1]

    def imports(self) -> Iterator[str]:
        """The dotted names that it imports, anywhere in the file; `from a import b` gives a and a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def read_library(checkout: Path) -> list[Module]:
    """The library's files that are not empty, in order of their paths."""
    in_rooms = chain.from_iterable(sorted((checkout / room).rglob("*.py")) for room in ROOMS)
    modules = []
    for path in (*in_rooms, *(checkout / name for name in LAUNCHERS)):
        if path.is_file() and (text := path.read_text(encoding="utf-8")).strip():
            modules.append(Module(path.relative_to(checkout), text, ast.parse(text)))
    return modules


def measure(checkout: Path) -> dict[str, str]:
    """All measures of a checkout that need no more than its files, by name."""
    modules = read_library(checkout)
    functions = [each for module in modules for each in module.functions]
    public = [
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    ]
    once = sum(len(module.used_once()) for module in modules)
    lines = [len(module.text.splitlines()) for module in modules if not module.is_description]
    lengths = [(each.end_lineno or each.lineno) - each.lineno + 1 for each in functions]
    return {
        "files": str(len(modules)),
        "files that only describe a package": str(sum(module.is_description for module in modules)),
        "lines": f"{sum(len(module.text.splitlines()) for module in modules):,}",
        "lines of a file, median / p90": f"{statistics.median_low(lines)} / {_p90(lines)}",
        "lines of a function, median / p90 / max": (
            f"{statistics.median_low(lengths)} / {_p90(lengths)} / {max(lengths)}"
        ),
        "functions": f"{len(functions):,}",
        "functions with a return type": _share(each.returns is not None for each in functions),
        "public functions and classes with a docstring": _share(
            bool(ast.get_docstring(each)) for each in public
        ),
        "private functions used once, of all functions": f"{_percent(once / len(functions))} ({once})",
        **dict(_import_measures(modules)),
        **{f'"{word}" in text, in names': _occurrences(word, modules) for word in DIALECT},
    }


def _share(answers: Iterator[bool]) -> str:
    known = list(answers)
    return _percent(sum(known) / len(known))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _p90(values: Sequence[int]) -> int:
    return sorted(values)[int(0.9 * len(values))]


def _occurrences(word: str, modules: Sequence[Module]) -> str:
    """How often a word stands alone, and how often as a part of a name such as `_told`."""
    text = "\n".join(module.text for module in modules)
    alone = len(re.findall(rf"\b{word}\b", text))
    return f"{alone}, {len(re.findall(rf'(?<![A-Za-z]){word}(?![A-Za-z])', text)) - alone}"


# --- imports -----------------------------------------------------------------------------------------------

Arrows = set[tuple[str, str]]


def _import_measures(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """The imports between rooms, and between the modules and the boxes inside some rooms.

    Imports inside functions count. A box is a module or a sub-package directly in its room.
    """
    by_name = {module.name: module for module in modules if not module.is_description}
    arrows = {
        (name, imported)
        for name, module in by_name.items()
        for imported in module.imports()
        if imported in by_name and imported != name
    }
    yield "rooms: number, arrows, circles", _graph(by_name, arrows, depth=1)
    for room in BOXED:
        names = [name for name in by_name if name.startswith(f"{room}.")]
        inner = {arrow for arrow in arrows if arrow[0] in names and arrow[1] in names}
        yield f"modules of {room}: number, arrows, circles", _graph(names, inner, depth=9)
        yield f"boxes of {room}: number, arrows, circles", _graph(names, inner, depth=2)


def _graph(names: Iterable[str], arrows: Arrows, depth: int) -> str:
    """Number of nodes, arrows and circles, with the names cut to `depth` parts; the circles by name."""
    cut = {name: ".".join(name.split(".")[:depth]) for name in names}
    between = {(cut[one], cut[other]) for one, other in arrows if cut[one] != cut[other]}
    found = circles(between)
    named = "".join(f" ({' ↔ '.join(sorted(circle))})" for circle in found)
    return f"{len(set(cut.values()))}, {len(between)}, {len(found)}{named}"


def circles(arrows: Arrows) -> list[set[str]]:
    """The groups of nodes that reach each other along the arrows."""
    reached: dict[str, set[str]] = {node: set() for arrow in arrows for node in arrow}
    for node in reached:
        waiting = [node]
        while waiting:
            current = waiting.pop()
            new = {end for start, end in arrows if start == current} - reached[node]
            reached[node] |= new
            waiting += new
    groups = {
        frozenset(other for other in reached[node] if node in reached[other])
        for node in reached
        if node in reached[node]
    }
    return [set(group) for group in groups]


# --- configs -----------------------------------------------------------------------------------------------

_COUNT_KEYS = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from drzero.recipe.compose import compose_stage, verl_config

def keys(node, prefix=""):
    for name in node:
        child = None if node._get_node(name)._is_missing() else node._get_node(name)
        if isinstance(child, DictConfig) and len(child):
            yield from keys(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"

with initialize_config_dir(verl_config().removeprefix("file://"), version_base=None):
    verl = set(keys(compose("ppo_trainer")))
found = {stage: set(keys(compose_stage(stage, ["hardware=cpu"]))) for stage in sys.argv[1:]}
print(json.dumps({stage: [len(own - verl), len(own & verl)] for stage, own in found.items()}))
"""


def config_measures(checkout: Path) -> dict[str, str]:
    """How many keys some stages compose, ours and veRL's; composed by the checkout's own code."""
    stages = ("challenger", "merge", "serve_search")
    command = [sys.executable, "-c", _COUNT_KEYS, *stages]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"cannot compose the configs of {checkout}: {done.stderr.strip().splitlines()[-1]}")
    counts = json.loads(done.stdout.splitlines()[-1])
    return {f"config keys of {stage}, ours and veRL's": "{}, {}".format(*counts[stage]) for stage in stages}


# --- the command line --------------------------------------------------------------------------------------


@contextmanager
def checkout_of(source: str) -> Iterator[Path]:
    """The directory of that name, or else the files of that git revision in a temporary one."""
    if Path(source).is_dir():
        yield Path(source).resolve()
        return
    archive = subprocess.run(["git", "archive", source], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"{source} is no directory and no git revision: {archive.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
        yield Path(folder)


def table(measured: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Markdown: a line a measure, a column a checkout, then the anchors."""
    columns = {**measured, **ANCHORS}
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in next(iter(measured.values())):
        yield f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |"


def used_once(checkout: Path, room: str) -> Iterator[str]:
    """`file:line name` of each private function in a room (a folder or a file) that is used once there."""
    checkout = checkout.resolve()
    for module in read_library(checkout):
        if (checkout / room).resolve() in ((checkout / module.path), *(checkout / module.path).parents):
            yield from (f"{module.path}:{each.lineno} {each.name}" for each in module.used_once())


def main() -> None:
    """Print the table, or the private functions of a room that are used once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkouts", nargs="*", default=["."], help="directories or git revisions")
    parser.add_argument("--configs", action="store_true", help="count the keys of composed configs too")
    parser.add_argument("--once", metavar="ROOM", help="list the private functions of a folder used once")
    args = parser.parse_args()
    if args.once:
        found = list(used_once(ROOT, args.once))
        print(*found, f"{len(found)} private functions used once in {args.once}", sep="\n")
        return
    measured = {}
    for source in args.checkouts:
        with checkout_of(source) as checkout:
            name = "working tree" if Path(source).is_dir() else source
            measured[name] = measure(checkout) | (config_measures(checkout) if args.configs else {})
    print(*table(measured), sep="\n")


if __name__ == "__main__":
    main()
