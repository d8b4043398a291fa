"""The config of an agent, with the settings of the run that trained it: nobody has to repeat them.

compose_agent("ask", ["iteration=2"])     # as the loop in paths.checkpoints trained and evaluated its solver

The last iteration answers unless you say which. What you type wins over what the run recorded.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from drzero.agent.bundle.opening import bundle_values
from drzero.agent.keys import INDEX_KEYS, answer_keys
from drzero.ops.errors import UserError
from drzero.recipe.compose import RESOLVED, compose_plain, compose_stage
from drzero.recipe.overrides import assigned, key_of

_OTHER_MODELS = ("model", "base_model", "solver.model_path", "endpoint")


class NoAgent(UserError):
    """There is no trained solver to ask. The message says how to get one."""


def compose_agent(stage: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `ask` or `serve_agent`. Raises NoAgent or OverrideError."""
    return compose_stage(stage, [*_from_run(overrides), *overrides])


def _overrides(values: Mapping[str, Any]) -> list[str]:
    return [_override(key, value) for key, value in values.items() if value is not None]


def _override(key: str, value: Any) -> str:
    if isinstance(value, ListConfig):
        return assigned(key, [str(one) for one in value])
    return assigned(key, value) if isinstance(value, str) else f"{key}={value}"


def _from_run(overrides: Sequence[str]) -> list[str]:
    typed = {key_of(override): override.partition("=")[2] for override in overrides}
    roots = [override for override in overrides if key_of(override).startswith("paths.")]
    paths = compose_plain("ask", roots).paths
    folder, iteration = Path(paths.checkpoints), typed.get("iteration")
    is_trained = not any(key in typed for key in _OTHER_MODELS)
    if (bundle := typed.get("bundle", "null").strip("'\"")) != "null":
        corpus = Path(paths.corpus).absolute()
        return _overrides(bundle_values(bundle, typed, corpus=corpus, trained=is_trained))
    if is_trained and iteration is None:
        iteration = str(_last_iteration(folder))
    recorded = _recorded(folder, iteration or "0")
    chosen = ["iteration=0"] if iteration is None else [f"iteration={iteration}"]
    if recorded is None:
        return chosen
    # A retrieval.url goes with what it serves; a typed place of an index replaces both.
    has_place = any(key.startswith(("chroma.", "faiss.", "index", "retrieval.url")) for key in typed)
    keys = () if has_place else INDEX_KEYS
    wanted = [*keys, *(["base_model", *answer_keys()] if is_trained else [])]
    return [*chosen, *_overrides({key: OmegaConf.select(recorded, key) for key in wanted})]


def _last_iteration(folder: Path) -> int:
    found = [re.fullmatch(r"solver_iter(\d{1,9})_hf", path.name) for path in folder.glob("solver_iter*_hf")]
    iterations = [int(match[1]) for match in found if match]
    if not iterations:
        raise NoAgent(
            f"there is no trained solver in {folder}: train one with `drzero evolve`, name another folder "
            "with paths.checkpoints=, or ask another model with model= or endpoint="
        )
    return max(iterations)


def _recorded(folder: Path, iteration: str) -> DictConfig | None:
    """The config of the solver's evaluation, its training, or the loop's first evaluation."""
    names = (f"evaluate_iter{iteration}", f"solver_iter{iteration}", "evaluate_iter0")
    paths = [folder / name / f"{RESOLVED}.yaml" for name in names]
    loaded = next((OmegaConf.load(path) for path in paths if path.is_file()), None)
    return loaded if isinstance(loaded, DictConfig) else None
