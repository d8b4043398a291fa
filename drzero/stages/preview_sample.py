"""Choose the documents a preview indexes: some for prompts, then documents they name, then random ones.

    sample = sample_corpus(corpus, size=300, about=40, seed=42)
    prepare_data(config, sample.corpus, sample.about)

A random sample lacks what its documents name, so no question of several hops could be asked.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from data.leaks import words_of
from search.sources.corpus import Corpus, Reading
from search.sources.document import Document

_SHORTEST_TITLE = 4  # Characters. A shorter title occurs in many texts by chance.


@dataclass(frozen=True)
class SampledCorpus(Corpus):
    """A corpus that yields only some of its documents."""

    ids: frozenset[str] = frozenset()

    def read(self, reading: Reading | None = None) -> Iterator[tuple[int, Document]]:
        """Yield those documents with their numbers in the whole corpus."""
        return ((number, document) for number, document in super().read(reading) if document.id in self.ids)


@dataclass(frozen=True)
class CorpusSample:
    """The chosen documents, and how many they are chosen from."""

    corpus: SampledCorpus
    about: frozenset[str]  # their ids are for prompts
    total: int
    named: int  # chosen documents that another one names


def sample_corpus(corpus: Corpus, size: int, about: int, seed: int) -> CorpusSample:
    """Choose `size` documents, `about` of them for prompts, in two passes. Raises CorpusError."""
    rng, reading = random.Random(f"{seed}/preview"), Reading()
    first: list[str] = []
    chosen: list[Document] = []
    total = 0
    for total, (_, document) in enumerate(corpus.read(reading), start=1):
        if total <= size:
            first.append(document.id)
        if len(chosen) < about:
            chosen.append(document)
        elif (place := rng.randrange(total)) < about:
            chosen[place] = document
    corpus.check(reading)
    if total <= size:
        return CorpusSample(_some_of(corpus, first), frozenset(first), total, 0)
    chosen = chosen[:size]
    ids = {document.id for document in chosen}
    named, others = _around(corpus, chosen, size - len(chosen), rng)
    taken = _some_of(corpus, [*ids, *named, *others])
    return CorpusSample(taken, frozenset(ids), total, len(named))


def _around(
    corpus: Corpus, chosen: list[Document], room: int, rng: random.Random
) -> tuple[list[str], list[str]]:
    """Ids of the documents the chosen ones name, and of random others, `room` in all."""
    ids = {document.id for document in chosen}
    texts = f" {' '.join(word for document in chosen for word in words_of(document.text))} "
    named: list[str] = []
    others: list[str] = []
    for number, (_, document) in enumerate(corpus.read(), start=1):
        if document.id in ids:
            continue
        if len(named) < room and _is_named(document.title, texts):
            named.append(document.id)
        elif len(others) < room:
            others.append(document.id)
        elif room and (place := rng.randrange(number)) < room:
            others[place] = document.id
    return named, others[: room - len(named)]


def _is_named(title: str, texts: str) -> bool:
    words = " ".join(words_of(title))
    return len(words) >= _SHORTEST_TITLE and f" {words} " in texts


def _some_of(corpus: Corpus, ids: list[str]) -> SampledCorpus:
    settings = {field.name: getattr(corpus, field.name) for field in fields(Corpus)}
    return SampledCorpus(**settings, ids=frozenset(ids))
