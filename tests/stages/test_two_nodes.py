"""The challenger on two real nodes, against the same on one: two ranks over gloo, sampling greedily.

The second node is killed in the second step; it comes back, and the run resumes. What both runs have drawn
and learned is then the same, within rounding.
"""

from pathlib import Path

import pytest
import torch
from chaos import beat
from data_order import unbroken_order
from search_parts import wait_for
from stage_run import RUN_LIMIT_S, assert_nothing_left, dumped_order, run_stage
from two_nodes import two_nodes

from drzero.ops.cluster.cluster import ask_cluster

pytestmark = [
    pytest.mark.slow("two raylets, and three starts of the trainer"),
    pytest.mark.matrix,
    pytest.mark.timeout(4 * RUN_LIMIT_S),
]
STEPS = 2


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as started:
        yield started


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def arguments(prepared, speaking_model, checkpoints):
    return [
        *prepared.overrides(checkpoints, speaking_model)[:-1],
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=3"),
        # Draws depend on which engine a prompt comes to, and when.
        *("actor_rollout_ref.rollout.top_k=1", "solver.temperature=0"),
        f"reward.custom_reward_function.path={Path(__file__).parents[1] / 'parts' / 'reward_by_document.py'}",
        # A step that is proportional to the gradient: Adam's first is its sign, also where that is rounding.
        *("actor_rollout_ref.actor.optim.optimizer=SGD", "actor_rollout_ref.actor.optim.lr=0.1"),
    ]


@pytest.fixture(scope="module")
def one(arguments, checkpoints):
    """Both ranks on one machine, in a Ray of the run's own."""
    run = run_stage("challenger", [*arguments, "run.name=one", "machine.gpus=2"], checkpoints / "one")
    assert run.code == 0, run.out[-4000:] + run.err
    return run


@pytest.fixture(scope="module")
def killed(cluster, arguments, checkpoints):
    """A rank on each node; the second node is killed in the second step."""

    def kill_in_step_two(watch):
        wait_for(lambda: beat(2, "rollout")(checkpoints / "two", 0.0), RUN_LIMIT_S)
        cluster.kill_second()

    return run_stage("challenger", on_two(arguments, cluster), checkpoints / "two", kill_in_step_two)


@pytest.fixture(scope="module")
def two(killed, cluster, arguments, checkpoints):
    """The same, resumed once the node is back."""
    cluster.start_second()
    run = run_stage("challenger", on_two(arguments, cluster), checkpoints / "two")
    assert run.code == 0, run.out[-4000:] + run.err
    return run


def on_two(arguments, cluster):
    nodes = ("machine.nodes=2", "machine.gpus=1", f"machine.ray_address={cluster.address}")
    return [*arguments, "run.name=two", *nodes]


def test_a_run_whose_node_is_killed_stops_and_names_it(killed):
    assert killed.code == 1
    assert "node 127.0.0.1 (" in killed.err and "is lost" in killed.err


def test_nothing_of_it_is_left_on_the_other_node(killed, cluster):
    assert_nothing_left(killed)
    question = {"marker": "", "salt": "a", "variables": []}
    assert ask_cluster(cluster.address, "facts", question).free["gpu"] == 1


def test_the_run_resumes_on_the_cluster_once_the_node_is_back(two):
    assert [line["step"] for line in two.lines("metrics/attempt_001.jsonl")] == [1]
    assert [line["step"] for line in two.lines("metrics/attempt_002.jsonl")] == [2]


def test_two_nodes_draw_the_data_in_the_order_of_one(one, two):
    steps = range(1, STEPS + 1)
    assert dumped_order(two, steps) == dumped_order(one, steps) == unbroken_order(one.config, STEPS)


def weights(run, step):
    """The actor's weights, put together from both ranks' shards."""
    files = sorted((run.folder / f"global_step_{step}" / "actor").glob("model_world_size_2_rank_?.pt"))
    shards = [torch.load(file, weights_only=False) for file in files]
    return {
        name: torch.cat([shard[name].to_local().flatten().float() for shard in shards]) for name in shards[0]
    }


def test_two_nodes_learn_what_one_does_within_rounding(one, two):
    rows = []
    for step in range(1, STEPS + 1):
        a, b = weights(one, step), weights(two, step)
        gap = max((a[name] - b[name]).abs().max().item() for name in a)
        before = weights(one, step - 1) if step > 1 else None
        moved = max((a[name] - before[name]).abs().max().item() for name in a) if before else None
        rows.append((step, gap, moved))
    print("step | largest gap between one and two nodes | largest move of the step")
    for step, gap, moved in rows:
        print(f"{step} | {gap:.2e} | {'' if moved is None else f'{moved:.2e}'}")
    _, gap, moved = rows[-1]
    assert moved > 1e-5 and gap < 1e-3 * moved
