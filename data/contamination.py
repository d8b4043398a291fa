"""Overlap with benchmark questions: training on a copy of one would invalidate that benchmark's score.

Questions are compared in SQuAD's normal form, so case, punctuation and articles make no difference.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from data.pairs import Pair
from verl_ext.method.answers import normalize_answer

DEFAULT_NGRAM = 8
"""Words in a row that count as copied, as in GPT-2's report. Questions are short (those of the seven
benchmarks have about 9 to 18 words), so GPT-3's 13 would let a lightly edited copy pass, while common
openings such as "what is the name of the person who wrote" have 7 words without articles. On the demo world,
whose questions share a few phrasings, 8 flags one unrelated question in ten and 6 four in ten; of copies with
one word replaced, 8 catches a third and 13 one in 25."""


class OverlapIndex:
    """The runs of `ngram` words of benchmark questions."""

    def __init__(self, questions: Iterable[str], ngram: int = DEFAULT_NGRAM) -> None:
        """Index the questions; `ngram` is at least 2, as one word in common proves nothing."""
        self.ngram = ngram
        self._normal = sorted({normalize_answer(question) for question in questions} - {""})
        self._runs: set[str] = set()
        self._short: dict[int, set[str]] = defaultdict(set)  # by their number of words
        self._with_word: dict[str, list[int]] = defaultdict(list)
        for number, normal in enumerate(self._normal):
            words = normal.split()
            self._runs.update(_runs(words, ngram))
            if len(words) < ngram:
                self._short[len(words)].add(normal)
            for word in set(words):
                self._with_word[word].append(number)

    def __len__(self) -> int:
        return len(self._normal)

    def overlap(self, question: str) -> str | None:
        """The words that the question shares with a benchmark question, in normal form, or None.

        A question of fewer than `ngram` words, on either side, overlaps only as a whole: all of it must occur
        in the other one.
        """
        words = normalize_answer(question).split()
        for run in _runs(words, self.ngram):
            if run in self._runs:
                return run
        for length, short_questions in self._short.items():
            for run in _runs(words, length):
                if run in short_questions:
                    return run
        if not 0 < len(words) < self.ngram:
            return None
        whole = " ".join(words)
        rarest = min((self._with_word.get(word, []) for word in words), key=len)
        return whole if any(f" {whole} " in f" {self._normal[number]} " for number in rarest) else None


def contamination(pair: Pair, benchmarks: OverlapIndex) -> str | None:
    """Gate: the question shares no run of words with a benchmark question; None passes, else the reason."""
    shared = benchmarks.overlap(pair.question)
    return f"contamination: a benchmark question has {shared!r} too" if shared else None


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))
