"""The gates between a synthesized pair and the solver's training data (measured in bench/gates.py)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from data.benchmarks import BenchmarkQuestion
from data.contamination import DEFAULT_NGRAM, OverlapIndex, contamination
from data.duplicates import AcceptedQuestions, Embed, duplicates, measured_cosine, near_duplicates
from data.errors import DataError
from data.leaks import given_away, length_in_words, normal_words, words_of
from data.pairs import Pair
from data.wording import asks_yes_no, is_question, names_nothing, share_of_names, template_leftover, unclear
from verl_ext.method.answers import contains_answer, normalize_answer
from verl_ext.method.format_score import hop_fault, retrieved_passages


@dataclass(frozen=True)
class GateSettings:
    """Which gates are on, and their thresholds. `drzero/recipe/settings` declares their ranges."""

    evidence: bool = True
    hops: bool = True
    integrity: bool = True
    max_answer_words: int = 10  # in normal form, beyond which the format score gives no points
    duplicates: bool = True
    near_duplicates: bool = True
    near_duplicate_cosine: float | None = None
    """Least cosine of two equal questions with one answer. None measures it for the embedder."""
    contamination: bool = True
    contamination_ngram: int = DEFAULT_NGRAM  # words in a row
    pairing: bool = True
    open_book: bool = False


def evidence(pair: Pair) -> str | None:
    """Gate: the texts read have the answer and concern the question. For yes or no, all its names occur."""
    retrieved = retrieved_passages(pair.trajectory)
    named = share_of_names(pair.question, "\n".join([pair.document, *retrieved]))
    if named == 0:
        return "evidence: neither the document nor a retrieved passage has anything that the question names"
    if normalize_answer(pair.answer) in ("yes", "no"):
        return (
            None if named == 1 else "evidence: no text has some name of the question, so yes or no is a guess"
        )
    if any(contains_answer(text, pair.answer) for text in (pair.document, *retrieved)):
        return None
    return "evidence: the answer is neither in the document nor in a retrieved passage"


def hops(pair: Pair) -> str | None:
    """Gate: a search for each hop after the first, and an answer that one search of the question misses."""
    fault = hop_fault(pair.trajectory, pair.document, pair.hop, pair.question, pair.answer)
    return f"hops: {fault}" if fault else None


def integrity(pair: Pair, max_answer_words: int = 10) -> str | None:
    """Gate: one clear question that hides its answer, a short answer, and no template text."""
    if not words_of(pair.question) or not words_of(pair.answer):
        return "integrity: question or answer has no words"
    if names_nothing(pair.answer):
        return "integrity: the answer names nothing"
    if way := given_away(pair.question, pair.answer):
        return f"integrity: the question gives its answer away {way}"
    if not is_question(pair.question):
        return "integrity: the question does not ask"
    if fault := unclear(pair.question):
        return f"integrity: the question {fault}"
    if normalize_answer(pair.answer) in ("yes", "no") and not asks_yes_no(pair.question):
        return "integrity: yes or no answers a question for something else"
    for name, text in (("question", pair.question), ("answer", pair.answer)):
        if leftover := template_leftover(text):
            return f"integrity: the {name} has {leftover}"
    words = round(length_in_words(normal_words(pair.answer)))
    if words > max_answer_words:
        return f"integrity: the answer has {words} words, at most {max_answer_words} are allowed"
    return None


class Gates:
    """The active gates with the embedder and benchmark questions they need."""

    per_pair: dict[str, Callable[[Pair], str | None]]  # by name, the gates that judge one pair
    across_pairs: dict[str, Callable[[Pair, AcceptedQuestions], str | None]]
    """By name, the gates that compare a pair with those accepted before it."""
    idle: dict[str, str]  # by name, gates that are on but cannot judge, with what they lack
    near_duplicate_cosine: float | None  # the cosine in use, configured or measured. None if that gate is off
    verdicts: dict[tuple[int, int], str | None]
    """By prompt and sample, the reason of the gate open_book, once the solver was asked."""

    def __init__(
        self,
        settings: GateSettings,
        *,
        embed: Embed | None = None,
        benchmark_questions: Iterable[BenchmarkQuestion] = (),
    ) -> None:
        """Prepare the gates with `embed`, which returns unit vectors. Raises DataError if it is missing."""
        if settings.near_duplicates and embed is None:
            raise DataError("the gate near_duplicates needs an embedder: give one, or switch the gate off")
        self.settings = settings
        self._embed = embed if settings.near_duplicates else None
        self.near_duplicate_cosine = settings.near_duplicate_cosine if self._embed else None
        if self._embed and self.near_duplicate_cosine is None:
            self.near_duplicate_cosine = measured_cosine(self._embed)
        benchmarks = OverlapIndex(benchmark_questions, settings.contamination_ngram)
        self.per_pair = {
            "evidence": evidence,
            "hops": hops,
            "integrity": partial(integrity, max_answer_words=settings.max_answer_words),
            "contamination": partial(contamination, benchmarks=benchmarks),
            "open_book": lambda pair: self.verdicts.get((pair.prompt_index, pair.sample)),
        }
        self.verdicts = {}
        self.across_pairs = {"duplicates": duplicates, "near_duplicates": near_duplicates}
        has_nothing = settings.contamination and not len(benchmarks)
        self.idle = {"contamination": "no benchmark given"} if has_nothing else {}
        off = [name for name in (*self.per_pair, *self.across_pairs) if not getattr(settings, name)]
        for name in (*off, *self.idle):
            self.per_pair.pop(name, None)
            self.across_pairs.pop(name, None)

    def judge(self, pair: Pair) -> dict[str, str]:
        """Return the reasons against one pair, by gate."""
        return _refusals({name: gate(pair) for name, gate in self.per_pair.items()})

    def accepted(self, candidates: Sequence[Pair]) -> AcceptedQuestions:
        """Return an empty collection of accepted questions for these candidates."""
        return AcceptedQuestions(candidates, self._embed, self.near_duplicate_cosine or 1.0)

    def judge_across(self, pair: Pair, accepted: AcceptedQuestions) -> dict[str, str]:
        """Return the reasons against a pair given those accepted before it, by gate."""
        return _refusals({name: gate(pair, accepted) for name, gate in self.across_pairs.items()})


def _refusals(reasons: Mapping[str, str | None]) -> dict[str, str]:
    return {name: reason for name, reason in reasons.items() if reason is not None}
