"""Two raylets on loopback, asked as a run asks the cluster that it joins."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from search_parts import wait_for
from two_nodes import TwoNodes, two_nodes

from ops.cluster.cluster import ask_cluster
from ops.cluster.on_node import code_digest
from ops.versions import installed_versions
from pipeline.compose import compose_stage, resolve
from pipeline.preflight.nodes import judge_size
from pipeline.stages.nodes import read_elsewhere

pytestmark = [pytest.mark.slow("starts two raylets"), pytest.mark.timeout(900)]

HELD = """
import os, sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
# As veRL does: the environment of the workers comes with the job.
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"env_vars": {"DRZERO_STOP_AT": "12345"}})

@ray.remote(num_gpus=1)
class WorkerDict:
    def variable(self):
        return os.environ.get("DRZERO_STOP_AT")

    def wait_for_peers(self):
        time.sleep(600)

there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in ray.nodes()]
ranks = [WorkerDict.options(scheduling_strategy=one).remote() for one in there]
assert ray.get([rank.variable.remote() for rank in ranks]) == ["12345"] * 2
waiting = [rank.wait_for_peers.remote() for rank in ranks]
print("held", flush=True)
ray.get(waiting)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with two_nodes() as started:
        yield started


@pytest.fixture(scope="module")
def held(cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A job with a waiting rank on each node's GPU."""
    out = tmp_path_factory.mktemp("job") / "out"
    with out.open("w") as log:
        job = subprocess.Popen([sys.executable, "-c", HELD, cluster.address], stdout=log, stderr=log)
        try:
            wait_for(lambda: "held" in out.read_text() or job.poll() is not None, 240)
            assert job.poll() is None, out.read_text()[-3000:]
            yield
        finally:
            job.kill()
            job.wait()


def test_both_nodes_answer_with_what_is_the_same_on_them(cluster: TwoNodes, tmp_path: Path) -> None:
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


def test_a_cluster_of_two_is_refused_for_three_in_one_line(cluster: TwoNodes) -> None:
    asked = ask_cluster(cluster.address)
    overrides = ["hardware=cpu", f"machine.ray_address={cluster.address}"]
    two, three = (
        list(judge_size(resolve(compose_stage("solver", [*overrides, f"machine.nodes={nodes}"])), asked))
        for nodes in (2, 3)
    )
    assert two == []
    assert [finding.key for finding in three] == ["machine.nodes"] and "the Ray cluster has 2" in three[0].why


def test_gpus_that_a_job_holds_are_not_free(cluster: TwoNodes, held: None) -> None:
    wait_for(lambda: ask_cluster(cluster.address).free["gpu"] == 0, 60)


def test_the_processes_of_both_nodes_are_read_and_told_apart(cluster: TwoNodes, held: None) -> None:
    there = read_elsewhere(cluster.address, 2, dict(os.environ), 30.0, native=False)
    ranks = [stack for stack in there.stacks if "WorkerDict" in stack.title]
    assert len({stack.node for stack in ranks}) == len(ranks) == 2
    assert all(
        any(frame.name == "wait_for_peers" for t in stack.threads for frame in t.frames) for stack in ranks
    )
    assert (there.unseen, there.lost) == ((), ())


def test_a_killed_node_is_named_and_counts_again_once_it_is_back(cluster: TwoNodes) -> None:
    """The last test: it takes the node of the others. Ray notices one that is gone by its silence."""
    killed = cluster.second_id[:8]
    cluster.kill_second()
    wait_for(lambda: len(ask_cluster(cluster.address).alive) == 1, 120)
    (lost,) = read_elsewhere(cluster.address, 2, dict(os.environ), 5.0, False).lost
    assert killed in lost
    cluster.start_second()
    assert read_elsewhere(cluster.address, 2, dict(os.environ), 5.0, False).lost == ()
