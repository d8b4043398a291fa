"""Which stages a loop runs with which overrides, and which settings count as changed."""

import pytest

from drzero.loop.identity import changed_keys, same_input, significant_config
from drzero.loop.plan import compose_loop, plan_loop
from drzero.recipe.compose import compose_stage
from drzero.recipe.overrides import OverrideError


def overrides(*arguments):
    return {run.name: run.overrides for run in plan_loop(compose_loop(arguments))}


def test_a_loop_evaluates_the_base_model_and_then_takes_turns():
    assert list(overrides("iterations=2")) == [
        "evaluate_iter0",
        *(f"{stage}_iter1" for stage in ("challenger", "synthesize", "solver", "merge", "evaluate")),
        *(f"{stage}_iter2" for stage in ("challenger", "synthesize", "solver", "merge", "evaluate")),
    ]


def test_an_override_of_a_stage_reaches_that_stage_only():
    plan = overrides("iterations=1", "stages.solver.data.train_batch_size=4", "+stages.solver.trainer.foo=1")
    assert {"data.train_batch_size=4", "+trainer.foo=1"} < set(plan["solver_iter1"])
    assert not any("train_batch_size" in override for override in plan["challenger_iter1"])


def test_any_other_override_reaches_every_stage():
    assert all("model=demo-policy" in given for given in overrides("model=demo-policy").values())


def test_the_last_choice_of_a_group_counts():
    given = overrides("loop=demo", "model=smollm2-135m")["merge_iter1"]
    assert [override for override in given if override.startswith("model=")] == ["model=smollm2-135m"]


CHAINED = [("run.name=x", "paths.checkpoints"), ("iteration=2", "counts")]
CHAINED += [("actor_rollout_ref.model.path=x", "base_model")]
CHAINED += [("stages.challenger.solver.model_path=x", "last solver"), ("run.dir=x", "paths.checkpoints")]
CHAINED += [("stages.challenger.trainer.total_training_steps=9", "steps_per_iteration")]
CHAINED += [("stages.solver.paths.checkpoints=x", "share it"), ("env=wordle", "drzero train")]
CHAINED += [("stages.evaluate.env=wordle", "drzero train"), ("trainer.resume_from_path=x", "by itself")]
CHAINED += [(f"{key}=[data.seed=1]", "stages.STAGE.KEY=VALUE") for key in ("stages.solver", "common")]
CHAINED += [("stages.solvr.data.seed=1", "'solver'"), ("iterations=0", "at least 1")]
CHAINED += [("loop=demos", "'demo'")]


@pytest.mark.parametrize(("argument", "said"), CHAINED)
def test_an_override_that_breaks_the_chain_is_refused_with_the_right_key(argument, said):
    with pytest.raises(OverrideError, match=said):
        compose_loop([argument])


def test_a_typed_override_for_all_stages_beats_the_loops_file():
    given = overrides("loop=demo", "steps_per_iteration=8", "stages.solver.steps_per_iteration=9")
    assert "steps_per_iteration=8" in given["challenger_iter1"]
    assert [o for o in given["solver_iter1"] if o.startswith("steps")] == ["steps_per_iteration=9"]


def test_a_loop_can_leave_out_evaluations():
    assert not any(name.startswith("evaluate") for name in overrides("evaluations=false"))


def significant(*more):
    typed = ["hardware=cpu", *more]
    return significant_config("challenger", compose_stage("challenger", typed), typed)


PLACE_AND_SPEED = ["paths.checkpoints=elsewhere", "retrieval.port=7777", "retrieval.deadline_s=9"]
PLACE_AND_SPEED += ["solver.max_batch_size=3", "trainer.save_freq=1"]
PLACE_AND_SPEED += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]


@pytest.mark.parametrize("override", PLACE_AND_SPEED)
def test_place_and_speed_of_a_stage_do_not_change_its_results(override):
    assert changed_keys(significant(), significant(override)) == []


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("data.seed=7", "data.seed: 42 → 7"),
        ("solver.attempts=3", "solver.attempts: 5 → 3"),
        ("+trainer.foo=1", "trainer.foo: '(not set)' → 1"),
    ],
)
def test_a_setting_that_can_change_results_is_named_with_both_values(override, change):
    assert changed_keys(significant(), significant(override)) == [change]


def test_a_hub_model_is_the_same_before_and_after_its_download():
    assert same_input("org/model", "org/model@abc") and not same_input("org/model@abc", "org/model@def")


def test_later_iterations_read_the_earlier_ones_outputs():
    first, second = (compose_stage("challenger", ["hardware=cpu", f"iteration={i}"]) for i in (1, 2))
    assert first.continue_from is None and first.solver.model_path == first.base_model
    assert second.continue_from == f"{second.paths.checkpoints}/challenger_iter1"
    assert second.solver.model_path == f"{second.paths.checkpoints}/solver_iter1_hf"
    assert second.trainer.total_training_steps == 2 * first.trainer.total_training_steps
