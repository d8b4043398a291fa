"""Answers as text: extract them, normalize them as SQuAD does, compare them."""

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

# A number in an answer, with a sign that joins no words.
_FIGURE = re.compile(r"((?<![\w)])[-−–－])?((?:(?<![\w.])\.)?\d+(?:[.,'’]\d+)*)")
# 1,914 is 1914, 1,914.5 and 3,14 have decimals, 1,00,000 is Indian. 007 is a name. 1.914 may be either.
_WRITTEN = [
    re.compile(rf"(?!0\d)([1-9]\d{{0,2}}(?:[{marks}]\d{{3}})+|[1-9]\d?(?:,\d\d)+,\d{{3}}|\d*)(?:[.,](\d+))?")
    for marks in (".,'’", ",'’")
]
_SYMBOLS = re.compile(r"[+#%$*=<>^~|@\\/&]")  # ASCII signs that words seldom have


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
    best = 0.0
    for target in targets if prediction is not None else ():
        ours, theirs = map(str.split, _forms(str(prediction), target))
        common = sum((Counter(ours) & Counter(theirs)).values())
        best = max(best, 2 * common / ((len(ours) + len(theirs)) or 1))
    return best


def lost_in_comparison(target: str) -> str | None:
    """What a target is compared as, if it loses a number's marks or symbols. Else None."""
    form = _forms("", target)[1]
    ours, theirs = (_numbers(text, _WRITTEN[0])[0] for text in (target, form))
    is_lost = ours != theirs or _SYMBOLS.search(target) or not normalize_answer(target)
    return form if is_lost else None


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
    for written in _WRITTEN:
        (ours, said), (theirs, wanted) = (_numbers(text, written) for text in (prediction, target))
        if ours == theirs and _equal(said, wanted):
            return True
    return False


def _numbers(text: str, written: re.Pattern[str]) -> tuple[list[Decimal | str], str]:
    """The numbers of a text, with the parts of dates and names like 007, and the text with a 0 for each."""
    found: list[Decimal | str] = []

    def note(figure: re.Match[str]) -> str:
        runs = re.findall(r"\d+", figure[2])
        values: list[Decimal | str] = [run if run[0] == "0" else Decimal(run) for run in runs]
        if parts := written.fullmatch(figure[2]):
            whole = "".join(filter(str.isdigit, parts[1])) or "0"
            values = [Decimal(f"{'-' if figure[1] else ''}{whole}.{parts[2] or 0}")]
        found.extend(values)
        return "0" * len(values)

    zeroed = _FIGURE.sub(note, text)
    return found, zeroed


def contains_answer(text: str, answer: str, *, begun: bool = False) -> bool:
    """Whether the text has the answer's words in sequence, the last one perhaps only `begun`.

    In either reading: punctuation removed ("U.S." is "us"), or as spaces ("Oslo’s" contains "Oslo").
    """
    readings = zip(_readings(answer), _readings(text), strict=True)
    end = "" if begun else " "
    return any(words and f" {words}{end}" in f" {whole} " for words, whole in readings)


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
