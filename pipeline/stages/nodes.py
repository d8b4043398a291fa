"""A training on a Ray cluster that it joins: its environment for the workers, and lost nodes by name.

Workers of a Ray of the run's own inherit the trainer's environment. Those of a cluster have that of `ray
start` on their node, so Ray is asked to add the trainer's.
"""

import os
import time
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, open_dict

from ops.cluster.cluster import Node, ask_cluster, stacks_of
from ops.errors import RunFailed
from ops.process.logs import EventLog
from ops.supervisor import ChildFailed
from ops.watchdog.watchdog import Elsewhere
from pipeline.compose import joins_cluster, process_env

_OURS = "DRZERO_"
"""Variables by which a stage is told its stop time, or where to announce what is complete."""
_LOST_AFTER = (0.0, 10.0, 20.0)
"""Seconds before each question for lost nodes: Ray itself notices one that is gone by its silence."""


class NodeLost(RunFailed):
    """A node has left the cluster while the trainer ran on it."""


def share_environment(config: DictConfig, environment: Mapping[str, str]) -> None:
    """Write the environment of the cluster's workers into the config, through which veRL gives it to Ray.

    Secrets are not among it, since the config is a file of the run: each node's Ray is started with them.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = {**ours, **environment}


def nodes_of(config: DictConfig) -> list[Node]:
    """The nodes of the cluster that the run joins; none for a Ray of its own."""
    if not joins_cluster(config):
        return []
    return ask_cluster(config.machine.ray_address, env=process_env(config)).alive


def raise_if_lost(config: DictConfig, before: Sequence[Node], failed: ChildFailed, events: EventLog) -> None:
    """Raise NodeLost if one of the nodes `before` is why the trainer has failed; else return."""
    if not before:
        return
    address = config.machine.ray_address
    for pause_s in _LOST_AFTER:
        time.sleep(pause_s)
        cluster = ask_cluster(address, env=process_env(config))
        if cluster.fault is not None:
            text, node = f"the head of the Ray cluster ({address}) is gone: {cluster.fault}", address
        elif lost := [node for node in before if node.id not in {one.id for one in cluster.alive}]:
            node = ", ".join(map(str, lost))
            text = f"node {node} has left the Ray cluster"
        else:
            continue
        advice = f"start its Ray again (`ray start --address={address}`), then rerun to resume"
        events.add("end", "trainer", text, pattern="lost node", culprit=node, advice=advice)
        raise NodeLost(f"{text}; {advice}. {failed}") from failed


def read_elsewhere(
    address: str | None, nodes: int, env: Mapping[str, str], deadline_s: float, native: bool
) -> Elsewhere:
    """Where a run's processes stand on the `nodes` of the cluster that it has joined; nothing without one."""
    if address is None:
        return Elsewhere()
    cluster = ask_cluster(address, "stacks", {"deadline_s": deadline_s, "native": native}, env=env)
    if cluster.fault is not None:
        return Elsewhere(unseen=(f"the Ray cluster did not answer: {cluster.fault}",))
    # Ray remembers nodes that have gone and come back.
    gone = [node for node in cluster.nodes if not node.alive] if len(cluster.alive) < nodes else []
    return Elsewhere(
        stacks=tuple(stack for node in cluster.alive for stack in stacks_of(node)),
        unseen=tuple(f"node {node}: {node.fault}" for node in cluster.alive if node.fault),
        lost=tuple(dict.fromkeys(map(str, gone))),
    )
