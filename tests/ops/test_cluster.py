"""Two raylets on loopback, asked as a run asks the cluster that it joins."""

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest
from search_parts import wait_for
from two_nodes import TwoNodes, two_nodes

from drzero.ops.cluster.cluster import ask_cluster
from drzero.ops.cluster.on_node import code_digest
from drzero.ops.cluster.watch import NodeLost, NodeWatch, follower
from drzero.ops.process.child import Child, Command
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import run_supervised
from drzero.ops.versions import installed_versions
from drzero.preflight.nodes import judge_size
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.nodes import read_elsewhere

pytestmark = [
    pytest.mark.slow("starts two raylets"),
    pytest.mark.timeout(900),
    # Ray gives a raylet 30 s to start: too little next to other work.
    pytest.mark.matrix,
]

JOB = """
import os, pathlib, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
# As veRL does: the environment of the workers comes with the job.
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"DRZERO_STOP_AT": "12345"}})

@ray.remote(num_gpus=1)
class WorkerDict:
    def variable(self):
        return os.environ.get("DRZERO_STOP_AT")

    def wait_for_peers(self, waiting):
        pathlib.Path(waiting, str(os.getpid())).touch()
        time.sleep(600)

there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]
ranks = [WorkerDict.options(scheduling_strategy=one).remote() for one in there]
assert ray.get([rank.variable.remote() for rank in ranks]) == ["12345"] * 2
# As veRL does with a rollout's agents: nobody waits for what they return.
waiting = [rank.wait_for_peers.remote(sys.argv[2]) for rank in ranks]
time.sleep(600)
"""
"""A rank on each node's GPU; once it waits, a file of its pid is in a folder."""


def job(cluster: TwoNodes, folder: Path) -> Command:
    (folder / "waiting").mkdir()
    command = (sys.executable, "-c", JOB, cluster.address, str(folder / "waiting"))
    return Command(name="trainer", command=command, log_path=folder / "logs" / "trainer.log")


def ranks_of(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "waiting").iterdir()]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as started:
        yield started


@pytest.fixture(scope="class")
def held(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    running = Child(job(cluster, folder))
    try:
        wait_for(lambda: len(ranks_of(folder)) == 2, 240, or_else=lambda: running.poll() is not None)
        yield
    finally:
        running.stop()


def test_both_nodes_answer_with_what_is_the_same_on_them(cluster, tmp_path):
    marker = tmp_path / "marker"
    marker.touch()
    asked = {"marker": str(marker), "salt": "a", "variables": []}
    found = ask_cluster(cluster.address, "facts", asked)
    assert found.fault is None
    assert len(found.alive) == 2 and cluster.second_id in {node.id for node in found.alive}
    for node in found.alive:
        assert node.fault is None
        assert node.answer["versions"] == installed_versions()
        assert (node.answer["code"], node.answer["sees_folder"]) == (code_digest(), True)


def test_a_cluster_of_two_is_refused_for_three_in_one_line(cluster):
    asked = ask_cluster(cluster.address)
    overrides = ["hardware=cpu", f"machine.ray_address={cluster.address}"]
    two, three = (
        list(judge_size(resolve(compose_stage("solver", [*overrides, f"machine.nodes={nodes}"])), asked))
        for nodes in (2, 3)
    )
    assert two == []
    assert [finding.key for finding in three] == ["machine.nodes"] and "the Ray cluster has 2" in three[0].why


@pytest.mark.usefixtures("held")
class TestHeldByAJob:
    def test_its_gpus_are_not_free(self, cluster):
        wait_for(lambda: ask_cluster(cluster.address).free["gpu"] == 0, 60)

    def test_the_processes_of_both_nodes_are_read_and_told_apart(self, cluster):
        there = read_elsewhere(cluster.address, dict(os.environ), 30.0, native=False)
        ranks = [stack for stack in there.stacks if "WorkerDict" in stack.title]
        assert len({stack.node for stack in ranks}) == len(ranks) == 2
        for stack in ranks:
            assert "WorkerDict.wait_for_peers" in {frame.name for frame in stack.main}, stack
        assert there.unseen == ()


def test_a_killed_node_ends_the_run_by_name_and_leaves_none_of_its_processes(cluster, tmp_path):
    # The last test: it takes the node of the others.
    killed, seen = cluster.second_id[:8], tmp_path / "seen.json"
    trainer = job(cluster, tmp_path)
    following = follower(cluster.address, seen, tmp_path / "logs" / "nodes.log", {})

    def kill() -> None:
        wait_for(lambda: seen.exists() and len(ranks_of(tmp_path)) == 2, 240)
        cluster.kill_second()

    killer = threading.Thread(target=kill)
    with NodeWatch(cluster.address, 2, following, seen) as nodes, ServiceGroup([]) as services:
        killer.start()
        with pytest.raises(NodeLost, match=rf"node 127\.0\.0\.1 \(.*, {killed}\) is lost"):
            run_supervised(trainer, services, nodes=nodes)
    killer.join()
    wait_for(lambda: not any(map(psutil.pid_exists, ranks_of(tmp_path))), 60)
    cluster.start_second()
    found = ask_cluster(cluster.address, "facts", {"marker": "", "salt": "a", "variables": []})
    assert (len(found.alive), found.free["gpu"]) == (2, 2.0)
