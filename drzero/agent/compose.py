"""The config of an agent, with the settings of the run that trained it: nobody has to repeat them.

The last iteration answers unless you say which. Your overrides win over the run's record.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from drzero.agent.bundle.opening import bundle_values
from drzero.agent.keys import INDEX_KEYS, PLACES, answer_keys
from drzero.checkpoints.reading import read_settings
from drzero.loop.plan import last_of_each_key
from drzero.ops.errors import UserError
from drzero.recipe.compose import compose_plain, compose_stage
from drzero.recipe.overrides import assigned, key_of
from drzero.stages.models import evaluate_overrides

AGENTS = ("ask", "serve-agent")
"""Commands with the settings of the run that trained their model."""
_OTHER_MODELS = ("solver.model_path", "endpoint", "model", "base_model")
_NAMING = ("iteration", *_OTHER_MODELS, "endpoint_model", "endpoint_key", "api", "tokenizer")
"""They name the model that answers."""


def compose_agent(stage: str, overrides: Sequence[str]) -> DictConfig:
    """Compose `ask` or `serve_agent`. Raises UserError."""
    overrides = evaluate_overrides(overrides)
    return compose_stage(stage, [*_from_run(overrides), *overrides])


def beside(overrides: Sequence[str], compared: str) -> list[str]:
    """The overrides of the agent to compare with. Another model replaces all that names the first one."""
    try:
        words = shlex.split(compared)
    except ValueError:  # a quotation mark without its partner
        words = []
    if not words or not all("=" in word for word in words):
        raise UserError(f"--compare takes what names the other agent, such as iteration=0, not {compared!r}")
    if any(key_of(word) in ("iteration", "bundle", *_OTHER_MODELS) for word in words):
        overrides = [override for override in overrides if key_of(override) not in _NAMING]
    return list(last_of_each_key([*overrides, *words]))


def _overrides(values: Mapping[str, Any]) -> list[str]:
    corpus = values.get("paths.corpus")
    return [_override(key, value, corpus) for key, value in values.items() if value is not None]


def _override(key: str, value: Any, corpus: str | None) -> str:
    if isinstance(value, ListConfig):
        return assigned(key, [_in_corpus(str(one), corpus) for one in value])
    return assigned(key, _in_corpus(value, corpus)) if isinstance(value, str) else f"{key}={value}"


def _in_corpus(place: str, corpus: str | None) -> str:
    """A place in the corpus's folder as such, so that it follows a typed paths.corpus."""
    if corpus is None or not place.startswith(f"{corpus}/"):
        return place
    return f"${{paths.corpus}}{place.removeprefix(corpus)}"


def _from_run(overrides: Sequence[str]) -> list[str]:
    typed = {key_of(override): override.partition("=")[2] for override in overrides}
    roots = [override for override in overrides if key_of(override).startswith("paths.")]
    paths = compose_plain("ask", roots).paths
    folder, iteration = Path(paths.checkpoints), typed.get("iteration")
    # Next to an iteration, model= is what the loop was typed with.
    is_trained = not any(key in typed for key in _OTHER_MODELS[: 2 if iteration else None])
    if (bundle := typed.get("bundle", "null").strip("'\"")) != "null":
        corpus = Path(paths.corpus).absolute()
        return _overrides(bundle_values(bundle, typed, corpus=corpus, trained=is_trained))
    if is_trained and iteration is None:
        iteration = str(_last_iteration(folder))
    iteration = iteration or "0"
    # A retrieval.url goes with what it serves; a typed place of an index replaces both.
    has_place = any(key.startswith(PLACES) for key in typed)
    keys = [*(() if has_place else ("paths.corpus", *INDEX_KEYS)), *(answer_keys() if is_trained else [])]
    keys += ["base_model"] if is_trained and "model" not in typed else []
    return [f"iteration={iteration}", *_overrides(_recorded(folder, iteration, keys))]


def _last_iteration(folder: Path) -> int:
    found = [re.fullmatch(r"solver_iter(\d{1,9})_hf", path.name) for path in folder.glob("solver_iter*_hf")]
    iterations = [int(match[1]) for match in found if match]
    if not iterations:
        raise UserError(
            f"there is no trained solver in {folder}: train one with `drzero evolve`, name another folder "
            "with paths.checkpoints=, or ask another model with model= or endpoint="
        )
    return max(iterations)


def _recorded(folder: Path, iteration: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """The record of the solver's evaluation, or its training, or the loop's first stages of these."""
    names = (f"evaluate_iter{iteration}", f"solver_iter{iteration}", "evaluate_iter0", "solver_iter1")
    found = (read_settings(folder / name, keys) for name in names)
    return next((recorded for recorded in found if recorded is not None), {})
