"""The machine of a launch that names none: the recipe's own, 8×H100, for which a cheaper one may do.

The memory ledger says what holds a model. It needs Hydra and veRL, which the client lacks, so its results are
a table here, and a test computes them again. GPUs without bfloat16 are left out.
"""

import re

from drzero.launch.actions import find_action
from drzero.launch.compute import load_compute

RECIPES = "8xh100"  # the machine of config/STAGE.yaml too
LABS = ("compare-rollouts", "agent-bench", "serve-model")  # with an engine and nothing else, on a GPU SGLang
FITS = {
    0.2: ("a10g", "a10g", "a10g"),
    0.5: ("a100-40gb", "a10g", "a10g"),
    1.5: ("a100-40gb", "a10g", "a10g"),
    3: ("single_h100", "a100-40gb", "a10g"),
    7: ("4xa100-80gb", "single_h100", "a100-40gb"),
    8: ("4xa100-80gb", "4xa100-80gb", "a100-40gb"),
    14: ("8xh100", "4xa100-80gb", "4xa100-80gb"),
    32: ("8xh100", "8xh100", "8xh100"),
}
"""The smallest machines to train, to serve next to an index, and to try at most so many billion weights."""
_UNNAMED = {"demo-policy": 0.135}  # billions of weights of the shipped model, whose name has no size
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])")


def billions_of(model: str) -> float | None:
    """A model's weights in billions, read from its name, or None if the name has no size."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if name in _UNNAMED:
        return _UNNAMED[name]
    sizes = [float(number) / (1 if unit == "b" else 1000) for number, unit in _SIZE.findall(name)]
    return max(sizes) if sizes else None


def smallest_machine(stage: str, model: str) -> str | None:
    """The smallest that holds the model, or None if its size is unknown or too large for all."""
    billions = billions_of(model)
    for most, (training, serving, trying) in FITS.items():
        if billions is not None and billions <= most:
            return trying if stage in LABS else training if find_action(stage).trains else serving
    return None


def default_machine(stage: str, model: str, *, rehearses: bool) -> tuple[str, str]:
    """The machine and the reason. A rehearsal gets the smallest that holds its model."""
    smallest = smallest_machine(stage, model)
    if stage in LABS and billions_of(model) is None:
        return "single_h100", f"the name {model} has no size; another is one flag: --gpu-type, --gpu-count"
    if (rehearses or stage in LABS) and smallest:
        return smallest, f"the smallest machine whose memory holds {model} in {stage}"
    reason = "the recipe's machine, with SGLang; another is one flag: --gpu-type, --gpu-count or compute="
    if smallest not in (None, RECIPES):
        cheaper = load_compute(smallest)
        engine = ", with the slower reference engine" if cheaper.count == 1 else ""
        reason += f"; compute={smallest} at ${cheaper.usd_per_hour:.2f} an hour holds {model} too{engine}"
    return RECIPES, reason
