"""The names in an SGLang package, read from its source because importing SGLang needs a driver.

source = Source(Path("…/site-packages/sglang"))
source.symbol("sglang.srt.managers.io_struct:GenerateReqInput")     # True
source.argument("context_length"), source.route("/health_generate")
"""

import ast
import functools
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
        return name in self._arguments

    def route(self, path: str) -> bool:
        """Whether the HTTP server answers at the path."""
        return path in _texts(self.tree("sglang.srt.entrypoints.http_server"))

    def metric(self, name: str) -> bool:
        """Whether the server exports the metric."""
        return name in _texts(self.tree("sglang.srt.observability.metrics_collector"))

    @functools.cached_property
    def _arguments(self) -> set[str]:
        srt = self._folder / "srt"
        names: set[str] = set()
        # From 0.5.21 on the fields are spread over several files.
        for file in (srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))):
            tree = _parse(file)
            names |= {text[2:].replace("-", "_") for text in _texts(tree) if text.startswith("--")}
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    fields = _names(node.body).items()
                    names |= {name for name, kind in fields if isinstance(kind, ast.AnnAssign)}
        return names

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


def _texts(tree: ast.Module | None) -> set[str]:
    nodes = ast.walk(tree) if tree is not None else ()
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
