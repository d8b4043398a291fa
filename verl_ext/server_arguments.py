"""Arguments of a model server as a user sets them: judged without the server, and put on its command line.

    sglang_arguments()["tool_call_parser"].fault("hermse")      # "is 'hermse', not one of …"
    as_words({"page_size": 16}, sglang_arguments())             # ("--page-size", "16")

`sglang/server_arguments.yaml` has SGLang's, of the pinned version: `verl_ext.sglang.read_arguments` writes
it, and `make compat` compares it with the published wheel. The reference engine's are here.
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
_WORDS = {
    **{"flag": "true or false", "switch": "true or false", "int": "a whole number", "float": "a number"},
    **{"text": "text", "json": "a mapping, a list, or JSON as text"},
}
_TYPES: dict[str, tuple[type, ...]] = {
    **{"flag": (bool,), "switch": (bool,), "int": (int,), "float": (int, float)},
    # Hydra reads an unquoted 7 as a number.
    **{"text": (str, int, float), "json": (str, list, dict)},
}


@dataclass(frozen=True)
class Argument:
    """One argument of the server."""

    kind: str
    """A key of `_WORDS`; a flag is given or not, a switch has a `--no-` as well."""
    many: bool = False
    """Whether it takes a list."""
    choices: tuple[Any, ...] = ()
    """The values that it takes; none where any of its kind will do."""
    option: str | None = None
    """What it is called on the command line, where that is not its name."""

    def to_plain(self) -> Any:
        """Its entry in the table: the kind alone where there is nothing else to say."""
        more = {"many": self.many, "choices": list(self.choices), "option": self.option}
        kept = {name: value for name, value in more.items() if value}
        return {"kind": self.kind, **kept} if kept else self.kind

    @classmethod
    def from_plain(cls, entry: Any) -> "Argument":
        """The argument of an entry of the table."""
        if isinstance(entry, str):
            return cls(entry)
        return cls(**{**entry, "choices": tuple(entry.get("choices", ()))})

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value; None if nothing is. null leaves SGLang's own default."""
        if value is None:
            return None
        if self.many and not isinstance(value, list):
            return f"is {value!r}, not a list"
        for one in value if self.many else [value]:
            if self.choices and one not in self.choices:
                meant = did_you_mean(str(one), map(str, self.choices))
                return f"is {one!r}, not one of {', '.join(map(str, self.choices))}{meant}"
            is_truth = isinstance(one, bool) and bool not in _TYPES[self.kind]
            if is_truth or not isinstance(one, _TYPES[self.kind]):
                return f"is {one!r}, not {_WORDS[self.kind]}"
        return None

    def words(self, name: str, value: Any) -> Iterator[str]:
        """It on a command line, with a value that is in order; nothing for null or a flag that is off."""
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
    """Those of the pinned SGLang, by name, in its order."""
    table = yaml.load(TABLE.read_text(encoding="utf-8"), yaml.CSafeLoader)["arguments"]
    return {name: Argument.from_plain(entry) for name, entry in table.items()}


REFERENCE_SERVER = {"seed": Argument("int"), "call_form": Argument("text", choices=tuple(FORMS))}
"""Those of the reference engine's server that no other key sets (verl_ext/engine/api_server.py)."""
REFERENCE_ROLLOUT = {"threads": Argument("int"), "prefix_cache_mib": Argument("int")}
"""What the reference engine's rollout reads (verl_ext/rollout/reference_rollout.py)."""


def as_words(given: Mapping[str, Any], known: Mapping[str, Argument]) -> tuple[str, ...]:
    """Arguments on a command line, each one of the known."""
    return tuple(word for name, value in given.items() for word in known[name].words(name, value))
