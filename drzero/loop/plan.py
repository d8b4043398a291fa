"""The stages of a loop in order, with their overrides. Iteration 0 evaluates the base model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from drzero.ops.text import did_you_mean
from drzero.recipe.compose import CONFIG_DIR, compose_plain, options
from drzero.recipe.overrides import OverrideError, check_overrides, key_of
from drzero.recipe.settings.schema import schema_of

STAGES = ("challenger", "synthesize", "solver", "merge", "evaluate")
_STAGE_OVERRIDE = re.compile(r"(?P<sign>[+~]*)stages\.(?P<stage>\w+)\.(?P<rest>.+)")
_OWN_KEYS = ("iterations", "keep_checkpoints", "evaluations", "prepare_demo", "loop")
# The loop sets these keys. An override would break the chain from stage to stage.
_CHAINED = {
    "iteration": "the loop counts it",
    "actor_rollout_ref.model.path": "set base_model=… for the model the loop starts from",
    "solver.model_path": "the challenger plays against the last solver",
    "continue_from": "a challenger continues from the last one",
    "trainer.total_training_steps": "set steps_per_iteration=…",
    "trainer.resume_mode": "the loop resumes by itself",
    "trainer.resume_from_path": "the loop resumes by itself",
    "endpoint": "the loop evaluates its own solvers; evaluate another model with `drzero evaluate`",
    **dict.fromkeys(
        ("run.name", "run.dir", "run.export_dir"),
        "the loop names its runs; give it a folder of its own with paths.checkpoints=…",
    ),
    **dict.fromkeys(("challenger", "source", "start_model", "partition"), "it follows from the iteration"),
}


@dataclass(frozen=True)
class StageRun:
    """One stage of one iteration."""

    stage: str
    iteration: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its name in the manifest, and its run folder's."""
        return f"{self.stage}_iter{self.iteration}"


def compose_loop(arguments: Sequence[str]) -> DictConfig:
    """Compose `evolve.yaml` with the typed overrides of stages. Raises OverrideError for a forbidden one."""
    own = last_of_each_key([argument for argument in arguments if key_of(argument) in _OWN_KEYS])
    check_overrides(list(own), CONFIG_DIR, schema_of("evolve"))
    config = compose_plain("evolve", own)
    rest = [argument for argument in arguments if key_of(argument) not in _OWN_KEYS]
    of_stages = [match for argument in rest if (match := _STAGE_OVERRIDE.fullmatch(argument))]
    of_all = [argument for argument in rest if not _STAGE_OVERRIDE.fullmatch(argument)]
    for argument in of_all:
        if key_of(argument).partition(".")[0] in ("common", "stages"):
            raise OverrideError(
                f"{argument!r} lists overrides, as the files in config/loop/ do: type each alone, KEY=VALUE "
                "for all stages or stages.STAGE.KEY=VALUE for one"
            )
    # Later overrides win: the loop's files, then typed ones for all stages, then for one.
    chosen = [(stage, argument) for argument in of_all for stage in STAGES]
    for match in of_stages:
        if match["stage"] not in STAGES:
            hint = did_you_mean(match["stage"], STAGES)
            raise OverrideError(
                f"{match[0]!r}: there is no stage {match['stage']!r}{hint}. Stages: {', '.join(STAGES)}"
            )
        if key_of(match["rest"]) == "paths.checkpoints":
            raise OverrideError(f"{match[0]!r}: the stages of a loop share it, so type paths.checkpoints=…")
        chosen.append((match["stage"], match["sign"] + match["rest"]))
    for stage, override in chosen:
        if _names_environment(override):
            raise OverrideError(
                f"{override!r} cannot be set for a loop, which learns to search: another task has "
                "`drzero train` and `drzero evaluate`"
            )
        if reason := _CHAINED.get(key_of(override)):
            raise OverrideError(f"{override!r} cannot be set for a loop: {reason}")
        config.stages[stage].append(override)
    return config


def _names_environment(override: str) -> bool:
    key, value = key_of(override), override.partition("=")[2].strip("'\"")
    if key == "env":  # which also names a corpus
        return value not in options("env")
    return key in ("agent", "environment", "environment.name")


def plan_loop(config: DictConfig) -> list[StageRun]:
    """Every stage run of the loop, in order."""
    turns = [(stage, i) for i in range(1, config.iterations + 1) for stage in STAGES]
    # Unresolved: an interpolation in an override refers to the stage's config, not to the loop's.
    plain: Any = OmegaConf.to_container(config, resolve=False)
    runs = [
        StageRun(stage, i, last_of_each_key([f"iteration={i}", *plain["common"], *plain["stages"][stage]]))
        for stage, i in [("evaluate", 0), *turns]
    ]
    return [run for run in runs if run.stage != "evaluate" or config.evaluations]


def take_option(arguments: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """The value of `name VALUE` or `name=VALUE`, and the other words. None without the option."""
    value, rest, words = None, [], iter(arguments)
    for word in words:
        option, equals, given = word.partition("=")
        if option != name:
            rest.append(word)
        else:
            value = given if equals else next(words, "")
    return value, rest


def last_of_each_key(overrides: Sequence[str]) -> tuple[str, ...]:
    """The last override of each key, because Hydra refuses two choices of one group."""
    last = {key_of(override): place for place, override in enumerate(overrides)}
    return tuple(overrides[place] for place in sorted(last.values()))
