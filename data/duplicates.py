"""Duplicates among accepted questions: the same words, or the same question in other words.

Near-duplicates have similar question embeddings, by the embedder that the run searches with, and the same
answer or the same document: two questions of one document that are very similar, but have different answers,
give one of them a wrong one. The threshold depends on the embedder (E5 puts any two questions above 0.7), so
`measured_cosine` measures it on the demo world, where two questions from one chain of facts are known to be
the same question.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from data.demo_world import compose_question, generate_world
from data.pairs import Pair
from verl_ext.method.answers import normalize_answer

Embed = Callable[[Sequence[str]], np.ndarray]
"""Unit vectors of the texts, shape (texts, dimension), such as `search.embedders.Embedder.encode_queries`."""

CAUGHT_SHARE = 0.9
"""Share of rephrasings that the measured cosine catches. Over six demo worlds with packaged-minilm, 0.9 gives
a cosine of 0.86 to 0.87, reached by 0.1 % of the pairs of different questions with one answer. 0.95 doubles
these false alarms and the spread between worlds; 0.8 (cosine 0.90) avoids few more. A false alarm costs one
pair, and another sample of its prompt may replace it."""


class AcceptedQuestions:
    """The questions accepted so far, against which the next one is judged.

    Candidates are embedded at construction, in one batch; only those whose answer or document a candidate of
    another prompt shares, as no others can be near-duplicates.
    """

    def __init__(self, candidates: Sequence[Pair], embed: Embed | None, cosine: float) -> None:
        """Prepare for these candidates; without `embed` nothing is a near-duplicate."""
        self._cosine = cosine
        self._by_words: dict[str, Pair] = {}
        self._sharing: dict[Hashable, list[Pair]] = defaultdict(list)  # by answer and by document
        prompts: dict[Hashable, set[int]] = defaultdict(set)
        for pair in candidates:
            for key in _shares(pair):
                prompts[key].add(pair.prompt_index)
        shared = [pair for pair in candidates if any(len(prompts[key]) > 1 for key in _shares(pair))]
        vectors = embed([pair.question for pair in shared]) if embed and shared else ()
        self._vectors = dict(zip(map(_key, shared), vectors, strict=False))

    def same_words(self, pair: Pair) -> Pair | None:
        """The accepted pair whose question has the same normal form, or None."""
        return self._by_words.get(normalize_answer(pair.question))

    def same_meaning(self, pair: Pair) -> tuple[Pair, float] | None:
        """The accepted pair with the closest question of those close enough, or None.

        Where the answers have nothing in common, a cosine halfway from the threshold to 1 is close enough:
        on the demo world 1 in 200 of the different questions about one document reach it, and 6 in 10 of
        the rephrased ones.
        """
        others = [other for key in _shares(pair) for other in self._sharing[key]]
        if not others:
            return None
        cosines = np.stack([self._vectors[_key(other)] for other in others]) @ self._vectors[_key(pair)]
        needed = [self._cosine if _akin(pair, other) else (1 + self._cosine) / 2 for other in others]
        best = int((cosines - needed).argmax())
        return (others[best], float(cosines[best])) if cosines[best] >= needed[best] else None

    def add(self, pair: Pair) -> None:
        """Accept a candidate."""
        self._by_words.setdefault(normalize_answer(pair.question), pair)
        if _key(pair) in self._vectors:
            for key in _shares(pair):
                self._sharing[key].append(pair)


def duplicates(pair: Pair, accepted: AcceptedQuestions) -> str | None:
    """Gate: no accepted question has the same words, whatever its answer; None passes, else the reason."""
    other = accepted.same_words(pair)
    return f"duplicates: prompt {other.prompt_index} asks the same" if other else None


def near_duplicates(pair: Pair, accepted: AcceptedQuestions) -> str | None:
    """Gate: no accepted question asks the same in other words; None passes, else the reason.

    `pair` must be one of the candidates that `accepted` was constructed with.
    """
    found = accepted.same_meaning(pair)
    if found is None:
        return None
    other, cosine = found
    return f"near_duplicates: prompt {other.prompt_index} asks the same in other words (cosine {cosine:.2f})"


def measured_cosine(embed: Embed, *, seed: int = 0, chains_per_hop: int = 100) -> float:
    """The cosine that `CAUGHT_SHARE` of rephrased questions reach with an embedder.

    Measured on questions of 1 to 4 hops of a demo world of this seed, two phrasings each (about 800 texts).
    """
    world = generate_world(seed, chains_per_hop=chains_per_hop)
    rng = random.Random(f"{seed}/phrasings")
    asked = [
        [compose_question(chain.entities[0], chain.relations, rng) for chain in world.chains]
        for _ in range(2)
    ]
    rephrased = [(one, other) for one, other in zip(*asked, strict=True) if one != other]
    ones, others = (embed(texts) for texts in zip(*rephrased, strict=True))
    return float(np.quantile((ones * others).sum(axis=1), 1 - CAUGHT_SHARE))


def _key(pair: Pair) -> Hashable:
    return pair.prompt_index, pair.sample


def _shares(pair: Pair) -> tuple[Hashable, Hashable]:
    """What two near-duplicates have in common: the answer or the text of the document."""
    return ("answer", normalize_answer(pair.answer)), ("document", pair.document)


def _akin(pair: Pair, other: Pair) -> bool:
    """Whether one answer has all words of the other, as a surname has of a name."""
    ours, theirs = (set(normalize_answer(each.answer).split()) for each in (pair, other))
    return ours <= theirs or theirs <= ours
