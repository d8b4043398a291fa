"""A Ray cluster as it answers a process of its own, within a time limit.

cluster = ask_cluster("10.0.0.1:6379", "facts", {"marker": "", "salt": "…", "variables": []})
cluster.fault               # None, or why there is no answer
cluster.alive               # its nodes, each with its `answer`, or the `fault` in its place
"""

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drzero.ops.process.isolated import run_apart
from drzero.ops.watchdog.stacks import Frame, Stack, Thread

LIMIT_S = 90.0
"""Seconds for an answer: Ray's import and its connection, and a worker's start on each node."""
_REACHED_S = 5.0


@dataclass(frozen=True)
class Node:
    """A node that the cluster has, or has lost."""

    id: str
    address: str
    host: str
    alive: bool
    cpu: float
    gpu: float
    answer: Any = None
    fault: str | None = None
    """Why it has not answered."""

    def __str__(self) -> str:
        # Ray names it by its id in its own logs.
        return f"{self.address} ({self.host}, {self.id[:8]})"


@dataclass(frozen=True)
class Cluster:
    """What a cluster has; without an answer only the `fault`."""

    nodes: tuple[Node, ...] = ()
    free: Mapping[str, float] = field(default_factory=dict)
    """`cpu` and `gpu` that no program holds, on all nodes together."""
    fault: str | None = None

    @property
    def alive(self) -> list[Node]:
        """The nodes that are there, by address."""
        return sorted((node for node in self.nodes if node.alive), key=lambda node: (node.address, node.id))


def ask_cluster(
    address: str,
    question: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Cluster:
    """Ask for the nodes and, with a function of `drzero.ops.cluster.on_node`, each of them.

    `env` is added to the environment of the process that asks.
    """
    if fault := unreachable(address):
        return Cluster(fault=fault)
    asked = [question, json.dumps(arguments or {})] if question else []
    ended = run_apart((sys.executable, "-m", "drzero.ops.cluster.ask", address, *asked), limit_s, env)
    return read_cluster(ended.out, ended.fault)


def unreachable(address: str) -> str | None:
    """Why nothing can be asked there; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except OSError as error:
        return f"nothing answers there ({error.strerror or error})"
    return None


def read_cluster(printed: str, fault: str | None) -> Cluster:
    """What the process had printed by its end, which a `fault` explains."""
    lines = [line for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    if not lines:
        return Cluster(fault=fault or "it printed nothing")
    whole, *nodes = map(json.loads, lines)
    free = {name: whole[f"free_{name}"] for name in ("cpu", "gpu")}
    return Cluster(tuple(Node(**node) for node in nodes), free, fault)


def stacks_of(node: Node) -> list[Stack]:
    """The stacks that a node has answered with, each named by its node; empty where it has not answered."""
    return [
        Stack(
            pid=record["pid"],
            component=record["component"],
            title=record["title"],
            state=record["state"],
            threads=tuple(map(_thread, record["threads"])),
            failure=record["failure"],
            node=str(node),
        )
        for record in node.answer or ()
    ]


def _thread(record: Mapping[str, Any]) -> Thread:
    frames: Sequence[Mapping[str, Any]] = record["frames"]
    return Thread(record["name"], tuple(Frame(**frame) for frame in frames), record["active"])
