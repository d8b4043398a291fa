"""Overlap with benchmark questions, in SQuAD's normal form. It would invalidate a benchmark's score."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from data.benchmarks import BenchmarkQuestion
from data.leaks import words_of
from data.pairs import Pair
from data.wording import names_of
from verl_ext.method.answers import normalize_answer

DEFAULT_NGRAM = 8  # words in a row that count as copied, as in GPT-2's report: questions have 9 to 18
_COMMON_SHARE = 100
"""A common word is in more than 1 % and `_COMMON_QUESTIONS` of the questions. A run of them is no copy."""
_COMMON_QUESTIONS = 5


class OverlapIndex:
    """The runs of `ngram` words (at least 2) in benchmark questions, and their facts."""

    def __init__(self, questions: Iterable[BenchmarkQuestion], ngram: int = DEFAULT_NGRAM) -> None:
        self.ngram = ngram
        questions = list(questions)
        self._normal = sorted({normalize_answer(question.question) for question in questions} - {""})
        self._runs: dict[str, list[int]] = defaultdict(list)
        self._short: dict[int, set[str]] = defaultdict(set)  # by their number of words
        self._with_word: dict[str, list[int]] = defaultdict(list)
        for number, normal in enumerate(self._normal):
            words = normal.split()
            for run in _runs(words, ngram):
                self._runs[run].append(number)
            if len(words) < ngram:
                self._short[len(words)].add(normal)
            for word in set(words):
                self._with_word[word].append(number)
        self._facts: dict[str, list[tuple[frozenset[str], str]]] = defaultdict(list)  # by answer
        for question in questions:
            names = frozenset(names_of(question.question))
            for answer in {normalize_answer(target) for target in question.targets} - {"yes", "no"}:
                self._facts[answer].append((names, question.question))

    def __len__(self) -> int:
        return len(self._normal)

    def overlap(self, question: str) -> str | None:
        """Return words shared with a benchmark question, or None. Common words count only in a whole one."""
        words = normalize_answer(question).split()
        for run in _runs(words, self.ngram):
            if run in self._runs and (self._tells(run) or self._has_whole(words, self._runs[run])):
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

    def same_fact(self, question: str, answer: str) -> str | None:
        """Return the benchmark question with this answer whose names all occur in the question, or None."""
        words = set(words_of(question))
        facts = self._facts.get(normalize_answer(answer), [])
        return next((known for names, known in facts if names and names <= words), None)

    def _tells(self, run: str) -> bool:
        limit = max(_COMMON_QUESTIONS, len(self) // _COMMON_SHARE)
        return any(len(self._with_word[word]) <= limit for word in run.split())

    def _has_whole(self, words: list[str], numbers: Iterable[int]) -> bool:
        text = f" {' '.join(words)} "
        known = (f" {self._normal[number]} " for number in numbers)
        return any(each in text or text in each for each in known)


def contamination(pair: Pair, benchmarks: OverlapIndex) -> str | None:
    """Gate: the question shares neither words nor fact with a benchmark. Returns the reason, or None."""
    if shared := benchmarks.overlap(pair.question):
        return f"contamination: a benchmark question has {shared!r} too"
    known = benchmarks.same_fact(pair.question, pair.answer)
    return f"contamination: the benchmark question {known!r} asks for the same fact" if known else None


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))
