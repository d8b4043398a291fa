"""Answers as text: extract them, normalise them as SQuAD does, compare them.

The normal form has lower case, no punctuation, no articles and single spaces.

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
_THINK_END = "</think>"

# Scripts written without spaces: Thai and Lao, Myanmar, Khmer, kana, Han. Hangul has spaces, but its
# particles attach to the words before them, so that whole words would refuse most right answers.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff\uac00-\ud7a3"
)
_CHARACTER = re.compile(rf"[{_UNSPACED}][^\w\s]*")  # marks are no word characters, and stay with their letter
# 5,000 and 3.14, but not the date 14.07.1789 nor the list 1,2,3.
_NUMBER = re.compile(
    r"(?<!\d)(?<!\d[.,，])"
    r"(?:\d{1,3}(?:[.,，'’\u00a0\u2009\u202f]\d{3})+(?:[.,，]\d+)?|\d+[.,，]\d+)(?![.,，]?\d)"
)


def normalize_answer(text: str) -> str:
    """SQuAD's normal form of an answer; applying it twice changes nothing more."""
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def exact_match(prediction: str | None, targets: Sequence[str]) -> bool:
    """Whether the prediction equals one of the targets in normal form; no prediction (None) never does."""
    if prediction is None:
        return False
    normal = normalize_answer(prediction)
    return any(normal == normalize_answer(target) for target in targets)


def f1(prediction: str | None, targets: Sequence[str]) -> float:
    """Best token F1 in [0, 1] of the prediction against the targets (SQuAD); 0 without a prediction."""
    if prediction is None:
        return 0.0
    return max((_token_f1(prediction, target) for target in targets), default=0.0)


def _token_f1(prediction: str, target: str) -> float:
    ours, theirs = normalize_answer(prediction).split(), normalize_answer(target).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def contains_answer(text: str, answer: str) -> bool:
    """Whether the text has the answer's words in sequence; never for an answer without words.

    Two readings, after NFKC; either suffices. In the normal form "U.S." is the word "us". In the other, every
    punctuation mark and symbol of Unicode ends a word ("Oslo’s", "1914–1918", "€5,000") but not a number, and
    so does every character of a script without spaces.
    """
    readings = zip(_readings(answer), _readings(text), strict=True)
    return any(words and f" {words} " in f" {whole} " for words, whole in readings)


def space_characters(text: str) -> str:
    """The text with spaces around each character of a script that is written without, or of Hangul."""
    return _CHARACTER.sub(r" \g<0> ", text)


@lru_cache(maxsize=1024)
def _readings(text: str) -> tuple[str, str]:
    """The text in normal form, and in normal form after its punctuation marks have become spaces."""
    numbers = _NUMBER.sub(lambda number: "".join(filter(str.isdigit, number[0])), text)
    split = unicodedata.normalize("NFKC", "".join(map(_boundary, numbers)))
    return normalize_answer(unicodedata.normalize("NFKC", text)), normalize_answer(space_characters(split))


@cache
def _boundary(char: str) -> str:
    """The character; for a punctuation mark or symbol spaces around its letters (№, ™); "" if invisible."""
    category = unicodedata.category(char)
    if category == "Cf":
        return ""
    if category[0] not in "PS" and category != "No":
        return char
    letters = (each if each.isalnum() else " " for each in unicodedata.normalize("NFKC", char))
    return f" {''.join(letters)} "


def after_thinking(text: str) -> str:
    """The part of a turn after its thinking, so that tags inside the thinking do not count."""
    return text.rpartition(_THINK_END)[2]


def extract_last_tag(text: str, tag: str) -> str | None:
    """The stripped content of the last `<tag>…</tag>` with no other such tag between the two, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    tags = list(re.finditer(f"{re.escape(opening)}|{re.escape(closing)}", text))
    for one, other in reversed(list(pairwise(tags))):
        if (one[0], other[0]) == (opening, closing):
            return text[one.end() : other.start()].strip()
    return None
