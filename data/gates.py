"""The gates between a synthesized pair and the solver's training data.

    gates = Gates(GateSettings(), embed=embedder.encode_queries, benchmark_questions=questions)
    reasons = gates.judge(pair)        # {} passes; else {"evidence": "evidence: the answer …"}

Each gate is a function over one pair that returns None (passes) or a short reason that begins with its name:

    evidence         the answer occurs in the document or in retrieved passages
    hops             enough searches for the hops, and an answer beyond the document that the hops start from
    integrity        a question that asks, does not contain its answer and shows no template; a short answer
    contamination    no run of words shared with a benchmark question (data/contamination.py)
    duplicates       no accepted question has the same words (data/duplicates.py)
    near_duplicates  no accepted question asks the same in other words (data/duplicates.py)

The first four judge a pair alone; the last two judge pairs that passed them against those accepted before.
The seventh gate, pairing, judges the written file (data/pairing.py). bench/gates.py measures what each gate
catches and what it refuses wrongly.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from data.contamination import DEFAULT_NGRAM, OverlapIndex, contamination
from data.duplicates import AcceptedQuestions, Embed, duplicates, measured_cosine, near_duplicates
from data.errors import DataError
from data.pairs import Pair
from verl_ext.method.answers import contains_answer, normalize_answer, space_characters
from verl_ext.method.challenger_reward import has_integrity
from verl_ext.method.format_score import answered_by_document, search_steps
from verl_ext.method.passages import shown_passages


@dataclass(frozen=True)
class GateSettings:
    """Which gates are on, and their thresholds: the config's `gates`, whose ranges pipeline/settings has."""

    evidence: bool = True
    hops: bool = True
    integrity: bool = True
    max_answer_words: int = 10
    """Words of an answer in normal form; the format score gives no points for longer ones."""
    duplicates: bool = True
    near_duplicates: bool = True
    near_duplicate_cosine: float | None = None
    """Least cosine of two questions with one answer that are the same; None measures it for the embedder."""
    contamination: bool = True
    contamination_ngram: int = DEFAULT_NGRAM
    """Words in a row that a question may not share with a benchmark question."""
    pairing: bool = True


def evidence(pair: Pair) -> str | None:
    """Gate: the answer can be found.

    Yes and no need no evidence, as in the format score. The query that is repeated above its passages, as the
    model wrote it, is none.
    """
    if normalize_answer(pair.answer) in ("yes", "no"):
        return None
    retrieved = [line for call in pair.trajectory.searches for line in shown_passages(call.response or "")]
    if any(contains_answer(text, pair.answer) for text in (pair.document, *retrieved)):
        return None
    return "evidence: the answer is neither in the document nor in a retrieved passage"


def hops(pair: Pair) -> str | None:
    """Gate: a search in a turn of its own for each hop after the first, and an answer that they lead to."""
    steps = search_steps(pair.trajectory)
    if steps < pair.hop - 1:
        return f"hops: {steps} turns found passages with a new query, {pair.hop} hops take {pair.hop - 1}"
    if answered_by_document(pair.answer, pair.document, pair.hop):
        return f"hops: the answer stands in the document that {pair.hop} hops should lead away from"
    return None


def integrity(pair: Pair, max_answer_words: int = 10) -> str | None:
    """Gate: a question that asks and does not contain its answer, a short answer, and no template text."""
    if not has_integrity(pair.question, pair.answer):
        return "integrity: the question contains its answer, or one of them has no words"
    if not is_question(pair.question):
        return "integrity: the question does not ask"
    for name, text in (("question", pair.question), ("answer", pair.answer)):
        if leftover := template_leftover(text):
            return f"integrity: the {name} has {leftover}"
    words = len(normalize_answer(pair.answer).split())
    if words > max_answer_words:
        return f"integrity: the answer has {words} words, at most {max_answer_words} are allowed"
    return None


class Gates:
    """The gates that are on, with the embedder and the benchmark questions that they need."""

    alone: dict[str, Callable[[Pair], str | None]]
    """By name, the gates that judge a pair alone."""
    among: dict[str, Callable[[Pair, AcceptedQuestions], str | None]]
    """By name, the gates that judge a pair against those accepted before it."""
    idle: dict[str, str]
    """By name, the gates that are on but cannot judge, and what they lack."""
    near_duplicate_cosine: float | None
    """The cosine that this gate uses, configured or measured; None when it is off."""

    def __init__(
        self, settings: GateSettings, *, embed: Embed | None = None, benchmark_questions: Iterable[str] = ()
    ) -> None:
        """Prepare the gates; `embed` gives unit vectors of questions.

        Raises:
            DataError: near_duplicates is on and there is no embedder.
        """
        if settings.near_duplicates and embed is None:
            raise DataError("the gate near_duplicates needs an embedder: give one, or switch the gate off")
        self.settings = settings
        self._embed = embed if settings.near_duplicates else None
        self.near_duplicate_cosine = settings.near_duplicate_cosine if self._embed else None
        if self._embed and self.near_duplicate_cosine is None:
            self.near_duplicate_cosine = measured_cosine(self._embed)
        benchmarks = OverlapIndex(benchmark_questions, settings.contamination_ngram)
        self.alone = {
            "evidence": evidence,
            "hops": hops,
            "integrity": partial(integrity, max_answer_words=settings.max_answer_words),
            "contamination": partial(contamination, benchmarks=benchmarks),
        }
        self.among = {"duplicates": duplicates, "near_duplicates": near_duplicates}
        has_nothing = settings.contamination and not len(benchmarks)
        self.idle = {"contamination": "no benchmark given"} if has_nothing else {}
        off = [name for name in (*self.alone, *self.among) if not getattr(settings, name)]
        for name in (*off, *self.idle):
            self.alone.pop(name, None)
            self.among.pop(name, None)

    def judge(self, pair: Pair) -> dict[str, str]:
        """The reasons, by gate, against a pair alone."""
        return _refusals({name: gate(pair) for name, gate in self.alone.items()})

    def accepted(self, candidates: Sequence[Pair]) -> AcceptedQuestions:
        """An empty collection of accepted questions that can judge these candidates."""
        return AcceptedQuestions(candidates, self._embed, self.near_duplicate_cosine or 1.0)

    def judge_among(self, pair: Pair, accepted: AcceptedQuestions) -> dict[str, str]:
        """The reasons, by gate, against a pair, given those accepted before it."""
        return _refusals({name: gate(pair, accepted) for name, gate in self.among.items()})


def _refusals(reasons: Mapping[str, str | None]) -> dict[str, str]:
    return {name: reason for name, reason in reasons.items() if reason is not None}


# --- what a question looks like ---------------------------------------------------------------------------

_ASKING = "who|whom|whose|what|which|when|where|why|how"
# "Will" and "May" begin names too, so without a question mark they prove nothing.
_AUXILIARY = "is|are|was|were|do|does|did|has|have|had|can|could"
_PREPOSITION = (
    "in|on|at|to|from|of|by|for|with|under|over|near|during|after|before|into|through|about|besides|since"
)
# "Name", "state" and "list" are nouns too, so the thing they ask for must follow.
_IMPERATIVE = "name|list|identify|give|tell|find|determine|specify|state"
_ASKED_FOR = rf"the|an?|all|any|both|one|two|three|me|us|its|his|her|their|every|each|{_ASKING}|\S+['’]s?"
_BEGINS_AS_QUESTION = re.compile(
    rf"(?:(?:{_PREPOSITION})\s+)?(?:{_ASKING})\b|(?:{_AUXILIARY})\b|(?:{_IMPERATIVE})\s+(?:{_ASKED_FOR})(?!\S)",
    re.IGNORECASE,
)
# Arabic ؟ and Ethiopic ፧, the interrobang, and Japanese か; NFKC turns the other forms of "?" into it.
_ENDS_AS_QUESTION = re.compile(r"(?:[?؟፧‽]|か。?)$")
# The Armenian mark stands within the word that it asks about. The Greek one looks like a semicolon.
_ASKS_WITHIN = re.compile(r"՞|[\u0370-\u03ff\u1f00-\u1fff]\W*;$")
_AROUND = " \t\"'“”‘’«»「」『』()*_"

_SOURCE = "document|passage|text|paragraph|article|excerpt"
_LEFTOVERS = {
    "a tag": re.compile(r"</?[a-z][a-z_]*\s*/?>|<\s?\||\|>", re.IGNORECASE),
    "a placeholder": re.compile(
        r"\byour (?:question|answer)\b|\bits short answer\b|\{[\w .…]*\}"
        r"|\[\s*(?:insert|your|the|an?|question|answer|name|entity|placeholder|document|…|\.\.\.)[^\]]*\]",
        re.IGNORECASE,
    ),
    # The solver never sees the source: "the text of the treaty" says which one is meant, "the text" does not.
    "a mention of the source": re.compile(
        rf"\b(?:this|above|given|provided|following|preceding)\s+(?:{_SOURCE}|context)s?\b"
        rf"|\b(?:{_SOURCE})s?\s+(?:above|below|given|provided)\b"
        rf"|\baccording to the (?:{_SOURCE}|context)\b"
        rf"|\bthe (?:{_SOURCE})\b"
        r"(?!\s+(?:of|that|which|about|titled|called|known|named|by|signed|written)\b)",
        re.IGNORECASE,
    ),
}


def is_question(text: str) -> bool:
    """Whether the text asks: three or more words that end with a question mark or open as questions do.

    Such openings are "Which …", "In which …", "Does …" and "Name the …". In scripts without spaces each
    character counts as a word.
    """
    bare = unicodedata.normalize("NFKC", text).strip(_AROUND)
    if len(space_characters(bare).split()) < 3:
        return False
    return any((_ENDS_AS_QUESTION.search(bare), _ASKS_WITHIN.search(bare), _BEGINS_AS_QUESTION.match(bare)))


def template_leftover(text: str) -> str | None:
    """The kind of template text that is left ("a tag", "a placeholder", …) and the match itself, or None."""
    for kind, pattern in _LEFTOVERS.items():
        if found := pattern.search(text):
            return f"{kind} ({found[0]!r})"
    return None
