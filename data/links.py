"""Estimates how many hops a corpus's documents carry: each leads to those whose title or file name it has."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from search.indexing.chunking import document_of

Entry = tuple[str, str, str]  # id, title and text of an index entry: a document or a chunk of one

LONGEST = 4  # longest chain that is followed
MEASURED = 50_000  # Largest corpus whose links are counted, in entries: its texts are in memory
_LONGEST_NAME = 6  # words
_COMMON = 0.05
_COMMON_WORD = 0.005
_FEW = 20  # in a small corpus, any name may occur in this many entries
_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese."""


def can_be_counted(entries: Sequence[Entry]) -> bool:
    """Whether most letters of a corpus belong to scripts with spaces."""
    letters = sum(sum(map(str.isalpha, text)) for _, _, text in entries)
    return 2 * sum(len(_UNSPACED.findall(text)) for _, _, text in entries) <= letters


def chain_lengths(entries: Sequence[Entry]) -> dict[str, int]:
    """Return, by entry id, the documents in the longest chain from it, including itself, up to `LONGEST`."""
    links = _links(entries)
    onward: dict[str, set[str]] = defaultdict(set)
    for entry, documents in links.items():
        onward[document_of(entry)] |= documents
    return {entry: _longest((document_of(entry),), some, onward) for entry, some in links.items()}


def _longest(chain: tuple[str, ...], further: Iterable[str], onward: Mapping[str, set[str]]) -> int:
    """Documents that a chain can reach without repetition. Stops at the first of full length."""
    longest = len(chain)
    for document in further if longest < LONGEST else ():
        if document not in chain:
            longest = max(longest, _longest((*chain, document), onward.get(document, ()), onward))
        if longest == LONGEST:
            break
    return longest


def _links(entries: Sequence[Entry]) -> dict[str, set[str]]:
    names = _names(entries)
    # Look names up by first word, because most words begin no name.
    first: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for name in names:
        first[name[0].casefold()].append(name)
    found: dict[str, set[tuple[str, ...]]] = {}
    for entry, _, text in entries:
        words = [match[0] for match in _WORD.finditer(text)]
        folded = [word.casefold() for word in words]
        found[entry] = {
            name
            for place, word in enumerate(folded)
            for name in first.get(word, ())
            if _is_here(name, words[place : place + len(name)], folded[place : place + len(name)])
        }
    times = Counter(name for some in found.values() for name in some)
    common = {name for name, count in times.items() if count > max(_common(name) * len(entries), _FEW)}
    return {
        entry: {document for name in some - common for document in names[name]} - {document_of(entry)}
        for entry, some in found.items()
    }


def _names(entries: Sequence[Entry]) -> dict[tuple[str, ...], set[str]]:
    """By name, its documents: titles and file names of at least four letters."""
    names: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for entry, title, _ in entries:
        document = document_of(entry)
        path = PurePosixPath(document)
        is_file = bool(path.suffix) and " " not in document
        is_word = path.stem.isalpha() and path.stem.islower()
        for name in (title, (path.name if is_word else path.stem) if is_file else ""):
            words = tuple(_WORD.findall(name))
            if words and len(words) <= _LONGEST_NAME and len("".join(words)) >= 4:
                names[words].add(document)
    return names


def _common(name: tuple[str, ...]) -> float:
    """Share of entries that may contain a name."""
    return _COMMON_WORD if len(name) == 1 and name[0].islower() else _COMMON


def _is_here(name: tuple[str, ...], words: list[str], folded: list[str]) -> bool:
    """Whether these words are a name. One word must match in case too ("Reply" is not "reply")."""
    return list(name) == words if len(name) == 1 else [word.casefold() for word in name] == folded
