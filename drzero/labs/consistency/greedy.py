"""Checks of what the engine chooses: greedy sequences, and the scores that come of them.

Two engines that add the same numbers in another order choose differently where two ids are equally probable.
A tie is distinguished from a true difference by the log-probabilities of both ids on Transformers' side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from drzero.labs.consistency.check import Case, Check, Limits
from drzero.labs.consistency.engine import Continued
from drzero.labs.consistency.prompts import Prompt
from drzero.labs.consistency.transformers_side import Yardstick

SCORED_APART = 8
"""Sequences that differ, of which Transformers' own are generated to be scored; others are left out."""
OTHER_NUMBERS = (
    "the engine computes with other numbers: compare its config.json with that of base_model (rope base, "
    "norms), its weights, their type and quantisation, its attention backend"
)


@dataclass(frozen=True)
class Difference:
    """Where a greedy sequence leaves Transformers' choices."""

    position: int
    margin: float
    """Nats by which Transformers prefers its own choice."""
    case: Case


def check_greedy(
    prompts: Sequence[Prompt],
    continued: Sequence[Continued],
    yardstick: Yardstick,
    tokenizer: Any,
    limits: Limits,
) -> tuple[Check, dict[int, int]]:
    """The check, and where a sequence parts from Transformers' first, ties included, by prompt."""
    tied, differing, parted = [], [], dict[int, int]()
    for index, (prompt, made) in enumerate(zip(prompts, continued, strict=True)):
        log_probs = yardstick.log_probs(prompt.ids, made.ids)
        found = _differences(prompt, made, log_probs, tokenizer)
        if found:
            parted[index] = found[0].position
        # A NaN is no tie.
        true = [one for one in found if not one.margin <= limits.tie]
        differing += true[:1]
        tied += found[:1] if found and not true else []
    equal, share = len(prompts) - len(parted), len(differing) / len(prompts)
    found_in_words = (
        f"{equal} of {len(prompts)} equal, {len(tied)} part at a tie, {len(differing)} truly differ"
    )
    allowed = f"{limits.differing_share:.0%} may differ by more than {limits.tie:g} nats"
    cases = [one.case for one in sorted(differing, key=lambda one: -one.margin)]
    passed = share <= limits.differing_share
    return Check("greedy sequences", found_in_words, allowed, passed, OTHER_NUMBERS, cases), parted


def _differences(
    prompt: Prompt, made: Continued, log_probs: torch.Tensor, tokenizer: Any
) -> list[Difference]:
    best = log_probs.argmax(-1)
    found = []
    for position in (best != torch.tensor(made.ids)).nonzero().flatten().tolist():
        row, ours, theirs = log_probs[position], int(best[position]), made.ids[position]
        margin, sampled = float(row[ours] - row[theirs]), [(theirs, made.log_probs[position])]
        case = {
            "check": "greedy sequences",
            "prompt": prompt.name,
            "position": position,
            "nats": margin,
            "after": tokenizer.decode([*prompt.ids, *made.ids[:position]][-24:]),
            "engine": _tops(made.tops[position] if made.tops else sampled, tokenizer),
            "transformers": _tops(_best_two(row), tokenizer),
        }
        found.append(Difference(position, margin, case))
    return found


def _best_two(row: torch.Tensor) -> list[tuple[int, float]]:
    best = row.topk(2)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def _tops(tops: Sequence[tuple[int, float]], tokenizer: Any) -> list[Case]:
    return [{"id": i, "text": tokenizer.decode([i]), "log_prob": round(lp, 4)} for i, lp in tops[:2]]


def check_scores(
    prompts: Sequence[Prompt],
    continued: Sequence[Continued],
    parted: dict[int, int],
    generate: Callable[[int, int], list[int]],
    tokenizer: Any,
    limits: Limits,
) -> Check:
    """The stage's own score of each side's greedy turn; `generate(index, position)` is Transformers' turn."""
    left_out = list(parted)[SCORED_APART:]
    kept = [index for index in range(len(prompts)) if index not in left_out]
    engine, own = list[float](), list[float]()
    cases = []
    for index in kept:
        prompt, made = prompts[index], continued[index]
        theirs = generate(index, parted[index]) if index in parted else made.ids
        scores = prompt.score_of(tokenizer, made.ids), prompt.score_of(tokenizer, theirs)
        engine.append(scores[0])
        own.append(scores[1])
        if scores[0] != scores[1]:
            texts = {"engine": tokenizer.decode(made.ids), "transformers": tokenizer.decode(theirs)}
            cases.append({"check": "score", "prompt": prompt.name, "scores": scores, **texts})
    gap = abs(fmean(engine) - fmean(own))
    return Check(
        f"score ({', '.join(sorted({prompt.scored_by for prompt in prompts}))})",
        f"{fmean(engine):.3f} and {fmean(own):.3f} of {len(kept)} first turns, {len(cases)} differ",
        f"means {limits.score_gap:g} apart",
        gap <= limits.score_gap,
        "what the sequences that differ are worth: see their texts",
        cases,
    )
