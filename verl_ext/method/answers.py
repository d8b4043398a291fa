"""Answers as text: extract them, normalise them as SQuAD does, compare them.

The normal form has lower case, no punctuation, no articles and single spaces.

    exact_match(extract_last_tag(after_thinking(text), "answer"), ["Marie Curie"])
"""

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_THINK_END = "</think>"


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
    """Whether the text contains the answer's words in sequence, in normal form; never for an empty answer."""
    normal = normalize_answer(answer)
    return bool(normal) and f" {normal} " in f" {normalize_answer(text)} "


def after_thinking(text: str) -> str:
    """The part of a turn after its thinking, so that tags inside the thinking do not count."""
    return text.rpartition(_THINK_END)[2]


def extract_last_tag(text: str, tag: str) -> str | None:
    """The stripped content of the last closed `<tag>…</tag>`, or None when there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None
