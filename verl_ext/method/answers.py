"""Answers as text: extract them, normalize them as SQuAD does, compare them.

exact_match(extract_last_tag(after_thinking(text), "answer"), ["Marie Curie"])
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
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


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces (SQuAD)."""
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def exact_match(prediction: str | None, targets: Sequence[str]) -> bool:
    """Whether the prediction equals a target after normalization. None never does."""
    if prediction is None:
        return False
    normal = normalize_answer(prediction)
    return any(normal == normalize_answer(target) for target in targets)


def f1(prediction: str | None, targets: Sequence[str]) -> float:
    """Best token F1 in [0, 1] against the targets (SQuAD). 0 for None."""
    if prediction is None:
        return 0.0
    return max((_token_f1(prediction, target) for target in targets), default=0.0)


def _token_f1(prediction: str, target: str) -> float:
    ours, theirs = normalize_answer(prediction).split(), normalize_answer(target).split()
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
