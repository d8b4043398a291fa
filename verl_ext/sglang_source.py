"""What an SGLang package has, read from its source and never imported.

    source = Source(Path("…/site-packages/sglang"))
    source.symbol("sglang.srt.managers.io_struct:GenerateReqInput")     # True
    source.argument("context_length"), source.route("/health_generate")

Importing SGLang loads CUDA libraries and needs a driver; its source can be read on any machine, of an
unpacked wheel as of an installed package. That a name is there is necessary for code that uses it, not
sufficient: what it does may have changed all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path


class Source:
    """One SGLang package on disk."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the one named `sglang`, which holds `srt/`."""
        self._folder = folder
        self._trees: dict[Path, ast.Module] = {}

    def symbol(self, place: str) -> bool:
        """Whether `module:name` or `module:Class.attribute` is there, re-exports by star imports included."""
        module, _, path = place.partition(":")
        name, _, attribute = path.partition(".")
        statement = self._find(module, name)
        if statement is None or not attribute:
            return statement is not None
        # A class that is imported from elsewhere is looked into there.
        if isinstance(statement, ast.ImportFrom) and statement.module:
            return self.symbol(f"{statement.module}:{path}")
        return isinstance(statement, ast.ClassDef) and attribute in _names(statement.body)

    def argument(self, name: str) -> bool:
        """Whether the server takes the argument: as `--name` or as a field of its arguments' classes."""
        return name in self._fields or f"--{name.replace('_', '-')}" in self._texts_of_arguments

    def route(self, path: str) -> bool:
        """Whether the HTTP server answers at the path."""
        return path in _texts(self._tree("sglang.srt.entrypoints.http_server"))

    def metric(self, name: str) -> bool:
        """Whether the server counts under the name."""
        # They moved in 0.5.10.
        modules = ("sglang.srt.metrics.collector", "sglang.srt.observability.metrics_collector")
        return any(name in _texts(self._tree(module)) for module in modules)

    def _find(self, module: str, name: str) -> ast.stmt | None:
        """The statement that gives a module the name."""
        tree = self._tree(module)
        if tree is None:
            return None
        names = _names(tree.body)
        if name in names:
            return names[name]
        for statement in _statements(tree.body):
            stars = isinstance(statement, ast.ImportFrom) and any(
                each.name == "*" for each in statement.names
            )
            if stars and isinstance(statement, ast.ImportFrom) and statement.module:
                found = self._find(statement.module, name)
                if found is not None:
                    return found
        return None

    def _tree(self, module: str) -> ast.Module | None:
        parts = module.split(".")
        if parts[0] != "sglang":
            return None
        path = self._folder.joinpath(*parts[1:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return self._parse(file)
        return None

    def _parse(self, file: Path) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(file.read_bytes())
        return self._trees[file]

    @cached_property
    def _argument_trees(self) -> list[ast.Module]:
        # From 0.5.21 on the fields are spread over files of their own.
        srt = self._folder / "srt"
        return [
            self._parse(file)
            for file in (srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py")))
        ]

    @cached_property
    def _fields(self) -> set[str]:
        classes = (
            node for tree in self._argument_trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
        )
        return {
            name
            for node in classes
            for name, kind in _names(node.body).items()
            if isinstance(kind, ast.AnnAssign)
        }

    @cached_property
    def _texts_of_arguments(self) -> set[str]:
        return set().union(*map(_texts, self._argument_trees))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import, those under `if` and `try` included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [each for handler in statement.handlers for each in handler.body]
            yield from _statements(statement.body + handlers + statement.orelse)


def _names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What the statements give names to, and by which statement."""
    names: dict[str, ast.stmt] = {}
    for statement in _statements(body):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[statement.name] = statement
            case ast.Import() | ast.ImportFrom():
                names |= {(each.asname or each.name): statement for each in statement.names}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = statement
            case ast.Assign():
                names |= {
                    target.id: statement for target in statement.targets if isinstance(target, ast.Name)
                }
    return names


def _texts(tree: ast.Module | None) -> set[str]:
    """The text constants of a module."""
    nodes = ast.walk(tree) if tree is not None else ()
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
