"""The machine of a launch that names none: the smallest on which the memory ledger holds the model.

The ledger needs Hydra and veRL, which the client lacks, so its results are a table here, and a test computes
them again. Preflight applies the real ledger with all overrides. GPUs without bfloat16 are left out.
"""

import re

from drzero.launch.errors import LaunchError

FITS = {
    0.2: ("a10g", "a10g"),
    0.5: ("a100-40gb", "a10g"),
    1.5: ("a100-40gb", "a10g"),
    3: ("single_h100", "a100-40gb"),
    7: ("4xa100-80gb", "single_h100"),
    8: ("4xa100-80gb", "4xa100-80gb"),
    14: ("8xh100", "4xa100-80gb"),
    32: ("8xh100", "8xh100"),
}
"""The smallest machines to train and to serve at most so many billion weights, by the model's name."""
_UNNAMED = {"demo-policy": 0.135}
"""Billions of weights of the shipped model, whose name has no size."""
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])")


def billions_of(model: str) -> float | None:
    """A model's weights in billions, read from its name, or None if the name has no size."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if name in _UNNAMED:
        return _UNNAMED[name]
    sizes = [float(number) / (1 if unit == "b" else 1000) for number, unit in _SIZE.findall(name)]
    return max(sizes) if sizes else None


def default_machine(stage: str, model: str) -> tuple[str, str]:
    """The machine and the reason. Raises LaunchError if the model's size is unknown or too large."""
    billions = billions_of(model)
    if billions is None:
        raise LaunchError(
            f"{model}: the size of this model is not known, so no machine can be chosen for it: add "
            "--gpu-type and --gpu-count, for example --gpu-type H100 --gpu-count 1"
        )
    what = f"a model of {billions:g} billion weights ({model}) in {stage}"
    for most, (training, serving) in FITS.items():
        if billions <= most:
            machine = serving if stage in ("synthesize", "evaluate") else training
            holds = f"the smallest machine whose memory holds {what}"
            return machine, f"{holds}; --gpu-type and --gpu-count choose another"
    raise LaunchError(f"{model}: no machine of config/compute/ holds {billions:g} billion weights in {stage}")
