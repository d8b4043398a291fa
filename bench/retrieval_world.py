"""The corpus and queries of bench/retrieval.py: a demo world, its one-fact questions, and their repeats.

Queries are a search agent's for one hop: "Where was Mara Tesk born?", or "the birthplace of Mara Tesk". Every
eighth has unusual characters (accents, full-width letters, another script, an emoji). All are distinct.

A stream numbers the requests of all clients, and `query_number` maps a request to its query:

* `distinct` never repeats a query.
* `same` repeats one query, to measure a server's cost around encoder and index.
* `groups` asks like five solver attempts at one question, four searches each, with shared words at a
  probability of 0.8. The best possible hit rate is 0.6.
"""

import json
import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.demo_world import World
from data.world_language import RELATIONS

Stream = Literal["distinct", "groups", "same"]

ATTEMPTS = 5
SEARCHES = 4
SHARED = 0.8
ODD_EVERY = 8


def query_number(stream: Stream, request: int) -> int:
    """Return the number of a request's query. `request` counts over all clients, from 0."""
    if stream != "groups":
        return request if stream == "distinct" else 0
    attempt, search = divmod(request, SEARCHES)
    group, member = divmod(attempt, ATTEMPTS)
    own = random.Random(f"{attempt}/{search}").random() >= SHARED
    # Numbers of a group: its shared searches, then each member's own.
    place = SEARCHES * (1 + member) + search if own else search
    return group * SEARCHES * (1 + ATTEMPTS) + place


def request_number(client: int, clients: int, turn: int) -> int:
    """Return the number of a client's request: clients take attempts in turn, four searches each."""
    attempt, search = divmod(turn, SEARCHES)
    return (attempt * clients + client) * SEARCHES + search


QUERIES_FILE = "questions.jsonl"


@dataclass(frozen=True)
class Queries:
    """The distinct queries of a world, with relations and names mixed.

    `titles` name the passages with the answers.
    """

    texts: list[str]
    titles: list[str]

    @classmethod
    def of(cls, world: World, seed: int) -> "Queries":
        """Return queries for every fact in every wording."""
        rng = random.Random(f"queries/{seed}")
        asked = sorted(set(_wordings(world)))
        rng.shuffle(asked)
        texts, titles = zip(*asked, strict=True)
        return cls(
            [_odd(text, place) if place % ODD_EVERY == 0 else text for place, text in enumerate(texts)],
            list(titles),
        )

    @classmethod
    def read(cls, path: Path) -> "Queries":
        """Read what `write` wrote."""
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        return cls([text for text, _ in rows], [title for _, title in rows])

    def write(self, path: Path) -> None:
        """Write one query with its title per line, as JSON."""
        rows = zip(self.texts, self.titles, strict=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def _wordings(world: World) -> Iterator[tuple[str, str]]:
    for subject, relation in world.facts:
        words, name = RELATIONS[relation], world.name(subject)
        for wording in (*words.asks, *words.means):
            yield wording.format(x=name), name
        yield f"{name} {relation.replace('_', ' ')}", name


def _odd(text: str, place: int) -> str:
    """Return the question in unusual characters, such as people and models type."""
    kind = place // ODD_EVERY % 4
    if kind == 0:
        return "".join(unicodedata.normalize("NFC", c + "\u0301") if c in "aeiou" else c for c in text)
    if kind == 1:
        return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)
    if kind == 2:
        return f"{text} (ответьте, пожалуйста; 请回答)"
    return f"🔎 {text} 🙏🏽"
