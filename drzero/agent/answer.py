"""An answer with its sources: the passages that the agent read, and the sentence with the answer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from search.indexing.boundaries import SENTENCE_END
from verl_ext.clients.solver_agent import SolverAttempt
from verl_ext.method.answers import contains_answer, normalize_answer

State = Literal["supported", "unsupported", "none", "failed"]
_NOTES = {"unsupported": "No passage it read contains this answer.", "none": "The agent gave no answer."}
_BARE = ("yes", "no")  # Every other passage has these words. They support nothing.


@dataclass(frozen=True)
class Source:
    """A passage that a search returned."""

    id: str  # in the index; "" if the service tells none
    title: str
    text: str
    query: str  # the first search that found it
    evidence: str | None = None  # the sentence with the answer, or the title

    @property
    def name(self) -> str:
        """Its title as a reader sees it."""
        return self.title or self.id or "untitled"


@dataclass(frozen=True)
class Answer:
    """One question's answer. The sources with evidence come first."""

    question: str
    text: str | None
    sources: tuple[Source, ...]
    attempt: SolverAttempt

    @property
    def state(self) -> State:
        """Whether a passage that was read holds the answer, or why it gave none."""
        if not self.attempt.finished:
            return "failed"
        if self.text is None:
            return "none"
        return "supported" if any(source.evidence for source in self.sources) else "unsupported"

    @property
    def note(self) -> str | None:
        """A warning for its reader, if it needs one."""
        return _NOTES.get(self.state)

    @property
    def searches(self) -> list[str]:
        """Every query that was answered, in order."""
        return [query for call in self.attempt.trajectory.searches for query in call.queries or ()]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        attempt = self.attempt
        return {
            "question": self.question,
            "answer": self.text,
            "state": self.state,
            "failure": attempt.failure,
            "sources": [vars(source) for source in self.sources],
            "searches": self.searches,
            "tokens_in": attempt.tokens_in,
            "tokens_out": attempt.tokens_out,
            "seconds": round(attempt.latency_s, 2),
        }


def answer_of(question: str, attempt: SolverAttempt, found: Iterable[Source]) -> Answer:
    """The attempt as an answer, with each passage once."""
    text = attempt.answer or None
    sources = dict[tuple[str, str, str], Source]()
    for source in found:
        sources.setdefault((source.id, source.title, source.text), source)
    read = [_with_evidence(source, text) for source in sources.values()]
    return Answer(question, text, tuple(sorted(read, key=lambda one: one.evidence is None)), attempt)


def sources_of(queries: Sequence[str], results: Sequence[Sequence[Mapping[str, Any]]]) -> Iterator[Source]:
    """The passages of one call's answer."""
    for query, passages in zip(queries, results, strict=True):
        for one in passages:
            text = one.get("text") or one.get("contents") or ""
            yield Source(str(one.get("id", "")), one.get("title", ""), text, query)


def progress_lines(
    queries: Sequence[str], found: Sequence[Source] | None, shown: Callable[[str], str]
) -> list[str]:
    """A search in words: its queries while it runs (`found` is None), and then the titles that it found."""
    if found is None:
        return [f"searching: {shown(query)}" for query in queries]
    names = dict.fromkeys(shown(source.name) for source in found)
    return [f"found: {', '.join(names) or 'nothing'}"]


def _with_evidence(source: Source, answer: str | None) -> Source:
    if answer is None or normalize_answer(answer) in _BARE:
        return source
    # Cutting text into sentences adds word boundaries: "。" is a sentence of "。1", but no word of it.
    wholes = [whole for whole in (source.title, source.text) if contains_answer(whole, answer)]
    if not wholes:
        return source
    sentences = (sentence for sentence in _sentences(source.text) if contains_answer(sentence, answer))
    return replace(source, evidence=next(sentences, wholes[0]))


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in (*(match.end() for match in SENTENCE_END.finditer(text)), len(text)):
        yield text[start:end].strip()
        start = end
