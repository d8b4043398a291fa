"""Check of the log-probabilities that the engine reports of what it samples, which training relies on."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from drzero.labs.consistency.check import Case, Check, Limits
from drzero.labs.consistency.engine import Continued
from drzero.labs.consistency.greedy import OTHER_NUMBERS
from drzero.labs.consistency.prompts import Prompt
from drzero.labs.consistency.sampling import Place
from drzero.labs.consistency.transformers_side import Yardstick

_DEFINITION = (
    "though greedy choices agree, the log-probabilities do not: either they are of something else (another "
    "temperature, the ids that a filter left over), or the engine computes with slightly other numbers (rope "
    "base, type, quantisation, weights of another step)"
)


def read_sampled(
    yardstick: Yardstick, prompts: Sequence[Prompt], sampled: Sequence[Continued], places: Sequence[Place]
) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Transformers' log-probability of each sampled id, and of every id (vocabulary,) at each place."""
    theirs, rows = list[list[float]](), dict[Place, torch.Tensor]()
    for index, (prompt, made) in enumerate(zip(prompts, sampled, strict=True)):
        log_probs = yardstick.log_probs(prompt.ids, made.ids)
        theirs.append(log_probs.gather(1, torch.tensor(made.ids)[:, None]).squeeze(1).tolist())
        for place in places:
            if place.prompt == index:
                rows[place] = log_probs[place.position].clone()
    return theirs, [rows[place] for place in places]


def check_log_probs(
    prompts: Sequence[Prompt],
    sampled: Sequence[Continued],
    theirs: Sequence[Sequence[float]],
    tokenizer: Any,
    limits: Limits,
    greedy_agrees: bool,
) -> Check:
    """The engine's log-probability of each id that it sampled, against Transformers' of the same id."""
    gaps, cases = list[float](), list[Case]()
    for prompt, made, own in zip(prompts, sampled, theirs, strict=True):
        apart = torch.tensor(made.log_probs, dtype=torch.float64) - torch.tensor(own, dtype=torch.float64)
        row = apart.abs().nan_to_num(float("inf"), posinf=float("inf")).tolist()
        worst = max(range(len(row)), key=row.__getitem__)
        gaps += row
        case = {"check": "log-probabilities", "prompt": prompt.name, "position": worst, "nats": row[worst]}
        token = {"id": made.ids[worst], "text": tokenizer.decode([made.ids[worst]])}
        cases.append(case | token | {"engine": made.log_probs[worst], "transformers": own[worst]})
    mean, largest = fmean(gaps), max(gaps)
    return Check(
        "log-probabilities",
        f"{mean:.1e} nats on average, {largest:.1e} at most, of {len(gaps)} sampled tokens",
        f"{limits.mean_gap:g} on average, {limits.largest_gap:g} at most",
        mean <= limits.mean_gap and largest <= limits.largest_gap,
        _DEFINITION if greedy_agrees else OTHER_NUMBERS,
        sorted(cases, key=lambda case: -case["nats"]),
    )
