"""The keys of each stage.

    schema = schema_of("evaluate")
    schema["solver.temperature"].fault(-1)     # "is -1, not a number at least 0"
    schema.is_unknown("retrieval.topkk")       # True: no such key, and nobody but us could add it
    schema.prune(config)                       # without veRL's part, which evaluate does not have

`register` has their defaults in Hydra's ConfigStore; nothing here needs Hydra, so help can read it too.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

from drzero.recipe.settings import stages, verl
from drzero.recipe.settings.key import TRAINING, Key, keys_of

OWN: dict[str, type | None] = {
    "prepare_data": stages.PrepareData,
    "preview": stages.Preview,
    "challenger": stages.Challenger,
    "synthesize": stages.Synthesize,
    "solver": stages.SolverStage,
    "train": stages.Train,
    "merge": stages.Merge,
    "evaluate": stages.Evaluate,
    "serve_search": None,
    "serve_model": stages.ServeModel,
    "agent_bench": stages.AgentBench,
    "flow_test": stages.FlowTestStage,
    "compare_rollouts": stages.CompareRollouts,
    "evolve": stages.Evolve,
}
"""The settings that a stage has on top of the common ones."""
STAGES = tuple(OWN)
"""The config files that a command composes."""
WITH_VERL = ("challenger", "solver", "train", "flow_test")
"""Those with veRL's config in them."""
SHARED_WITH_VERL = "data"
"""A node of veRL's of which some keys are ours."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """The keys of a stage that are ours."""

    stage: str
    keys: dict[str, Key]

    @property
    def has_verl(self) -> bool:
        """Whether veRL's config is part of the stage's."""
        return self.stage in WITH_VERL

    def __getitem__(self, name: str) -> Key:
        return self.keys[name]

    def __contains__(self, name: str) -> bool:
        return name in self.keys

    def is_group(self, name: str) -> bool:
        """Whether a dotted name is a group of our keys."""
        return any(key.startswith(f"{name}.") for key in self.keys)

    def is_unknown(self, name: str) -> bool:
        """Whether a dotted name would be a new key in a place where all keys are ours."""
        parts = name.split(".")
        ours = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        if self.is_group(name) or any(place in self.keys for place in ours):  # below a key is its own value
            return False
        return not self.has_verl or parts[0] not in verl.ROOTS

    def ignores(self, name: str) -> bool:
        """Whether a dotted name is veRL's in a stage without veRL."""
        root = name.partition(".")[0]
        return not self.has_verl and root in verl.ROOTS and not (name in self.keys or self.is_group(name))

    def changing_results(self) -> list[str]:
        """The keys with which the stage's results can change."""
        return [name for name, key in self.keys.items() if self.stage in key.limits.results]

    def changing_journal(self) -> list[str]:
        """The keys with which single conversations of the stage can change."""
        return [name for name, key in self.keys.items() if self.stage in key.limits.journal]

    def prune(self, config: Any) -> None:
        """Remove what the stage has no key for from a config, or a plain dict of one, without veRL's part.

        The groups of `hardware/` and `model/` set veRL's keys as well.
        """
        if self.has_verl:
            return
        for root in list(config):
            if root == SHARED_WITH_VERL and self.is_group(root):
                for name in [name for name in config[root] if f"{root}.{name}" not in self.keys]:
                    del config[root][name]
            elif root not in self.keys and not self.is_group(str(root)):
                del config[root]


@cache
def schema_of(stage: str) -> Schema:
    """The schema of a config file of `config/`; raises KeyError for a name that is none."""
    own = OWN[stage]
    shared = [] if stage == "evolve" else list(keys_of(stages.Common))
    keys = [*shared, *(keys_of(own) if own else ())]
    return Schema(stage, {key.name: key for key in keys})


def own_keys(stage: str) -> list[Key]:
    """The keys that a stage has on top of the common ones; raises KeyError for a name that is none."""
    own = OWN[stage]
    return list(keys_of(own)) if own else []


def run_keys() -> list[str]:
    """What a training run keeps for life: a checkpoint is not resumed with another value."""
    keys = [key for stage in TRAINING for key in schema_of(stage).keys.values() if key.limits.run]
    return [*dict.fromkeys(key.name for key in keys), *verl.RUN]


def pace_keys() -> list[str]:
    """What the time of a training step depends on: steps with another value are no measure."""
    return [*(key.name for key in schema_of("challenger").keys.values() if key.limits.pace), *verl.PACE]


def all_keys() -> Iterator[tuple[Key, tuple[str, ...]]]:
    """Every key once, with the stages that have it on top of the common ones; none for a common one."""
    keys = {key.name: key for key in keys_of(stages.Common)}
    common, having = set(keys), dict[str, tuple[str, ...]]()
    for stage in STAGES:
        for name, key in schema_of(stage).keys.items():
            if name not in common:
                keys.setdefault(name, key)
                having[name] = (*having.get(name, ()), stage)
    yield from ((key, having.get(name, ())) for name, key in keys.items())


def group_docs() -> dict[str, str]:
    """The docstring of each group, by its dotted name."""
    docs = {}
    for cls in (stages.Common, *filter(None, OWN.values())):
        for name, hint in get_type_hints(cls).items():
            if dataclasses.is_dataclass(hint):
                docs[name] = inspect.cleandoc(hint.__doc__ or "")
    return docs
