"""The names in an SGLang package, read from its source because importing SGLang needs a driver."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path


class Source:
    """One SGLang package on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def symbol(self, place: str) -> bool:
        """Whether `module:name` or `module:Class.attribute` exists, also through star imports."""
        module, _, path = place.partition(":")
        name, _, attribute = path.partition(".")
        statement = self._find(module, name)
        if statement is None or not attribute:
            return statement is not None
        # An imported class has its attributes in the module that defines it.
        if isinstance(statement, ast.ImportFrom) and statement.module:
            return self.symbol(f"{statement.module}:{path}")
        return isinstance(statement, ast.ClassDef) and attribute in _names(statement.body)

    def argument(self, name: str) -> bool:
        """Whether the server takes the argument, as `--name` or as a field of its classes."""
        srt = self._folder / "srt"
        # From 0.5.21 on the fields are spread over several files.
        files = (srt / "server_args.py", *(srt / "arg_groups").rglob("*.py"))
        declared = re.compile(rf"""["']--{name.replace("_", "-")}["']|^    {name}\s*:""", re.MULTILINE)
        return any(declared.search(_text(file)) for file in files)

    def route(self, path: str) -> bool:
        """Whether the HTTP server answers at the path."""
        return f'"{path}"' in _text(self._folder / "srt" / "entrypoints" / "http_server.py")

    def metric(self, name: str) -> bool:
        """Whether the server exports the metric."""
        return f'"{name}"' in _text(self._folder / "srt" / "observability" / "metrics_collector.py")

    def _find(self, module: str, name: str) -> ast.stmt | None:
        tree = self.tree(module)
        if tree is None:
            return None
        names = _names(tree.body)
        if name in names:
            return names[name]
        imports = (each for each in _statements(tree.body) if isinstance(each, ast.ImportFrom))
        stars = (each.module for each in imports if any(alias.name == "*" for alias in each.names))
        found = (self._find(star, name) for star in stars if star)
        return next((each for each in found if each is not None), None)

    def tree(self, module: str) -> ast.Module | None:
        """A parsed module of the package, or None."""
        package, *parts = module.split(".")
        path = self._folder.joinpath(*parts)
        files = (path.with_suffix(".py"), path / "__init__.py") if package == "sglang" else ()
        return next((_parse(file) for file in files if file.is_file()), None)


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, also under `if` and `try`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [each for handler in statement.handlers for each in handler.body]
            yield from _statements(statement.body + handlers + statement.orelse)


def _names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
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


@functools.cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""
