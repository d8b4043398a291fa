"""Whether a question gives its answer away, openly or in disguise. Texts are compared by appearance."""

import re
import unicodedata
from collections.abc import Sequence

from verl_ext.method.answers import normalize_answer, space_characters

_LOOK_ALIKES = str.maketrans(
    "\u0430\u0432\u0435\u043a\u043c\u043d\u043e\u0440\u0441\u0442\u0443\u0445\u0455\u0456\u0458\u0501\u051b"
    "\u051d\u04bb\u04cf\u03b1\u03b2\u03b5\u03b9\u03ba\u03bd\u03bf\u03c1\u03c4\u03c5\u03c7\u03b3\u0131",
    "abekmhopctyxsijdqwhlabeikvoptuxyi",
)
"""Small letters, each with its Latin look-alike, from Unicode's confusables.txt (UTS 39)."""
_ARTICLES = frozenset(("a", "an", "the"))
_PLURAL = re.compile(r"(?<=..)(?:ies|(?<=[sxz])es|(?<=[cs]h)es|(?<![su])s)$")
_STEM_LETTERS = 5  # A longer word that begins with such an answer gives it away, as Parisian does Paris
_PART_LETTERS = 4  # a part of a name gives the name away from this length on
_UNITS = (
    *("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_FILLERS = frozenset(("and", "oh", "o", "hundred", "thousand"))
_ROMAN = (
    ("", "m", "mm"),
    ("", "c", "cc", "ccc", "cd", "d", "dc", "dcc", "dccc", "cm"),
    ("", "x", "xx", "xxx", "xl", "l", "lx", "lxx", "lxxx", "xc"),
    ("", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix"),
)


def words_of(text: str, *, articles: bool = False) -> list[str]:
    """Return the words of a text by appearance. Each character of a script without spaces is a word."""
    decomposed = unicodedata.normalize("NFKD", text)
    visible = "".join(
        char
        for char in decomposed
        if unicodedata.category(char) != "Cf" and not "\u0300" <= char <= "\u036f"  # the accents
    )
    plain = unicodedata.normalize("NFC", visible.casefold()).translate(_LOOK_ALIKES)
    words = re.findall(r"[^\W_]+", space_characters(plain))
    return words if articles else [word for word in words if word not in _ARTICLES]


def normal_words(text: str) -> list[str]:
    """Return the words of a text's normal form (SQuAD), split as by `words_of`."""
    return words_of(normalize_answer(text))


def length_in_words(words: Sequence[str]) -> float:
    """Return how many words these are: a character of a script without spaces counts two thirds."""
    return len(words) - sum(map(is_unspaced, words)) / 3


def is_unspaced(word: str) -> bool:
    """Whether a word of `words_of` is one character of Hangul or a script without spaces."""
    return not word.isascii() and space_characters(word) != word


def given_away(question: str, answer: str) -> str | None:
    """Return how the question gives its answer away, or None. "art" is not in "starting"."""
    asked, answered = words_of(question), words_of(answer)
    if not answered:
        return None
    ways = {
        "in plain words": _has(_singular(asked), _singular(answered))
        or _begins_a_word(asked, answered, answer),
        "spelt letter by letter": any("".join(answered) in run for run in _spelt(question)),
        "reversed": _has_reversed(asked, answered),
        "with its words in another order": len(answered) > 1
        and any(
            sorted(asked[at : at + len(answered)]) == sorted(answered)
            for at in range(len(asked) - len(answered) + 1)
        ),
        "by a part of the name": _has_part(question, answer),
        "as a year in words or Roman numerals": _has_year(asked, "".join(answered)),
    }
    return next((way for way, is_so in ways.items() if is_so), None)


def _has(words: Sequence[str], run: Sequence[str]) -> bool:
    return f" {' '.join(run)} " in f" {' '.join(words)} "


def _singular(words: Sequence[str]) -> list[str]:
    return [_PLURAL.sub(lambda found: "y" if found[0] == "ies" else "", word) for word in words]


def _begins_a_word(asked: Sequence[str], answered: Sequence[str], answer: str) -> bool:
    is_name = len(answered) == 1 and answer.strip()[:1].isupper() and len(answered[0]) >= _STEM_LETTERS
    return is_name and any(word.startswith(answered[0]) for word in asked)


def _spelt(question: str) -> list[str]:
    text = "".join(word if len(word) == 1 else " " for word in words_of(question, articles=True))
    return [run for run in text.split() if len(run) >= 3]


def _has_reversed(asked: Sequence[str], answered: Sequence[str]) -> bool:
    each = [word[::-1] for word in answered]
    if len("".join(each)) < 4 or each == list(answered):
        return False
    return _has(asked, each) or _has(asked, each[::-1])


def _has_part(question: str, answer: str) -> bool:
    """Whether the question has one word of a name, standing alone (unlike "Bill" in "Bill Clinton")."""
    name = answer.split()
    parts = {
        "".join(words_of(word))
        for word in name
        if word[:1].isupper() and len(word.strip(".,")) >= _PART_LETTERS
    }
    if not 2 <= len(name) <= 4 or not all(word[:1].isupper() for word in name):
        return False
    tokens = list(re.finditer(r"[^\W\d_]+", unicodedata.normalize("NFKC", question)))
    capital = [token[0][0].isupper() for token in tokens]
    adjacent = [tokens[i].end() + 1 == tokens[i + 1].start() for i in range(len(tokens) - 1)]
    for i, token in enumerate(tokens):
        named_before = i > 1 and adjacent[i - 1] and capital[i - 1]  # the first word is always capitalised
        named_after = i < len(adjacent) and adjacent[i] and capital[i + 1]
        if capital[i] and not (named_before or named_after) and "".join(words_of(token[0])) in parts:
            return True
    return False


def _has_year(asked: Sequence[str], year: str) -> bool:
    if not re.fullmatch(r"[12]\d{3}", year):
        return False
    roman = "".join(numerals[int(digit)] for numerals, digit in zip(_ROMAN, year, strict=True))
    thousands, hundreds, rest = int(year[0]), int(year[1]), _in_words(int(year[2:]))
    said = [word for word in asked if word not in _FILLERS]
    forms = [*_in_words(int(year[:2])), *rest], [_UNITS[thousands], *filter(None, [_UNITS[hundreds]]), *rest]
    return roman in asked or any(len(form) > 1 and _has(said, form) for form in forms)


def _in_words(number: int) -> list[str]:
    pair = [_UNITS[number]] if number < 20 else [_TENS[number // 10], _UNITS[number % 10]]
    return [word for word in pair if word]
