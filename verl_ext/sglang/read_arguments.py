"""The arguments of SGLang's server, read from its source into the table that preflight judges by.

    python -m verl_ext.sglang.read_arguments FOLDER     # FOLDER/srt/server_args.py, of the pinned version

A field of `ServerArgs` is an argument; its command line option says of what kind it is, and what values it
takes. Nothing of SGLang is imported: that needs a driver. A list of choices is followed to where it is
written down, in this module or another; one that is computed is left open.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from drzero.ops.files import atomic_write
from verl_ext.server_arguments import TABLE, Argument
from verl_ext.sglang.compat import PINNED
from verl_ext.sglang.source import Source

MODULE = "sglang.srt.server_args"
_KINDS = {
    **{"int": "int", "human_readable_int": "int", "float": "float", "str": "text", "nullable_str": "text"},
    **{"json.loads": "json", "json_list_type": "json"},
}
"""Kind by the `type` of an option."""


def read_arguments(source: Source) -> dict[str, Argument]:
    """Every field of `ServerArgs`, in its order, with what its option says.

    Raises ValueError for a package whose arguments are written down in another way.
    """
    tree = source.tree(MODULE)
    found = (node for node in (tree.body if tree else ()) if isinstance(node, ast.ClassDef))
    cls = next((node for node in found if node.name == "ServerArgs"), None)
    if cls is None:
        raise ValueError(f"{MODULE} has no class ServerArgs: this is no SGLang like {PINNED}")
    fields = [ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)]
    options = {}
    for words, given in _options(cls):
        named = [_text(given.get("dest")), *(word.removeprefix("--").replace("-", "_") for word in words)]
        name = next((one for one in named if one in fields), None)
        if name is not None and "Deprecated" not in _action(given):
            options[name] = _argument(name, words, given, source)
    return {name: options[name] for name in fields if name in options}


def _options(cls: ast.ClassDef) -> Iterator[tuple[list[str], dict[str, ast.expr]]]:
    """The options of the command line, each with its names and what else it is declared with."""
    for call in ast.walk(cls):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
            words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
            yield words, {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _argument(name: str, words: list[str], given: dict[str, ast.expr], source: Source) -> Argument:
    action = _action(given)
    if "store_true" in action:
        kind = "flag"
    elif "BooleanOptional" in action:
        kind = "switch"
    else:
        kind = _KINDS[ast.unparse(given["type"])] if "type" in given else "text"
    own = f"--{name.replace('_', '-')}"
    return Argument(
        kind=kind,
        many=_text(given.get("nargs")) in ("+", "*"),
        choices=_choices(given.get("choices"), source, MODULE),
        option=None if own in words else words[0],
    )


def _action(given: dict[str, ast.expr]) -> str:
    return ast.unparse(given["action"]) if "action" in given else ""


def _text(node: ast.expr | None) -> str | None:
    return str(node.value) if isinstance(node, ast.Constant) else None


def _choices(node: ast.AST | None, source: Source, module: str) -> tuple[Any, ...]:
    """The choices that an expression stands for; none where it is computed."""
    try:
        return tuple(_value(node, source, module)) if node is not None else ()
    except (LookupError, TypeError):
        return ()


def _value(node: ast.AST, source: Source, module: str) -> Any:
    """A literal, a name for one, a sum, or a mapping's keys; raises LookupError for anything else."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(each, source, module) for each in node.elts]
        case ast.Set():
            return sorted(_value(each, source, module) for each in node.elts)
        case ast.Dict():
            return [_value(each, source, module) for each in node.keys if each is not None]
        case ast.BinOp(op=ast.Add()):
            return _value(node.left, source, module) + _value(node.right, source, module)
        case ast.Call(
            func=ast.Name(id="list"), args=[ast.Call(func=ast.Attribute(attr="keys", value=inner))]
        ):
            return _value(inner, source, module)
        case ast.Name():
            return _named(node.id, source, module)
        case ast.Attribute(value=ast.Name(id=owner)):
            return _named(owner, source, module, node.attr)
    raise LookupError(ast.unparse(node))


def _named(name: str, source: Source, module: str, attribute: str | None = None) -> Any:
    """What a name of a module stands for, or an attribute of the class of that name."""
    tree = source.tree(module)
    for node in ast.walk(tree) if tree else ():
        match node:
            case ast.ImportFrom(module=str(other)) if name in [alias.name for alias in node.names]:
                return _named(name, source, other, attribute)
            case ast.ClassDef() if attribute and node.name == name:
                for inner in node.body:
                    if isinstance(inner, ast.AnnAssign | ast.Assign) and inner.value is not None:
                        targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                        if attribute in [ast.unparse(target) for target in targets]:
                            return _value(inner.value, source, module)
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name and not attribute:
                return _value(node.value, source, module)
    raise LookupError(f"{module}:{name}")


def as_text(arguments: dict[str, Argument], version: str) -> str:
    """The table as its file has it: an argument a line."""
    head = "# Written by `python -m verl_ext.sglang.read_arguments`.\n"
    values = {"version": version, "arguments": {name: one.to_plain() for name, one in arguments.items()}}
    return head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=118)


if __name__ == "__main__":
    atomic_write(TABLE, as_text(read_arguments(Source(Path(sys.argv[1]))), PINNED))
