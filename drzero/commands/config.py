"""`drzero config [KEY]`: our config keys with type, default and range, and the results they change.

    drzero config                           every key, a line each
    drzero config retrieval                 the keys of a group
    drzero config retrieval.topk            one key in full
    drzero config --write docs/config.md    all of them, as a page

veRL's keys are not listed: its own YAML files explain them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from drzero.ops.errors import UserError
from drzero.ops.files import atomic_write
from drzero.ops.text import nearest, suggest
from drzero.recipe.compose import CONFIG_DIR
from drzero.recipe.settings import verl
from drzero.recipe.settings.key import Key, as_yaml, at
from drzero.recipe.settings.schema import all_keys, group_docs, schema_of
from drzero.recipe.tables import console, new_table

_HEAD = """# The keys of a config

Set a key with `KEY=VALUE` on the command line. `drzero config KEY` prints one in full, with the stages whose
results it changes. veRL's own keys (`actor_rollout_ref`, `trainer`, …) are in its YAML files.
`drzero config --write docs/config.md` writes this page.

Below a key's default and meaning, in italics, are its range and other values that files of `config/` set.
"""

_SEEN = re.compile(
    "^(text(, or null)?|true or false|a mapping|a list of texts|any value"
    "|a( whole)? number( above 0$| at least [01]$)?)(?= at | above |$)"
)
_IN_SIGNS = {"a whole number": "integer", "a number": "number", "at least": "≥", "at most": "≤", "above": ">"}
_LONGEST = 120  # characters of such values in a row; `drzero config KEY` shows longer ones

_Row = tuple[Key, tuple[str, ...]]
"""A key and the stages that have it."""


class NoSuchKey(UserError):
    """Neither a key nor a group of ours has that name."""


def run_config(arguments: Sequence[str]) -> None:
    """Print all keys, a group's keys, or one in full. With `--write FILE`, write the page."""
    if len(arguments) == 2 and arguments[0] == "--write":
        atomic_write(Path(arguments[1]), as_markdown())
        return
    if len(arguments) > 1 or arguments[:1] == ["--write"]:
        raise NoSuchKey("drzero config takes one key or group, or --write FILE")
    wanted = "".join(arguments)
    wanted = verl.ALIASES.get(wanted, wanted)
    rows = {key.name: (key, stages) for key, stages in all_keys()}
    found = [rows[name] for name in rows if not wanted or f"{name}.".startswith(f"{wanted}.")]
    if not found:
        same = [name for name in rows if name.rpartition(".")[2] == wanted.rpartition(".")[2]]
        hint = suggest(same or nearest(wanted, [*rows, *group_docs()], n=2))
        raise NoSuchKey(f"no key or group of ours is named {wanted!r}{hint}")
    if len(found) == 1:
        for name, text in _facts(*found[0]):
            console().print(f"{name:<9}{text}")
        return
    table = new_table(None, "key", "takes", "default", "changes")
    for key, stages in found:
        table.add_row(key.name, key.allowed, _default(key, stages), _changes(key, stages) or "–")
    console().print(table)


def as_markdown() -> str:
    """`docs/config.md`: a list per group."""
    sections: dict[str, list[_Row]] = {}
    for key, stages in all_keys():
        title = key.name.partition(".")[0] if "." in key.name else _title(stages[:1])
        sections.setdefault(title, []).append((key, stages))
    docs, lines = group_docs(), [_HEAD]
    for title, rows in sections.items():
        lines += [f"## {title}", "", *([_linked(docs[title]), ""] if title in docs else [])]
        for (doc, *facts), same in groupby(rows, _description):
            lines += ["  \n".join(_entry(same, doc, facts)), ""]  # two spaces at the end of a line break it
    return "\n".join(lines)


def _entry(same: Iterable[_Row], doc: str, facts: Sequence[str]) -> Iterator[str]:
    """Keys with one description, on a line with their defaults; what they do; and the rest in italics."""
    yield ", ".join(f"**`{key.name}`** `{_default(key, stages)}`" for key, stages in same)
    yield _linked(doc)
    if facts:
        yield f"*{'. '.join(facts)}.*"


def _description(row: _Row) -> tuple[str, ...]:
    return row[0].limits.doc, *_facts_in_short(row[0])


def _facts_in_short(key: Key) -> Iterator[str]:
    """Its range, and the files that set it."""
    if takes := _limits(key):
        yield takes
    others = ((f"`{value}`", file) for file, value in set_by(key.name) if value != as_yaml(key.default))
    elsewhere = _each_once(others)
    if elsewhere and len(elsewhere) < _LONGEST:
        yield elsewhere


def _limits(key: Key) -> str:
    """A key's range, less what its default or its description shows."""
    if key.limits.choices and all(choice in key.limits.doc for choice in key.limits.choices):
        return ""
    unseen = _SEEN.sub("", key.allowed)
    takes = key.allowed if unseen.endswith("null") else unseen
    if key.default is None or "null" in key.limits.doc:
        takes = takes.removesuffix(", or null")
    for words, sign in _IN_SIGNS.items():
        takes = takes.replace(words, sign)
    return re.sub(r"≥ (\S+) and ≤ (\S+)", r"\1 to \2", takes).strip()


def _linked(text: str) -> str:
    """The names of pages in a description, as links with the pages' titles."""
    return re.sub(r"docs/([\w-]+)\.md", lambda name: f"[{_page_title(name[1])}]({name[1]}.md)", text)


def _page_title(name: str) -> str:
    with (CONFIG_DIR.parent / "docs" / f"{name}.md").open(encoding="utf-8") as page:
        return page.readline().strip("# \n")


def _title(stages: tuple[str, ...]) -> str:
    return ", ".join(stage.replace("_", "-") for stage in stages) or "every stage"


def _facts(key: Key, stages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield "key", key.name
    yield "", key.limits.doc
    yield "takes", key.allowed
    yield "default", _default(key, stages)
    for file, value in set_by(key.name):
        yield "", f"{value} in config/{file}"
    yield "stages", _title(stages)
    yield "changes", _changes(key, stages) or "no results"
    names = [verls for verls, ours in verl.ALIASES.items() if ours == key.name]
    if names:
        yield "in veRL", ", ".join(names)


def _default(key: Key, stages: tuple[str, ...]) -> str:
    defaults = {stage: as_yaml(schema_of(stage)[key.name].default) for stage in stages}
    if len(set(defaults.values())) > 1:
        return _each_once((value, _title((stage,))) for stage, value in defaults.items())
    return as_yaml(key.default)


def _each_once(values: Iterable[tuple[str, str]]) -> str:
    """Values, each with all its places in brackets."""
    places: dict[str, list[str]] = {}
    for value, place in values:
        places.setdefault(value, []).append(place)
    return ", ".join(f"{value} ({', '.join(found)})" for value, found in places.items())


def _changes(key: Key, stages: tuple[str, ...]) -> str:
    """The stages whose results the key can change, with a star if it changes single conversations."""
    keys = [schema_of(stage)[key.name] for stage in stages] or [key]
    results = dict.fromkeys(stage for one in keys for stage in one.limits.results)
    words = [f"{stage}{'*' if stage in key.limits.journal else ''}" for stage in results]
    return ", ".join([*words, *(["run"] if key.limits.run else [])])


def set_by(name: str) -> Iterator[tuple[str, str]]:
    """The files of `config/` that set a key, each with the value."""
    for file, tree in _files().items():
        value = at(tree, name, {})
        if not isinstance(value, dict):
            yield file, as_yaml(value)


@cache
def _files() -> dict[str, Any]:
    paths = {str(path.relative_to(CONFIG_DIR)): path for path in sorted(CONFIG_DIR.rglob("*.yaml"))}
    return {
        name: yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if not name.startswith("runs/")
    }
