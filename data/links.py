"""How many hops the documents of a corpus can carry: which of them lead to which others.

    chains = chain_lengths(entries)        # by entry: how many documents the longest chain from it has

A question of h hops goes from document to document, so one of 4 hops needs a chain of 4. A document leads to
those whose names its text contains: their titles, or the names of their files, which links in Markdown have;
a file's name that is a plain word, as that of functional.html, counts with its suffix alone. That is an
estimate: names that a twentieth of the documents contain, and words in small letters that one in two hundred
does ("memory", in a dictionary), lead nowhere in particular, and count as none; what is only paraphrased is
not seen. In a script without spaces a name is no word of its own: there links are not counted at all.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from search.indexing.chunking import document_of

Entry = tuple[str, str, str]
"""Id, title and text of an entry of the index: a document or a chunk of one."""

LONGEST = 4
"""Documents of a chain that is followed."""
MEASURED = 50_000
"""Entries of the largest corpus whose links are counted: its texts are in memory, each word is looked up."""
_LONGEST_NAME = 6  # words
_COMMON = 0.05
_COMMON_WORD = 0.005
_FEW = 20
"""Entries that may contain any name, in a small corpus."""
_WORD = re.compile(r"\w+(?:[-'’]\w+)*")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Letters of Thai, Lao, Burmese, Khmer, Japanese and Chinese."""


def can_be_counted(entries: Sequence[Entry]) -> bool:
    """Whether the links of a corpus can be counted: most of its letters are of a script with spaces."""
    letters = sum(sum(map(str.isalpha, text)) for _, _, text in entries)
    return 2 * sum(len(_UNSPACED.findall(text)) for _, _, text in entries) <= letters


def chain_lengths(entries: Sequence[Entry]) -> dict[str, int]:
    """By an entry's id, how many documents the longest chain from it has, it included; at most `LONGEST`."""
    links = _links(entries)
    onward: dict[str, set[str]] = defaultdict(set)
    for entry, documents in links.items():
        onward[document_of(entry)] |= documents
    return {entry: _longest((document_of(entry),), some, onward) for entry, some in links.items()}


def _longest(chain: tuple[str, ...], further: Iterable[str], onward: Mapping[str, set[str]]) -> int:
    """How many documents a chain reaches, none of them twice; the first of full length ends the search."""
    longest = len(chain)
    for document in further if longest < LONGEST else ():
        if document not in chain:
            longest = max(longest, _longest((*chain, document), onward.get(document, ()), onward))
        if longest == LONGEST:
            break
    return longest


def _links(entries: Sequence[Entry]) -> dict[str, set[str]]:
    """By entry, the documents that its text names, without its own and those whose names are everywhere."""
    names = _names(entries)
    # By the first word: of most words no name begins.
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
    """The documents of each name: a title, or a file's name, of at least four letters."""
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
    """The share of the entries that may contain a name."""
    return _COMMON_WORD if len(name) == 1 and name[0].islower() else _COMMON


def _is_here(name: tuple[str, ...], words: list[str], folded: list[str]) -> bool:
    """Whether these words are a name: one word to the letter, as "Reply" is not "reply"; more in any case."""
    return list(name) == words if len(name) == 1 else [word.casefold() for word in name] == folded
