"""Arguments of a model server as a user sets them, checked without the server and put on its command line.

A laptop must refuse a misspelt argument too, so `verl_ext.sglang.read_arguments` wrote SGLang's into a table.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drzero.ops.text import did_you_mean
from environments.call import FORMS

TABLE = Path(__file__).parent / "sglang" / "server_arguments.yaml"
KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "flag": ("true or false", (bool,)),
    "switch": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    # Hydra reads an unquoted 7 as a number.
    "text": ("text", (str, int, float)),
    "json": ("a mapping, a list, or JSON as text", (str, list, dict)),
}
"""Each kind in words, and its types. A flag is given or not. A switch has a `--no-` form too."""


@dataclass(frozen=True)
class Argument:
    """One argument of the server."""

    kind: str  # a key of `KINDS`
    many: bool = False  # takes a list
    choices: tuple[Any, ...] = ()  # the allowed values, empty if all of its kind are
    option: str | None = None  # on the command line, if not its name

    def fault(self, value: Any) -> str | None:
        """Why a value is not allowed, or None. null keeps SGLang's default."""
        words, types = KINDS[self.kind]
        if value is None:
            return None
        if self.many and not isinstance(value, list):
            return f"is {value!r}, not a list"
        for one in value if self.many else [value]:
            if self.choices and one not in self.choices:
                names = [str(choice) for choice in self.choices]
                return f"is {one!r}, not one of {', '.join(names)}{did_you_mean(str(one), names)}"
            if not isinstance(one, types) or (isinstance(one, bool) and bool not in types):
                return f"is {one!r}, not {words}"
        return None

    def words(self, name: str, value: Any) -> Iterator[str]:
        """Its words on a command line, for a valid value; none for null or a flag that is off."""
        option = self.option or f"--{name.replace('_', '-')}"
        if value is None or (self.kind == "flag" and not value):
            return
        if self.kind in ("flag", "switch"):
            yield option if value else option.replace("--", "--no-", 1)
            return
        yield option
        for one in value if self.many else [value]:
            yield json.dumps(one) if isinstance(one, list | dict) else str(one)


@functools.cache
def sglang_arguments() -> dict[str, Argument]:
    """The arguments of the pinned SGLang, by name."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return {
        name: Argument(
            kind, name in table["many"], tuple(table["choices"].get(name, ())), table["options"].get(name)
        )
        for kind in KINDS
        for name in table[kind]
    }


REFERENCE_SERVER = {"seed": Argument("int"), "call_form": Argument("text", choices=("auto", *FORMS))}
"""Arguments of the reference engine's server that no other key sets (verl_ext/engine/api_server.py)."""
VLLM_SERVER = {"tool_call_parser": Argument("text")}
"""Arguments of vLLM's server that no other key sets (drzero/stages/services.py)."""
REFERENCE_ROLLOUT = {"threads": Argument("int"), "prefix_cache_mib": Argument("int")}
"""Arguments of the reference engine's rollout (verl_ext/rollout/reference_rollout.py)."""


def as_words(given: Mapping[str, Any], known: Mapping[str, Argument]) -> tuple[str, ...]:
    """Known arguments as words of a command line."""
    return tuple(word for name, value in given.items() for word in known[name].words(name, value))
