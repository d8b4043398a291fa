"""A Ray cluster of two real nodes on loopback: two raylets, each with one logical GPU.

    with two_nodes() as cluster:
        …                       # cluster.address is for machine.ray_address
        cluster.kill_second()   # as if the machine were gone

It uses Ray's own test class, because `ray start --address` refuses a Ray that listens only on loopback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.cluster_utils import Cluster

_EACH = {"num_cpus": 12, "num_gpus": 1, "object_store_memory": 200_000_000, "include_dashboard": False}


class TwoNodes:
    """The cluster while it is up."""

    def __init__(self) -> None:
        self.ray = Cluster(initialize_head=True, head_node_args=_EACH)
        self.address: str = self.ray.address
        self.start_second()

    def start_second(self) -> None:
        self._second: Any = self.ray.add_node(**_EACH)
        self.second_id: str = self._second.node_id

    def kill_second(self) -> None:
        self.ray.remove_node(self._second, allow_graceful=False)


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    try:
        yield cluster
    finally:
        cluster.ray.shutdown()
