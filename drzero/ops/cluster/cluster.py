"""Asks a Ray cluster in a separate process, within a time limit."""

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drzero.ops.process.isolated import Ended, run_isolated
from drzero.ops.watchdog.stacks import Frame, Stack, Thread

_ANSWER_S = 90.0  # for an answer: import Ray, connect, and start a worker on each node
_REACHED_S = 5.0


@dataclass(frozen=True)
class Node:
    """A node that the cluster has or has lost."""

    id: str
    address: str
    host: str
    alive: bool
    cpu: float
    gpu: float
    answer: Any = None
    fault: str | None = None  # why it did not answer

    def __str__(self) -> str:
        # Ray names it by its id in its own logs.
        return f"{self.address} ({self.host}, {self.id[:8]})"


@dataclass(frozen=True)
class Cluster:
    """The resources of a cluster, or only a `fault` without an answer."""

    nodes: tuple[Node, ...] = ()
    free: Mapping[str, float] = field(default_factory=dict)  # free `cpu` and `gpu` on all nodes together
    fault: str | None = None

    @property
    def alive(self) -> list[Node]:
        """The nodes that are up, by address."""
        return sorted((node for node in self.nodes if node.alive), key=lambda node: (node.address, node.id))


def ask_cluster(
    address: str,
    question: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> Cluster:
    """Ask for the nodes and put `question`, a function of `drzero.ops.cluster.on_node`, to each."""
    if fault := unreachable(address):
        return Cluster(fault=fault)
    asked = [question, json.dumps(arguments or {})] if question else []
    command = (sys.executable, "-m", "drzero.ops.cluster.ask", address, *asked)
    return read_cluster(run_isolated(command, _ANSWER_S, env))


def unreachable(address: str) -> str | None:
    """Return why nothing answers there, or None. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except OSError as error:
        return f"nothing answers there ({error.strerror or error})"
    return None


def read_cluster(ended: Ended) -> Cluster:
    """Parse the output of the process."""
    if not (records := ended.records()):
        return Cluster(fault=ended.fault or "it printed nothing")
    whole, *nodes = records
    free = {name: whole[f"free_{name}"] for name in ("cpu", "gpu")}
    return Cluster(tuple(Node(**node) for node in nodes), free, ended.fault)


def stacks_of(node: Node) -> list[Stack]:
    """Return the stacks in a node's answer, each named by its node."""
    return [
        Stack(**record | {"threads": tuple(map(_thread, record["threads"])), "node": str(node)})
        for record in node.answer or ()
    ]


def _thread(record: Mapping[str, Any]) -> Thread:
    return Thread(record["name"], tuple(Frame(**frame) for frame in record["frames"]), record["active"])
