"""GPUs that only sample: one key, and all that follows from it."""

import pytest

from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage, process_env, resolve
from drzero.recipe.overrides import OverrideError

LONG = (
    "mode=separate_async machine.gpus=4 actor_rollout_ref.rollout.nnodes=1 "
    "actor_rollout_ref.rollout.n_gpus_per_node=4"
)


def composed(stage, said):
    return resolve(compose_stage(stage, ["compute=8xh100", *said.split()]))


@pytest.mark.parametrize(
    ("said", "training", "sampling"),
    [
        ("machine.serve_gpus=4", 4, 4),
        ("machine.serve_gpus=3", 5, 3),
        ("machine.serve_gpus=[4,5,6,7]", 4, 4),
        ("machine.serve_gpus=[0]", 7, 1),
        ("machine.serve_gpus=2 machine.gpus=4", 2, 2),
        ("machine.serve_gpus=4 mode=separate_async", 4, 4),
        (LONG, 4, 4),
    ],
)
def test_the_rest_follows_from_how_many_gpus_serve(said, training, sampling):
    config = composed("solver", said)
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    assert trainer.v1.trainer_mode == f"drzero_{config.method}_separate_async"
    assert (trainer.n_gpus_per_node, rollout.nnodes, rollout.n_gpus_per_node) == (training, 1, sampling)
    assert rollout.checkpoint_engine.backend == "nccl" and config.data.gen_batch_size == 1
    updates = trainer.v1.separate_async.parameter_sync_step
    assert updates * config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size


@pytest.mark.parametrize("said", ["machine.serve_gpus=4", "machine.serve_gpus=[0,1,2,3]", LONG])
def test_a_split_of_a_rented_machine_has_no_error_and_counts_its_gpus(said):
    split, whole = (
        preflight(compose_stage("train", ["env=wordle", "compute=8xh100", *words]), "train")
        for words in (said.split(), [])
    )
    assert [one for one in split.errors if "GiB" in str(one) or "GPU" in str(one)] == []
    ledger = split.ledger
    assert ledger.phases["update"]["actor: weights"] == 2 * whole.ledger.phases["update"]["actor: weights"]
    alone = ledger.phases["GPU that only samples"]
    assert "actor: weights" not in alone
    assert alone["rollout engine: share"] >= ledger.phases["rollout"]["rollout engine: share"]


@pytest.mark.parametrize("said", ["", "machine.serve_gpus=null"])
def test_without_the_key_all_gpus_do_both(said):
    config = composed("solver", said)
    assert config.trainer.v1.trainer_mode == "drzero_grpo_sync"
    assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.nnodes) == (8, 0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("machine.serve_gpus=8", "none of 8 (machine.gpus) would be left to train: set it to 7 at most"),
        ("machine.serve_gpus=[0,1] machine.gpus=2", "none of 2 (machine.gpus) would be left"),
        ("machine.serve_gpus=1 machine.gpus=1", "it needs two GPUs or more (machine.gpus)"),
        ("machine.serve_gpus=0", "no GPU would sample: leave it out"),
        ("machine.serve_gpus=[]", "no GPU would sample: leave it out"),
        ("machine.serve_gpus=[4,4]", "an id is given twice"),
        ("machine.serve_gpus=[8]", "GPUs 0 to 7, without a GPU 8: number them among those of the run"),
        ("machine.serve_gpus=-1", "not a number of GPUs or a list of their ids, or null"),
        ("machine.serve_gpus=half", "not a number of GPUs"),
        ("machine.serve_gpus=4 mode=sync", "leave mode= out"),
        ("machine.serve_gpus=4 mode=colocate_async", "leave mode= out"),
        ("machine.serve_gpus=[1] machine.nodes=2", "ids are for one machine: write machine.serve_gpus=1"),
        ("machine.serve_gpus=1 hardware=cpu", "a CPU's processes all train and sample in turn"),
    ],
)
def test_a_split_that_cannot_be_is_one_line_with_what_to_do(said, message):
    with pytest.raises(OverrideError) as refused:
        composed("solver", said)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("serving", "before", "after"),
    [
        ("4", None, None),
        ("[6,7]", None, "0,1,2,3,4,5,6,7"),
        ("[0,1,2,3]", None, "4,5,6,7,0,1,2,3"),
        ("[5,2]", None, "0,1,3,4,6,7,5,2"),
        ("[0,1]", "9,8,7,6,5,4,3,2", "7,6,5,4,3,2,9,8"),
        ("[0,1]", "GPU-a,GPU-b,GPU-c", "GPU-a,GPU-b,GPU-c"),
    ],
)
def test_ids_put_the_gpus_that_serve_last_in_what_the_processes_see(monkeypatch, serving, before, after):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    environment = process_env(composed("solver", f"machine.serve_gpus={serving}"))
    assert environment.get("CUDA_VISIBLE_DEVICES", before) == after
