"""What preflight says of a Ray cluster that has answered: its size, and each node next to the run's own."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig

from drzero.ops.cluster.cluster import Cluster, Node, ask_cluster, read_cluster
from drzero.ops.cluster.on_node import facts
from drzero.ops.process.isolated import Ended
from drzero.preflight.finding import Finding
from drzero.preflight.machine import declared_machine
from drzero.preflight.memory_ledger import host_ledger, training_ledger
from drzero.preflight.model_shape import KNOWN
from drzero.preflight.nodes import judge_nodes, judge_size
from drzero.recipe.compose import CPUS_A_GPU, compose_stage, cpus_reserved, resolve
from drzero.recipe.gpu_prices import GPUS, usd_per_hour

HEAD = "10.0.0.1:6379"


@cache
def composed(*overrides: str) -> DictConfig:
    return resolve(compose_stage("solver", overrides))


def two_nodes(*overrides: str) -> DictConfig:
    return composed("compute=2x8xh100", f"machine.ray_address={HEAD}", *overrides)


def node(number: int, gpu: float = 8, cpu: float = 32, **fields: Any) -> Node:
    return Node(f"id{number}", f"10.0.0.{number}", f"gpu-{number}", True, cpu, gpu, **fields)


def cluster(*nodes: Node) -> Cluster:
    free = {name: sum(getattr(one, name) for one in nodes) for name in ("cpu", "gpu")}
    return Cluster(nodes, free)


def test_two_whole_nodes_are_enough():
    assert list(judge_size(two_nodes(), cluster(node(1), node(2)))) == []


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 64)), max_size=4))
def test_a_node_counts_with_all_that_verl_places_on_it_or_not_at_all(sizes):
    """veRL's placement group of a node is never spread over two."""
    there = cluster(*(node(place, gpu, cpu) for place, (gpu, cpu) in enumerate(sizes)))
    fit = sum(gpu >= 8 and cpu >= 8 * CPUS_A_GPU for gpu, cpu in sizes)
    refused = [one for one in judge_size(two_nodes(), there) if one.key == "machine.nodes"]
    assert bool(refused) == (fit < 2)
    assert all(f"the Ray cluster has {fit}" in one.why for one in refused)


def test_gpus_that_another_run_holds_are_not_counted_on():
    busy = replace(cluster(node(1), node(2)), free={"cpu": 64.0, "gpu": 8.0})
    (found,) = judge_size(two_nodes(), busy)
    assert "8 of the cluster's GPUs are free, and 16 are needed" in found.why


def test_cpus_for_which_verl_would_wait_for_ever_are_an_error():
    needed = cpus_reserved(two_nodes())
    (found,) = judge_size(two_nodes(), cluster(node(1, cpu=needed / 2), node(2, cpu=needed / 2 - 1)))
    assert f"for ever for the {needed} that it reserves" in found.why


@cache
def own_facts() -> dict[str, Any]:
    return facts("", "salt", ["RETRIEVAL_TOKEN"])


def findings(answer: dict[str, Any], address: str = HEAD) -> list[Finding]:
    there = cluster(node(1, answer=own_facts()), node(2, answer=answer))
    return list(judge_nodes(there, own_facts(), address))


def test_nodes_of_one_environment_and_one_checkout_have_no_finding():
    assert findings(own_facts()) == []


DIFFERENCES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str, str]] = {
    "version": (
        lambda own: own | {"versions": own["versions"] | {"verl": "0.8.0"}},
        "machine.ray_address",
        "has verl 0.8.0, and this one",
    ),
    "python": (
        lambda own: own | {"python": "3.12.1 at /x"},
        "machine.ray_address",
        "has python 3.12.1 at /x",
    ),
    "code": (lambda own: own | {"code": "0"}, "machine.ray_address", "another state of this project's code"),
    "folder": (lambda own: own | {"sees_folder": False}, "paths.checkpoints", "does not see"),
    "token": (
        lambda own: own | {"secrets": {"RETRIEVAL_TOKEN": "another hash"}},
        "RETRIEVAL_TOKEN",
        "has another RETRIEVAL_TOKEN",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_node_that_differs_is_named_with_what_differs(difference):
    change, key, says = DIFFERENCES[difference]
    (found,) = findings(change(own_facts()))
    assert (found.key, says in found.why, "10.0.0.2 (gpu-2, id2)" in found.why) == (key, True, True), found


def test_a_node_that_runs_no_task_is_named_with_the_reason():
    there = cluster(node(1, answer=own_facts()), node(2, fault="ModuleNotFoundError: No module named 'ops'"))
    (found,) = judge_nodes(there, own_facts(), HEAD)
    assert "10.0.0.2 (gpu-2, id2) did not answer a task: ModuleNotFoundError" in found.why


def test_a_head_that_other_machines_cannot_know_by_its_name_is_refused():
    found = findings(own_facts(), "127.0.0.1:6379")
    assert [one.why for one in found if "does not know the head as 127.0.0.1:6379" in one.why] != []


def test_equal_tokens_are_compared_without_leaving_their_node(monkeypatch):
    monkeypatch.setenv("RETRIEVAL_TOKEN", "a-secret-token")
    one, same, another = (facts("", salt, ["RETRIEVAL_TOKEN"])["secrets"] for salt in ("a", "a", "b"))
    assert one == same != another
    assert "a-secret-token" not in str(one)


def test_a_cluster_that_does_not_answer_is_a_fault_and_no_empty_cluster():
    assert ask_cluster("127.0.0.1:1").fault is not None
    assert (
        read_cluster(Ended("RuntimeError: Version mismatch", "Traceback\n")).fault
        == "RuntimeError: Version mismatch"
    )


def test_the_actor_is_sharded_over_all_nodes_and_the_engines_are_those_of_one():
    shape = KNOWN["qwen2.5-7b-instruct"]
    one, two = composed("hardware=8xh100"), two_nodes()
    ledgers = [
        training_ledger(config, declared_machine(config, starting=False), shape, shape)
        for config in (one, two)
    ]
    states = [ledger.phases["update"]["actor: Adam"] for ledger in ledgers]
    weights = [ledger.phases["weight sync"]["rollout engine: weights"] for ledger in ledgers]
    assert (states[0], weights[0]) == (pytest.approx(2 * states[1]), pytest.approx(weights[1]))


def test_a_rank_of_a_cpu_cluster_holds_its_share_of_the_actor():
    shape = KNOWN["demo-policy"]
    one = composed("hardware=cpu")
    two = composed("hardware=cpu", "machine.nodes=2", "machine.ray_address=127.0.0.1:6379")
    adam = [
        host_ledger(config, declared_machine(config, starting=True), shape, shape).phases["training"][
            "actor: Adam"
        ]
        for config in (one, two)
    ]
    assert adam[0] == pytest.approx(2 * adam[1])


def test_hired_nodes_are_priced_one_by_one_and_summed():
    config = two_nodes()
    compute = config.compute
    each = usd_per_hour(GPUS["H100"], 8, compute.cpu, compute.memory / 1024, None)
    assert declared_machine(config, starting=False).usd_per_hour == pytest.approx(2 * each)


def test_a_ray_that_is_joined_takes_no_sizes_and_listens_where_the_others_reach_it():
    ray = two_nodes().ray_kwargs.ray_init
    assert (ray.address, ray.num_cpus, ray.object_store_memory) == (HEAD, None, None)
    assert two_nodes().process_env.RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER == 1


def test_a_ray_of_the_runs_own_is_started_whatever_the_environment_names(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    config = resolve(compose_stage("solver", ["hardware=8xh100"]))
    assert config.ray_kwargs.ray_init.address == "local"
    assert config.process_env.RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER == 0
