"""The machine of a launch that names none: the smallest on which the memory ledger holds the job's model.

    default_machine("evaluate", "Qwen/Qwen2.5-0.5B-Instruct")
    # ("a10g", "the smallest machine whose memory holds a model of 0.5 billion weights (…) in evaluate; …")

The ledger needs Hydra and veRL's config, which the client does not have, so its result is a table here; a
test computes it again. Preflight applies the ledger itself, with all overrides, before the machine is
requested. Machines whose GPU has no bfloat16 are left to those who ask for one.
"""

import re
from dataclasses import dataclass

from drzero.launch.errors import LaunchError


@dataclass(frozen=True)
class Fit:
    """The smallest machines (`config/compute/`) for models of up to so many weights, with their defaults."""

    billions: float
    """As names say them, which round: Qwen2.5-7B has 7.6."""
    training: str
    """For challenger and solver, and for a loop."""
    serving: str
    """For synthesize and evaluate."""


FITS = (
    Fit(0.2, "a10g", "a10g"),
    Fit(0.5, "a100-40gb", "a10g"),
    Fit(1.5, "single_h100", "a10g"),
    Fit(3, "single_h100", "a100-40gb"),
    Fit(7, "4xa100-80gb", "single_h100"),
    Fit(8, "4xa100-80gb", "4xa100-80gb"),
    Fit(14, "8xh100", "4xa100-80gb"),
    Fit(32, "8xh100", "8xh100"),
)
"""By the memory ledger."""
_UNNAMED = {"demo-policy": 0.135}
"""Billions of weights of the shipped model whose name does not say it."""
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])")


def billions_of(model: str) -> float | None:
    """A model's weights in billions, by its name (`Qwen/Qwen2.5-0.5B-Instruct`); None if it does not say."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if name in _UNNAMED:
        return _UNNAMED[name]
    sizes = [float(number) / (1 if unit == "b" else 1000) for number, unit in _SIZE.findall(name)]
    return max(sizes) if sizes else None


def default_machine(stage: str, model: str) -> tuple[str, str]:
    """The machine's name and the reason for it; raises LaunchError for a model of unknown size."""
    billions = billions_of(model)
    if billions is None:
        raise LaunchError(
            f"{model}: the size of this model is not known, so no machine can be chosen for it: add "
            "--gpu-type and --gpu-count, for example --gpu-type H100 --gpu-count 1"
        )
    serves = stage in ("synthesize", "evaluate")
    for fit in FITS:
        if billions <= fit.billions:
            what = f"a model of {billions:g} billion weights ({model}) in {stage}"
            reason = (
                f"the smallest machine whose memory holds {what}; --gpu-type and --gpu-count choose another"
            )
            return (fit.serving if serves else fit.training), reason
    raise LaunchError(f"{model}: no machine of config/compute/ holds {billions:g} billion weights in {stage}")
