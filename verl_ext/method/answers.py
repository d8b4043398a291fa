"""Answers as text: extract them, normalize them as SQuAD does, compare them.

exact_match(extract_last_tag(after_thinking(text), "answer"), ["Marie Curie"])
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from functools import cache, lru_cache
from itertools import pairwise

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

# Scripts without spaces: Thai and Lao, Myanmar, Khmer, kana, Han. Hangul's particles attach to words.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\uac00-\ud7a3"
)
_CHARACTER = re.compile(rf"[{_UNSPACED}][^\w\s]*")  # combining marks stay with their letter
# 5,000 and 3.14, but not the date 14.07.1789 nor the list 1,2,3.
_NUMBER = re.compile(
    r"(?<!\d)(?<!\d[.,，])"
    r"(?:\d{1,3}(?:[.,，'’\u00a0\u2009\u202f]\d{3})+(?:[.,，]\d+)?|\d+[.,，]\d+)(?![.,，]?\d)"
)

# A number in an answer: a sign that joins no words, and digits with marks between them.
_FIGURE = re.compile(r"((?<![\w)])[-−])?((?:(?<![\w.])\.)?\d+(?:[.,'’-]\d+)*)")
_NUMBER_ALONE = re.compile(rf"\s*(?!0\d){_FIGURE.pattern}\.?\s*")  # 007 is a name
# 1,914 and 1.914 are 1914, 1,914.5 and 3,14 have decimals.
_PARTS = re.compile(r"([1-9]\d{0,2}(?:[.,'’]\d{3})+|\d*)(?:[.,](\d+))?")
_SYMBOLS = re.compile(r"[+#%$*=<>^~|@\\/&]|\d-\d")  # ASCII signs that words seldom have, and ranges


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", _without_punctuation(text)).split())


def _without_punctuation(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def exact_match(prediction: str | None, targets: Sequence[str]) -> bool:
    """Whether the prediction equals a target after normalization. None never does."""
    return prediction is not None and any(_equal(prediction, target) for target in targets)


def same_answer(prediction: str | None, targets: Sequence[str]) -> bool:
    """An exact match with numbers as numbers: -5 is not 5, 3.14 is not 314, and 1,914.0 is 1914."""
    return prediction is not None and any(_same(prediction, target) for target in targets)


def f1(prediction: str | None, targets: Sequence[str]) -> float:
    """Best token F1 in [0, 1] against the targets (SQuAD). 0 for None."""
    if prediction is None:
        return 0.0
    return max((_token_f1(prediction, target) for target in targets), default=0.0)


def lost_in_comparison(target: str) -> str | None:
    """What a target is compared as, if it loses a number's marks or symbols. Else None."""
    figures = _FIGURE.finditer(target)
    marked = any(_value(each) != Decimal("".join(filter(str.isdigit, each[0]))) for each in figures)
    is_lost = marked or _SYMBOLS.search(target) or not normalize_answer(target)
    return _forms("", target)[1] if is_lost else None


def _forms(prediction: str, target: str) -> tuple[str, str]:
    """Both in SQuAD's form. Articles stay if the target has no other words, symbols if it has no words."""
    for form in (normalize_answer, _without_punctuation, str.casefold):
        if form(target):
            break
    return form(prediction), form(target)


def _equal(prediction: str, target: str) -> bool:
    ours, theirs = _forms(prediction, target)
    return bool(theirs) and ours == theirs


def _same(prediction: str, target: str) -> bool:
    ours, theirs = ([_value(each) for each in _FIGURE.finditer(text)] for text in (prediction, target))
    if _equal(prediction, target):
        return len(ours) != len(theirs) or ours == theirs
    alone = all(_NUMBER_ALONE.fullmatch(text) for text in (prediction, target))
    return alone and ours == theirs


def _value(figure: re.Match[str]) -> Decimal:
    parts = _PARTS.fullmatch(figure[2])
    whole, decimals = parts.groups() if parts else (figure[2], None)
    digits = "".join(filter(str.isdigit, whole)) or "0"
    return Decimal(f"{'-' if figure[1] else ''}{digits}.{decimals or 0}")


def _token_f1(prediction: str, target: str) -> float:
    ours, theirs = map(str.split, _forms(prediction, target))
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def contains_answer(text: str, answer: str) -> bool:
    """Whether the text has the answer's words in sequence. False for an answer without words.

    In either reading: punctuation removed ("U.S." is "us"), or as spaces ("Oslo’s" contains "Oslo").
    """
    readings = zip(_readings(answer), _readings(text), strict=True)
    return any(words and f" {words} " in f" {whole} " for words, whole in readings)


def space_characters(text: str) -> str:
    """The text with spaces around each character of Hangul or a script without spaces."""
    return _CHARACTER.sub(r" \g<0> ", text)


@lru_cache(maxsize=1024)
def _readings(text: str) -> tuple[str, str]:
    numbers = _NUMBER.sub(lambda number: "".join(filter(str.isdigit, number[0])), text)
    split = unicodedata.normalize("NFKC", "".join(map(_boundary, numbers)))
    return normalize_answer(unicodedata.normalize("NFKC", text)), normalize_answer(space_characters(split))


@cache
def _boundary(char: str) -> str:
    """Punctuation and symbols become spaces around their letters (№, ™), invisible characters ""."""
    category = unicodedata.category(char)
    if category == "Cf":
        return ""
    if category[0] not in "PS" and category != "No":
        return char
    letters = (each if each.isalnum() else " " for each in unicodedata.normalize("NFKC", char))
    return f" {''.join(letters)} "


def extract_last_tag(text: str, tag: str) -> str | None:
    """The stripped content of the last `<tag>…</tag>` without another such tag inside, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    tags = list(re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text))
    for one, other in reversed(list(pairwise(tags))):
        if (one[0], other[0]) == (opening, closing):
            return text[one.end() : other.start()].strip()
    return None
