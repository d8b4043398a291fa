"""Find where to cut a text: after sections, paragraphs or sentences, not in a fence or table that fits."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

from search.sources.text_formats import PARSED, blocks

# No sentence ends after a list item's number, an initial or a common abbreviation.
_ABBREVIATED = "".join(
    rf"(?<!\b{word})"
    for word in (r"\d", r"\d\d", "[A-Z]", r"e\.g", r"i\.e", "[DM]r", "Mrs", "St", "vs", "cf")
)
SENTENCE_END = re.compile(rf"{_ABBREVIATED}[.!?…][\"'”’)\]]*\s+(?![a-z\s])|[。！？]")
PARAGRAPH_END = re.compile(r"\n[ \t\r]*\n\s*(?!\s)")
LINE_END = re.compile(r"\n")
WORD_END = re.compile(r"\s")
_BLANK = re.compile(r"\s*")
_WHOLE = ("fence", "code_block", "table_open")
_BLOCKS = ("paragraph_open", "list_item_open", "blockquote_open", "html_block", "hr", *_WHOLE)


class Span(NamedTuple):
    """A part of a text, from `start` to before `end`."""

    start: int
    end: int


class Cut(NamedTuple):
    """A place to cut at. Unless `is_end`, the cut tears a sentence."""

    place: int
    is_end: bool
    is_section: bool = False


class Boundaries:
    """Good places to cut a text at."""

    def __init__(self, text: str, markdown: bool) -> None:
        self.text = text
        self._sections: list[int] = []  # starts of headings
        self._blocks: list[int] = []  # starts of other blocks
        self._whole: list[Span] = []  # fences, tables, headings with the first character below, in order
        if markdown and len(text) <= PARSED:  # a longer one is split as plain text
            self._read(text)

    def _read(self, text: str) -> None:
        for token, start, end in blocks(text):
            if token.type == "heading_open":
                self._sections.append(start)
                below = _BLANK.match(text, end)
                self._whole.append(Span(start, min((below.end() if below else end) + 1, len(text))))
            elif token.type in _BLOCKS:
                self._blocks.append(start)
                if token.type in _WHOLE:
                    self._whole.append(Span(start, end))

    def cut(self, start: int, most: int, fits: Callable[[Span], bool]) -> Cut:
        """Return the best end in (`start`, `most`] of a part, or beyond it the end of a fence that `fits`."""
        torn = self._around(most)
        if torn is not None and torn.start >= start and fits(torn):
            if torn.start == start:
                return Cut(torn.end, True)
            # Headings above it may follow one another.
            place = torn.start
            while (heading := self._around(place)) is not None and heading.start > start:
                place = heading.start
            return Cut(place, True, _last_of(self._sections, place, place) is not None)
        middle = start + max((most - start) // 2, 1)
        for places in (self._sections, self._blocks):
            begin = _last_of(places, middle, most)
            if begin is not None and self._around(begin) is None:
                return Cut(begin, True, places is self._sections)
        # An early end of a sentence is better than a torn one.
        early = start + max((most - start) // 8, 1)
        for pattern, least in ((PARAGRAPH_END, middle), (SENTENCE_END, middle), (SENTENCE_END, early)):
            if (end := self._last(pattern, start, least, most)) is not None:
                return Cut(end, True)
        for pattern in (LINE_END, WORD_END):
            if (end := self._last(pattern, start, middle, most, torn)) is not None:
                return Cut(end, False)
        return Cut(max(most, start + 1), False)

    def beginning(self, least: int, end: int) -> int | None:
        """Return the first place from `least` to before `end` where a paragraph or sentence begins."""
        begins = (
            place
            for pattern in (PARAGRAPH_END, SENTENCE_END)
            for place in self._ends(pattern, max(least - 8, 0), end - 1)
            if place >= least and self._around(place) is None
        )
        return min(begins, default=None)

    def _last(
        self, pattern: re.Pattern[str], start: int, least: int, most: int, torn: Span | None = None
    ) -> int | None:
        """The last end of the pattern from `least` to `most` that tears no whole part but `torn`."""
        places = [place for place in self._ends(pattern, start, most) if place >= least]
        return next((place for place in reversed(places) if self._around(place) in (None, torn)), None)

    def _ends(self, pattern: re.Pattern[str], start: int, most: int) -> Iterator[int]:
        # Text after the end matters too, such as a small letter.
        for match in pattern.finditer(self.text, start, min(most + 2, len(self.text))):
            if start < match.end() <= most:
                yield match.end()

    def _around(self, place: int) -> Span | None:
        until = bisect_left(self._whole, Span(place, 0))
        near = self._whole[max(until - 2, 0) : until]
        return next((span for span in near if place < span.end), None)


def _last_of(places: list[int], least: int, most: int) -> int | None:
    found = bisect_right(places, most)
    return places[found - 1] if found and places[found - 1] >= least else None
