"""The proofs of a finished run, from its processes, log and metrics: one verdict a mechanism.

veRL 0.9.1 logs memory at each weight sync (workers/engine_workers.py:770, 824), at level DEBUG.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drzero.launch.smoke.needs import Needs, Verdict
from drzero.launch.smoke.witness import Witness
from drzero.recipe.metrics import Steps

ASLEEP, AWAKE = "Before resume weights", "After resume kv_cache"
LARGEST_GAP = 0.1
"""Of log-probabilities, rollout to actor. bfloat16 gives thousandths, random weights several units."""
_LINE = re.compile(
    rf"({ASLEEP}|{AWAKE}), memory allocated \(GB\): ([\d.]+), memory reserved \(GB\): ([\d.]+), "
    r"device memory used/total \(GB\): ([\d.]+)/([\d.]+)"
)


@dataclass(frozen=True)
class Memory:
    """Use of one GPU at one moment, in GiB."""

    allocated: float
    reserved: float
    used: float
    total: float

    @property
    def of_others(self) -> float:
        """Used by other processes."""
        return self.used - self.reserved


def weight_syncs(log: str) -> list[tuple[Memory, Memory]]:
    """The complete weight syncs in a trainer's log: memory while the engine sleeps, and once it is awake."""
    syncs, asleep = [], None
    for moment, *numbers in _LINE.findall(log):
        memory = Memory(*map(float, numbers))
        if moment == ASLEEP:
            asleep = memory
        elif asleep is not None:
            syncs.append((asleep, memory))
            asleep = None
    return syncs


def verdicts(needs: Needs, seen: Witness, log: str, steps: Steps) -> Iterator[Verdict]:
    """The verdicts on a finished run with these training steps."""
    syncs = weight_syncs(log)
    if needs.schedulers:
        yield _parallel(needs, seen)
    if needs.sglang:
        yield _weights(needs, steps)
    if needs.sleeps:
        yield _sleep(needs, syncs, len(steps))
    if needs.offloads:
        yield _offload(needs, syncs)
    if needs.has_gpus and needs.flash_attention:
        found = f"loaded by {len(seen.with_flash_attention)} of {needs.ranks} ranks that trained with it"
        yield Verdict("flash-attn in training", len(seen.with_flash_attention) >= needs.ranks, found)
    if needs.has_gpus:
        found = f"{len(seen.pipes)} of {needs.ranks} ranks had one"
        yield Verdict("the recorder's pipes", len(seen.pipes) >= needs.ranks, found, needed=False)
    yield _zero("no token drift", steps, "drzero/rollout/token_drift_rate")
    yield _zero("no failures", steps, "drzero/failures/share")


def _parallel(needs: Needs, seen: Witness) -> Verdict:
    ranks = Counter(
        int(found[1]) if (found := re.search(r"_TP(\d+)", title)) else 0 for title in seen.schedulers.values()
    )
    listed = ", ".join(f"{ranks[rank]} of {count} of rank {rank}" for rank, count in needs.schedulers.items())
    proven = all(ranks[rank] >= count for rank, count in needs.schedulers.items())
    return Verdict("tensor parallelism", proven, f"schedulers: {listed}")


def _weights(needs: Needs, steps: Steps) -> Verdict:
    mechanism, key = "weight sync", "actor/rollout_corr/kl"
    gaps = [abs(step[key]) for step in steps.values() if key in step]
    if not gaps or len(gaps) < len(steps):
        return Verdict(mechanism, False, f"{len(gaps)} of {len(steps)} steps compared engine and actor")
    # `max` alone may skip a NaN.
    worst = next((gap for gap in gaps if not gap <= LARGEST_GAP), max(gaps))
    found = f"log-probabilities of engine and actor differ by {worst:.2g} at most in {len(gaps)} steps"
    if not needs.dummy_weights:
        return Verdict(mechanism, False, f"{found}, but the engine had started with these weights")
    return Verdict(mechanism, worst <= LARGEST_GAP, f"{found}, after a start from random weights")


def _sleep(needs: Needs, syncs: list[tuple[Memory, Memory]], steps: int) -> Verdict:
    gaps = [(awake.of_others - asleep.of_others, asleep.total - asleep.used) for asleep, awake in syncs]
    freed = [gap for gap, free in gaps if gap >= needs.share / 2 * free]
    if len(freed) < max(steps, 1):
        return Verdict("sleep and wake", False, f"seen in {len(freed)} of {steps} steps")
    return Verdict("sleep and wake", True, f"{len(freed)} times, {min(freed):.1f} GiB of a GPU each or more")


def _offload(needs: Needs, syncs: list[tuple[Memory, Memory]]) -> Verdict:
    """The first sync comes before any update. Late in a sync, tensors already sent may still be held."""
    left = max((asleep.allocated for asleep, _ in syncs[1:]), default=None)
    if left is None:
        return Verdict("offload", False, "no weight sync was logged after an update")
    if needs.weights_gib is None:
        return Verdict("offload", False, "the model's sizes are unknown")
    found = f"after an update {left:.2f} GiB in a rank whose part of the weights is {needs.weights_gib:.2f}"
    return Verdict("offload", left < needs.weights_gib / 2, found)


def _zero(mechanism: str, steps: Mapping[int, Mapping[str, float]], key: str) -> Verdict:
    values = [step[key] for step in steps.values() if key in step]
    proven = bool(values) and not any(values)
    return Verdict(mechanism, proven, f"{max(values, default=0):.2%} at most in {len(values)} steps")
