"""`drzero COMMAND --help`: the command's docstring, and its config keys with their defaults.

    print(command_help("drzero.stages.evaluate.run", "evaluate"))

Neither the command nor Hydra is imported, which takes seconds.
"""

import ast
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from drzero.recipe.settings.key import Key, as_yaml, at
from drzero.recipe.settings.schema import own_keys, schema_of
from environments.registry import BUILT_IN

CONFIG = Path(__file__).resolve().parents[2] / "config"
GROUPS = ("model", "hardware", "compute", "rollout", "mode", "env", "loop")
"""Groups whose option you choose on the command line."""
_WIDTH = (60, 110)


def command_help(module: str, stage: str | None, places: Sequence[str] = ()) -> str:
    """The help of a command in `module`, with keys of `stage`: its own, or all at or below `places`."""
    parts = [docstring(module)]
    if stage is not None:
        parts += stage_keys(stage, places)
    return "\n\n".join(parts)


def docstring(module: str) -> str:
    """A module's docstring, read without importing it."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or module


def stage_keys(stage: str, places: Sequence[str] = ()) -> Iterator[str]:
    """Paragraphs about a stage's keys: listed ones in full, the others by name."""
    schema = schema_of(stage)
    listed = own_keys(stage)
    if places:
        prefixes = tuple(f"{place}." for place in places)
        listed = [key for key in schema.keys.values() if f"{key.name}.".startswith(prefixes)]
    if listed:
        # The stage's own file may set other defaults.
        text = (CONFIG / f"{stage}.yaml").read_text(encoding="utf-8")
        own = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}
        yield "\n".join(["Keys, written KEY=VALUE:", *_entries(listed, own)])
    if not places:
        names = {key.name for key in listed}
        if others := [name for name in schema.changing_results() if name not in names]:
            yield _wrapped("Its results also depend on: ", others)
        if rest := dict.fromkeys(name.partition(".")[0] for name in schema.keys if name not in names):
            yield _wrapped("Other keys and groups of keys: ", rest)
        # A loop chooses for its stages, and nothing else has loop=.
        without = () if stage == "evolve" else ("loop",) if schema.has_verl else ("loop", "mode")
        groups = [group for group in GROUPS if group not in without]
        yield _wrapped("Groups, written GROUP=OPTION: ", (f"{g} ({_options(g, stage)})" for g in groups))
    where = ["`drzero config KEY` has a key in full", "docs/config.md all"]
    if schema.has_verl:
        where.append("veRL's YAML files its own (trainer.…, data.…, actor_rollout_ref.…)")
    yield _wrapped("", where)


def _options(group: str, stage: str) -> str:
    options = ", ".join(sorted(path.stem for path in (CONFIG / group).glob("*.yaml")))
    if group == "model":
        return f"{options}, any hub id or folder"
    if group == "env" and stage in ("train", "evaluate"):  # you cannot train in the corpora
        corpora = [options] if stage == "evaluate" else []
        return ", ".join([*corpora, *sorted(BUILT_IN), "one of your own, verifiers:NAME"])
    return options


def _entries(keys: Iterable[Key], composed: dict[str, Any]) -> Iterator[str]:
    for key in keys:
        default = as_yaml(at(composed, key.name, key.default))
        yield f"\n  {key.name}  ({key.allowed}; default {default})"
        yield textwrap.fill(key.limits.doc, _width(), initial_indent=" " * 6, subsequent_indent=" " * 6)


def _wrapped(head: str, words: Iterable[str]) -> str:
    return textwrap.fill(
        head + ", ".join(words) + ".", _width(), subsequent_indent="  ", break_on_hyphens=False
    )


def _width() -> int:
    low, high = _WIDTH
    return max(low, min(high, shutil.get_terminal_size((high, 24)).columns))
