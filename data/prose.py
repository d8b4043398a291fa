"""Which parts of a text can be asked about: sentences, but not code, tables or lists of links."""

import re
import unicodedata
from itertools import groupby

from search.indexing.boundaries import SENTENCE_END

_RUN = 5  # Words in a row, without numbers, that make a sentence. Fewer are a label, a cell or arguments
_UNSPACED = 10  # letters in a row that make a sentence in a script without spaces
_WORD = re.compile(
    r"[(\[{<\"'“‘«„*_`¿¡]*"
    r"(?:[^\W\d_]+(?:[-'’/\u00ad][^\W\d_]+)*|\d[\d.,]*\w?)"
    r"[)\]}>\"'”’»*_`,;:.!?…।،؛؟]*"
)
_FENCE = re.compile(r"^[ \t>]*(?:`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)
"""Also captures the language, which only an opening fence has."""
_COMMENT = re.compile(r"(?:^|(?<=\s))(?://+|/\*+|#{1,6})[ \t][^\n]*", re.MULTILINE)
_LEADS_ON = re.compile(r"(?:[:：][\"'”’)*_`]*|(?:\A|\n)#{1,6} [^\n]+)\Z")
"""A colon or a heading at the end of a text."""


def prose_share(text: str, enough: float = 1.0) -> float:
    """Return the share of a text's characters, without white space, in sentences. Counts up to `enough`."""
    total = sum(map(len, text.split()))
    if not total:
        return 0.0
    readings = [_COMMENT.sub(" | ", some) for some in _outside_fences(text)]
    return max(_sentences(reading, enough * total) for reading in readings) / total


def _outside_fences(text: str) -> list[str]:
    """The text outside fences. If the text may begin inside a fence, both readings."""
    parts = _FENCE.split(text)
    texts, languages = parts[0::2], parts[1::2]
    readings = [" | ".join(texts[0::2]), " | ".join(texts[1::2])]
    opening = next((number for number, language in enumerate(languages) if language), None)
    return readings if opening is None else [readings[opening % 2]]


def _sentences(text: str, enough: float) -> int:
    prose = 0
    for is_word, run in groupby(text.split(), _is_word):
        some = list(run)
        is_sentence = is_word and sum(any(map(str.isalpha, word)) for word in some) >= _RUN
        prose += sum(len(word) for word in some if is_sentence or _is_unspaced(word))
        if prose >= enough:
            break
    return prose


def _is_word(text: str) -> bool:
    # To a regular expression, Hindi vowel signs and separate accents are no letters.
    letters = text if text.isascii() else "".join(c for c in text if unicodedata.category(c)[0] != "M")
    return _WORD.fullmatch(letters) is not None


def _is_unspaced(word: str) -> bool:
    return sum(letter.isalpha() and not letter.isascii() for letter in word) >= _UNSPACED


def without_lead_in(text: str) -> str:
    """Return the text without a last sentence or heading that only introduces the next part."""
    shown = text.rstrip()
    while _LEADS_ON.search(shown):
        last = shown.rfind("\n\n") + 1
        ends = [end for match in SENTENCE_END.finditer(shown[last:-1]) if (end := match.end())]
        # Keep an exact beginning of the text, because prompts are compared with the index.
        shown = shown[: last + (ends[-1] if ends else 0)].rstrip()
        if not shown:
            return text
    return shown
