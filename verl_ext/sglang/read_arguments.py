"""Write the table of SGLang's server arguments, from its `ServerArgs` (SGLang 0.5.12).

.venv-sglang/bin/python -m verl_ext.sglang.read_arguments      # after `make rehearse-sglang`
"""

import argparse
import dataclasses
from typing import Any

import yaml

from drzero.ops.files import atomic_write
from verl_ext.server_arguments import KINDS, TABLE, Argument
from verl_ext.sglang.compat import PINNED

_KINDS = {"int": "int", "human_readable_int": "int", "float": "float"}
_KINDS |= dict.fromkeys(("loads", "json_list_type"), "json")
"""Kinds by the name of an option's `type`. All others are text."""


def read_arguments(server_args: Any) -> dict[str, Argument]:
    """Every field of `ServerArgs` that has an option, by name."""
    parser = argparse.ArgumentParser(add_help=False)
    server_args.add_cli_args(parser)
    fields = [field.name for field in dataclasses.fields(server_args)]
    found = {}
    for action in parser._actions:
        words = [word.removeprefix("--").replace("-", "_") for word in action.option_strings]
        name = next((one for one in (action.dest, *words) if one in fields), None)
        if name is not None and "Deprecated" not in type(action).__name__:
            found[name] = Argument(
                kind=_kind(action),
                many=action.nargs in ("+", "*"),
                choices=tuple(action.choices or ()),
                option=None if name in words else action.option_strings[0],
            )
    return found


def _kind(action: argparse.Action) -> str:
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    if action.nargs == 0:
        return "flag"
    return _KINDS.get(getattr(action.type, "__name__", ""), "text")


def as_text(arguments: dict[str, Argument], version: str) -> str:
    """The table as its file has it."""
    ordered = dict(sorted(arguments.items()))
    table = {
        "version": version,
        **{kind: [name for name, one in ordered.items() if one.kind == kind] for kind in KINDS},
        "many": [name for name, one in ordered.items() if one.many],
        "options": {name: one.option for name, one in ordered.items() if one.option},
        "choices": {name: list(one.choices) for name, one in ordered.items() if one.choices},
    }
    head = "# Written by `python -m verl_ext.sglang.read_arguments`.\n"
    return head + yaml.safe_dump(table, default_flow_style=None, sort_keys=False, width=118)


if __name__ == "__main__":
    from sglang.srt.server_args import ServerArgs

    atomic_write(TABLE, as_text(read_arguments(ServerArgs), PINNED))
