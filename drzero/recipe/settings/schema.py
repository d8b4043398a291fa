"""The keys of each stage, without importing Hydra.

schema = schema_of("evaluate")
schema["solver.temperature"].fault(-1)     # "is -1, not a number at least 0"
schema.is_unknown("retrieval.topkk")       # True: no such key, and users cannot add one there
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, get_type_hints

from drzero.recipe.settings import stages, verl
from drzero.recipe.settings.key import TRAINING, Key, keys_of

OWN: dict[str, type | None] = {
    "prepare_data": stages.PrepareData,
    "preview": stages.Preview,
    "warm_start": stages.WarmStart,
    "challenger": stages.Challenger,
    "synthesize": stages.Synthesize,
    "solver": stages.SolverStage,
    "train": stages.Train,
    "merge": stages.Merge,
    "evaluate": stages.Evaluate,
    "serve_search": None,
    "serve_model": stages.ServeModel,
    "ask": stages.Ask,
    "bundle": stages.Bundle,
    "serve_agent": stages.ServeAgent,
    "agent_bench": stages.AgentBench,
    "flow_test": stages.FlowTestStage,
    "compare_rollouts": stages.CompareRollouts,
    "evolve": stages.Evolve,
}
STAGES = tuple(OWN)  # the files of config/ that commands compose
WITH_VERL = ("challenger", "solver", "train", "flow_test")
_SHORT = {
    "compare_rollouts": {"data": "compare.data", "n": "compare.n"},
    "agent_bench": {"mode": "run_mode"},
    "warm_start": {"from": "demonstrations"},
}
"""Short names of keys, which other stages use for other things."""
SHARED_WITH_VERL = "data"  # a node of veRL's config that also has keys of ours


@dataclasses.dataclass(frozen=True)
class Schema:
    """Our keys of one stage."""

    stage: str
    keys: dict[str, Key]

    @property
    def has_verl(self) -> bool:
        """Whether the stage includes veRL's config."""
        return self.stage in WITH_VERL

    def __getitem__(self, name: str) -> Key:
        return self.keys[name]

    def __contains__(self, name: str) -> bool:
        return name in self.keys

    def is_group(self, name: str) -> bool:
        """Whether a dotted name is a group of our keys."""
        return any(key.startswith(f"{name}.") for key in self.keys)

    def is_unknown(self, name: str) -> bool:
        """Whether a dotted name is new in a place where only our keys are allowed."""
        parts = name.split(".")
        ours = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        if self.is_group(name) or any(place in self.keys for place in ours):  # below a key is its own value
            return False
        return not self.has_verl or parts[0] not in verl.ROOTS

    def ignores(self, name: str) -> bool:
        """Whether a dotted name is veRL's, in a stage without veRL."""
        root = name.partition(".")[0]
        return not self.has_verl and root in verl.ROOTS and not (name in self.keys or self.is_group(name))

    def changing_results(self) -> list[str]:
        """The keys that can change the stage's results."""
        return [name for name, key in self.keys.items() if self.stage in key.limits.results]

    def changing_journal(self) -> list[str]:
        """The keys that can change single conversations of the stage."""
        return [name for name, key in self.keys.items() if self.stage in key.limits.journal]

    def prune(self, config: Any) -> None:
        """Keep only our keys in a config without veRL: `hardware/` and `model/` set veRL's in every stage."""
        if self.has_verl:
            config.pop("settings_of", None)  # which model/ sets for a warm start
            return
        for root in list(config):
            if root == SHARED_WITH_VERL and self.is_group(root):
                for name in [name for name in config[root] if f"{root}.{name}" not in self.keys]:
                    del config[root][name]
            elif root not in self.keys and not self.is_group(str(root)):
                del config[root]


@cache
def schema_of(stage: str) -> Schema:
    """The schema of a stage. Raises KeyError for an unknown one."""
    shared = () if stage == "evolve" else keys_of(stages.Common)
    return Schema(stage, {key.name: key for key in (*shared, *own_keys(stage))})


def in_full(stage: str, overrides: Sequence[str]) -> list[str]:
    """A stage's overrides with the keys' full names. `from=FOLDER` is a list of one."""
    names = _SHORT.get(stage, {})
    parts = (override.partition("=") for override in overrides)
    return [
        f"{names[key]}=[{value}]"
        if key in names and key == "from" and not value.startswith("[")
        else f"{names.get(key, key)}{sign}{value}"
        for key, sign, value in parts
    ]


def own_keys(stage: str) -> list[Key]:
    """A stage's keys on top of the common ones. Raises KeyError for an unknown stage."""
    own = OWN[stage]
    return list(keys_of(own)) if own else []


def run_keys() -> list[str]:
    """The keys that a training run cannot change when it resumes."""
    keys = [key for stage in TRAINING for key in schema_of(stage).keys.values() if key.limits.run]
    return [*dict.fromkeys(key.name for key in keys), *verl.RUN]


def pace_keys() -> list[str]:
    """The keys that the time of a training step depends on."""
    return [*(key.name for key in schema_of("challenger").keys.values() if key.limits.pace), *verl.PACE]


def all_keys() -> Iterator[tuple[Key, tuple[str, ...]]]:
    """Every key once, with the stages that add it to the common ones (none for a common key)."""
    keys = {key.name: key for key in keys_of(stages.Common)}
    common, having = set(keys), dict[str, tuple[str, ...]]()
    for stage in STAGES:
        for name, key in schema_of(stage).keys.items():
            if name not in common:
                keys.setdefault(name, key)
                having[name] = (*having.get(name, ()), stage)
    yield from ((key, having.get(name, ())) for name, key in keys.items())


def group_docs() -> dict[str, str]:
    """Each group's docstring, by its dotted name."""
    docs = {}
    for cls in (stages.Common, *filter(None, OWN.values())):
        for name, hint in get_type_hints(cls).items():
            if dataclasses.is_dataclass(hint):
                docs[name] = inspect.cleandoc(hint.__doc__ or "")
    return docs
