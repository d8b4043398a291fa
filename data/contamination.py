"""Overlap with benchmark questions, in SQuAD's normal form. It would invalidate a benchmark's score."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

from data.benchmarks import BenchmarkQuestion
from data.leaks import is_unspaced, length_in_words, normal_words, words_of
from data.pairs import Pair
from data.wording import names_of, unspaced_name
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
        self._normal = sorted({" ".join(normal_words(question.question)) for question in questions} - {""})
        self._runs: dict[str, list[int]] = defaultdict(list)
        self._short: dict[int, set[str]] = defaultdict(set)  # by their number of words
        self._times: Counter[str] = Counter()  # questions that have a term
        self._text = "\n".join(f" {normal} " for normal in self._normal)
        for number, normal in enumerate(self._normal):
            words = normal.split()
            for run in _copies(words, ngram):
                self._runs[run].append(number)
            if length_in_words(words) < ngram:
                self._short[len(words)].add(normal)
            self._times.update(_terms(words))
        self._facts: dict[str, list[tuple[frozenset[str], str, str]]] = defaultdict(list)  # by answer
        for question in questions:
            names = frozenset(names_of(question.question)), unspaced_name(question.question)
            for answer in {normalize_answer(target) for target in question.targets} - {"yes", "no"}:
                self._facts[answer].append((*names, question.question))

    def __len__(self) -> int:
        return len(self._normal)

    def overlap(self, question: str) -> str | None:
        """Return words shared with a benchmark question, or None. Common words count only in a whole one."""
        words = normal_words(question)
        for run in _copies(words, self.ngram):
            if run in self._runs and (self._tells(run) or self._has_whole(words, self._runs[run])):
                return run
        for length, short_questions in self._short.items():
            for run in _runs(words, length):
                if run in short_questions:
                    return run
        whole = " ".join(words)
        is_short = words and length_in_words(words) < self.ngram
        return whole if is_short and f" {whole} " in self._text else None

    def same_fact(self, question: str, answer: str) -> str | None:
        """Return the benchmark question with this answer whose names all occur in the question, or None."""
        words = words_of(question)
        text, found = "".join(words), set(words)
        for names, unspaced, known in self._facts.get(normalize_answer(answer), []):
            if (names or unspaced) and names <= found and unspaced in text:
                return known
        return None

    def _tells(self, run: str) -> bool:
        limit = max(_COMMON_QUESTIONS, len(self) // _COMMON_SHARE)
        return any(self._times[term] <= limit for term in _terms(run.split()))

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


def _terms(words: list[str]) -> set[str]:
    """What can be common: a word, or two neighbours of a script without spaces, which make one."""
    pairs = {one + other for one, other in pairwise(words) if is_unspaced(one) and is_unspaced(other)}
    return pairs | ({word for word in words if not is_unspaced(word)} if pairs else set(words))


def _copies(words: list[str], ngram: int) -> Iterator[str]:
    """The shortest runs of at least `ngram` words' length."""
    # In thirds of a word, as in length_in_words.
    lengths = list(accumulate((2 if is_unspaced(word) else 3 for word in words), initial=0))
    for start, before in enumerate(lengths):
        if (end := bisect_left(lengths, before + 3 * ngram)) < len(lengths):
            yield " ".join(words[start:end])


def _runs(words: list[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))
