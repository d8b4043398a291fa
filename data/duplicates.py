"""Duplicates among accepted questions: equal words, or similar embeddings and one answer or document."""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from data.demo_world import compose_question, generate_world
from data.leaks import normal_words
from data.pairs import Pair
from verl_ext.method.answers import normalize_answer

Embed = Callable[[Sequence[str]], np.ndarray]

CAUGHT_SHARE = 0.9
"""Share of rephrasings to catch. On six demo worlds, 0.1 % of other pairs are false alarms, 0.2 % at 0.95."""


class AcceptedQuestions:
    """The accepted questions. Embeds only candidates that share an answer or document with another prompt."""

    def __init__(self, candidates: Sequence[Pair], embed: Embed | None, cosine: float) -> None:
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
        """Return the accepted pair whose question has the same normal form, or None."""
        return self._by_words.get(" ".join(normal_words(pair.question)))

    def same_meaning(self, pair: Pair) -> tuple[Pair, float] | None:
        """Return the accepted pair with the closest question, if close enough, and the cosine.

        Answers without a common word need a cosine halfway to 1: 1 in 200 different pairs reach it.
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
        self._by_words.setdefault(" ".join(normal_words(pair.question)), pair)
        if _key(pair) in self._vectors:
            for key in _shares(pair):
                self._sharing[key].append(pair)


def duplicates(pair: Pair, accepted: AcceptedQuestions) -> str | None:
    """Gate: no accepted question has the same words, whatever its answer. Returns the reason, or None."""
    other = accepted.same_words(pair)
    return f"duplicates: prompt {other.prompt_index} asks the same" if other else None


def near_duplicates(pair: Pair, accepted: AcceptedQuestions) -> str | None:
    """Gate: no accepted question has the same meaning as this candidate of `accepted`."""
    found = accepted.same_meaning(pair)
    if found is None:
        return None
    other, cosine = found
    return f"near_duplicates: prompt {other.prompt_index} asks the same in other words (cosine {cosine:.2f})"


def measured_cosine(embed: Embed, chains_per_hop: int = 100) -> float:
    """Return the cosine that `CAUGHT_SHARE` of a demo world's rephrased questions reach."""
    # E5 puts any two questions above 0.7, other embedders do not.
    world = generate_world(0, chains_per_hop=chains_per_hop)
    rng = random.Random("0/phrasings")
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
    return ("answer", normalize_answer(pair.answer)), ("document", pair.document)


def _akin(pair: Pair, other: Pair) -> bool:
    """Whether one answer has all words of the other, like a name and its surname."""
    ours, theirs = (set(normal_words(each.answer)) for each in (pair, other))
    return ours <= theirs or theirs <= ours
