"""Notices that a node of the cluster is lost. veRL needs all nodes and would wait for samples for ever."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from drzero.ops.cluster.cluster import Node
from drzero.ops.errors import RunFailed
from drzero.ops.process.child import Child, Command

NOTICED_S = 30.0  # Ray notices a killed raylet within this time (16 s measured)

_ADVICE = "start Ray {} (docs/scale.md), then rerun to resume"


class NodeLost(RunFailed):
    """A node that the run needs is gone."""

    def __init__(self, text: str, culprit: str, advice: str) -> None:
        super().__init__(f"{text}; {advice}")
        self.text, self.culprit, self.advice = text, culprit, advice


def follower(address: str, seen: Path, log: Path, env: Mapping[str, str]) -> Command:
    """Return the command that writes the cluster's nodes to `seen` and its output to `log`."""
    command = (sys.executable, "-m", "drzero.ops.cluster.ask", address, "follow", str(seen))
    return Command(name="nodes", command=command, log_path=log, env=env)


class NodeWatch:
    """Watches the nodes that the cluster at `address` has when it first answers."""

    def __init__(self, address: str, nodes: int, command: Command, seen: Path) -> None:
        """Start `command`, a `follower` that writes to `seen`. Fewer than `nodes` nodes are too few."""
        self._address, self._at_least, self._command, self._seen = address, nodes, command, seen
        self._needed: list[Node] = []
        self._child = Child(command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def check(self, patience_s: float = 0.0) -> None:
        """Raise NodeLost if a node is lost, or becomes so within `patience_s` seconds."""
        end = time.monotonic() + patience_s
        while True:
            if self._seen.exists():
                self._judge([Node(**node) for node in json.loads(self._seen.read_bytes())])
            if self._child.poll() is not None:
                self._follow_again()
            if time.monotonic() >= end:
                return
            time.sleep(0.25)

    def _judge(self, nodes: list[Node]) -> None:
        alive = [node for node in nodes if node.alive]
        if not self._needed and len(alive) < self._at_least:
            there = ", ".join(map(str, alive)) or "none"
            text = f"the Ray cluster has {len(alive)} of {self._at_least} nodes: {there}"
            raise NodeLost(text, self._address, _ADVICE.format("on the others"))
        self._needed = self._needed or alive
        if gone := [node for node in self._needed if node.id not in {one.id for one in alive}]:
            names = ", ".join(map(str, gone))
            text = f"node {names} is lost: it gives Ray no sign of life"
            raise NodeLost(text, f"node {names}", _ADVICE.format("there again"))

    def _follow_again(self) -> None:
        """Replace a follower that ended. A second one without an answer is the head's fault."""
        if not self._seen.exists():
            why = self._child.tail[-1] if self._child.tail else "it ended without a message"
            text = f"the head of the Ray cluster ({self._address}) does not answer: {why}"
            raise NodeLost(text, self._address, _ADVICE.format("there again"))
        self._seen.unlink()
        self._child = Child(self._command)
