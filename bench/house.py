"""Measure the library: files, functions, imports, and what `drzero evolve` needs by import.

    python -m bench.house                      # this checkout
    python -m bench.house 53bcbaf .            # before and after: git revisions or directories
    python -m bench.house --once drzero/loop   # the private functions there that are used once

Prints a Markdown table, next to four public code bases. Tests, bench and config do not count.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("verl_ext", "search", "data", "environments", "drzero", "pipeline", "ops", "launch", "policies")
"""The last four are drzero's rooms in revisions up to 53bcbaf."""
APPS = ("modal_train.py", "modal_search.py", "modal_agent.py")
TABLES = ("drzero.cli", "pipeline.cli")
"""The command table names the module of each command."""
COMMANDS = ("evolve", "challenger", "synthesize", "solver", "merge", "evaluate")
"""`drzero evolve` and the stages that it starts."""
NOT_THE_LOOP = {"preflight", "watchdog", "flow", "report"}
"""Rooms, at any depth, that guard or describe a run."""

LINES = "lines"
FILE_SIZES = "lines of a file, median / p90 / max"
FUNCTION_SIZES = "lines of a function, median / p90 / max"
TYPED = "functions with a return type"
DOCUMENTED = "public functions and classes with a docstring"
ONCE = "private functions used once, of private"
_PEER_MEASURES = ("files", LINES, FILE_SIZES, FUNCTION_SIZES, TYPED, DOCUMENTED, ONCE)
PEERS: Mapping[str, tuple[str, ...]] = {
    "verifiers": ("327", "71,660", "121 / 520 / 3601", "11 / 48 / 416", "89 %", "47 %", "60 %"),
    "tinker-cookbook": ("270", "72,598", "192 / 568 / 2176", "13 / 50 / 384", "89 %", "72 %", "57 %"),
    "prime-rl": ("208", "46,780", "117 / 612 / 1616", "9 / 41 / 669", "71 %", "37 %", "62 %"),
    "nanochat": ("28", "6,587", "231 / 499 / 604", "10 / 47 / 147", "6 %", "46 %", "71 %"),
}
"""Library code of public repositories by the same rules, in November 2026."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Arrows = set[tuple[str, str]]


@dataclass(frozen=True)
class Module:
    """One source file: its path within the checkout, its text and its syntax tree."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Lines of text."""
        return len(self.text.splitlines())

    @property
    def functions(self) -> list[Function]:
        """All functions and methods, inner ones too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @property
    def private(self) -> list[Function]:
        """The private functions and methods."""
        return [each for each in self.functions if each.name.startswith("_") and not each.name.endswith("__")]

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
        """The private functions and methods that this file names once, besides the definition."""
        nodes = list(ast.walk(self.tree))
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        return [each for each in self.private if uses[each.name] == 1]

    def imports(self) -> Iterator[str]:
        """The dotted names imported anywhere in the file. `from a import b` gives a and a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def names_in_strings(self) -> Iterator[str]:
        """Strings that may name a module, such as after `python -m`, but not in the command table."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and self.name not in TABLES:
                yield node.value.partition(":")[0]


def read_library(checkout: Path) -> list[Module]:
    """The library's files that are not empty, in order of their paths."""
    in_folders = chain.from_iterable(sorted((checkout / folder).rglob("*.py")) for folder in FOLDERS)
    modules = []
    for path in [*in_folders, *(checkout / name for name in APPS)]:
        if path.is_file() and (text := path.read_text(encoding="utf-8")).strip():
            modules.append(Module(path.relative_to(checkout), text, ast.parse(text)))
    return modules


def measure(checkout: Path) -> dict[str, str]:
    """All measures of a checkout, by name."""
    modules = read_library(checkout)
    functions = [each for module in modules for each in module.functions]
    public = [
        node
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    ]
    once = sum(len(module.used_once()) for module in modules)
    lengths = [(each.end_lineno or each.lineno) - each.lineno + 1 for each in functions]
    return {
        "files": str(len(modules)),
        LINES: f"{sum(module.lines for module in modules):,}",
        FILE_SIZES: _spread([module.lines for module in modules if not module.is_description]),
        FUNCTION_SIZES: _spread(lengths),
        "functions": f"{len(functions):,}",
        TYPED: _share(sum(each.returns is not None for each in functions), len(functions)),
        DOCUMENTED: _share(sum(bool(ast.get_docstring(each)) for each in public), len(public)),
        ONCE: f"{_share(once, sum(len(module.private) for module in modules))} ({once})",
        **dict(_room_measures(modules)),
        **dict(_loop_measures(modules, checkout / "config")),
    }


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f} %"


def _spread(values: Collection[int]) -> str:
    return f"{statistics.median_low(values)} / {sorted(values)[int(0.9 * len(values))]} / {max(values)}"


# --- imports -----------------------------------------------------------------------------------------------


def room_of(name: str) -> str:
    """A module's room: the sub-package or module of drzero, else the top-level package."""
    return ".".join(name.split(".")[: 2 if name.startswith("drzero.") else 1])


def arrows_of(modules: Iterable[Module], with_strings: bool = False) -> Arrows:
    """(importer, imported) by dotted names, imports inside functions included."""
    known = {module.name for module in modules if not module.is_description}
    arrows = set()
    for module in modules:
        names = {*module.imports(), *(module.names_in_strings() if with_strings else ())}
        arrows |= {(module.name, name) for name in names & known - {module.name}}
    return arrows


def _room_measures(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """The modules of each room, and the arrows and circles between rooms and between modules."""
    names = [module.name for module in modules if not module.is_description]
    arrows = arrows_of(modules)
    sizes = Counter(map(room_of, names))
    yield "modules by room", ", ".join(f"{room} {count}" for room, count in sizes.most_common())
    between = {(room_of(one), room_of(other)) for one, other in arrows if room_of(one) != room_of(other)}
    for what, nodes, drawn in (("rooms", sizes, between), ("modules", names, arrows)):
        found = ["↔".join(sorted(circle)) for circle in circles(drawn)]
        count = f"{len(nodes)}, {len(drawn)}, {len(found)}"
        yield f"{what}: number, arrows, circles", f"{count} ({'; '.join(found)})" if found else count


def _loop_measures(modules: Sequence[Module], config: Path) -> Iterator[tuple[str, str]]:
    """The modules that evolve and its stages need: imported at any time, or named in code or configs."""
    by_name = {module.name: module for module in modules if not module.is_description}
    table = "".join(by_name[name].text for name in TABLES if name in by_name)
    starts = set(re.findall(rf'"(?:{"|".join(COMMANDS)})": CliCommand\(\s*"([\w.]+):', table))
    for path in config.rglob("*.yaml"):
        named = re.findall(r"verl_ext[\w./]*", path.read_text(encoding="utf-8"))
        starts |= {name.removesuffix(".py").replace("/", ".") for name in named} & by_name.keys()
    arrows = arrows_of(modules, with_strings=True)
    for label, without in (("", set[str]()), (f" without {', '.join(sorted(NOT_THE_LOOP))}", NOT_THE_LOOP)):
        needed = reached(starts, {arrow for arrow in arrows if not without & set(arrow[1].split("."))})
        lines = sum(by_name[name].lines for name in needed)
        yield f"evolve and its stages need{label}: modules, lines", f"{len(needed)}, {lines:,}"


def reached(starts: Iterable[str], arrows: Arrows) -> set[str]:
    """The starts and all nodes behind them along the arrows."""
    after = defaultdict(set)
    for start, end in arrows:
        after[start].add(end)
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = after[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def circles(arrows: Arrows) -> list[set[str]]:
    """The groups of nodes that reach each other along the arrows."""
    behind = {
        node: reached((end for start, end in arrows if start == node), arrows)
        for node in set(chain.from_iterable(arrows))
    }
    groups = {
        frozenset(other for other in behind[node] if node in behind[other])
        for node in behind
        if node in behind[node]
    }
    return [set(group) for group in groups]


# --- the command line --------------------------------------------------------------------------------------


@contextmanager
def checkout_of(source: str) -> Iterator[Path]:
    """The directory of that name, or else the files of that git revision in a temporary one."""
    if Path(source).is_dir():
        yield Path(source).resolve()
        return
    archive = subprocess.run(["git", "archive", source], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"{source} is neither a directory nor a git revision: {archive.stderr.decode()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder)
        yield Path(folder)


def table(measured: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Markdown: a line a measure, a column a checkout, then the peers."""
    peers = {peer: dict(zip(_PEER_MEASURES, values, strict=True)) for peer, values in PEERS.items()}
    columns = {**measured, **peers}
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name in next(iter(measured.values())):
        yield f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |"


def used_once(checkout: Path, room: str) -> Iterator[str]:
    """`file:line name` of each private function in a room (a folder or a file) that is used once there."""
    checkout = checkout.resolve()
    for module in read_library(checkout):
        if (checkout / module.path).is_relative_to((checkout / room).resolve()):
            yield from (f"{module.path}:{each.lineno} {each.name}" for each in module.used_once())


def main() -> None:
    """Print the table, or the private functions of a room that are used once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="*", default=["."], help="directories or git revisions")
    parser.add_argument("--once", metavar="ROOM", help="list the private functions of a folder used once")
    args = parser.parse_args()
    if args.once:
        found = list(used_once(ROOT, args.once))
        print(*found, f"{len(found)} private functions used once in {args.once}", sep="\n")
        return
    measured = {}
    for source in args.checkouts:
        with checkout_of(source) as checkout:
            measured["working tree" if Path(source).is_dir() else source] = measure(checkout)
    print(*table(measured), sep="\n")


if __name__ == "__main__":
    main()
