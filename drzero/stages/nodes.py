"""A training on a Ray cluster that it joins: its environment for the workers, and a watch on its nodes.

Workers of a Ray of the run's own inherit the trainer's environment. Those of a cluster have that of `ray
start` on their node, so Ray is asked to add the trainer's.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, open_dict

from drzero.ops.cluster.cluster import ask_cluster, stacks_of
from drzero.ops.cluster.watch import NodeWatch, follower
from drzero.ops.watchdog.watchdog import Elsewhere
from drzero.recipe.compose import joins_cluster, process_env

_OURS = "DRZERO_"
"""Variables by which a stage is told its stop time, or where to announce what is complete."""


def share_environment(config: DictConfig, environment: Mapping[str, str]) -> None:
    """Write the environment of the cluster's workers into the config, through which veRL gives it to Ray.

    Secrets are not among it, since the config is a file of the run: each node's Ray is started with them.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = {**ours, **environment}


@contextmanager
def node_watch(config: DictConfig) -> Iterator[NodeWatch | None]:
    """A watch on the nodes of the cluster that the run joins; None for a Ray of its own."""
    if not joins_cluster(config):
        yield None
        return
    address, log = config.machine.ray_address, Path(config.run.dir) / "logs" / "nodes.log"
    # On this machine's disk: the supervisor must not wait for a file system that nodes share.
    with tempfile.TemporaryDirectory(prefix="drzero-nodes-") as folder:
        seen = Path(folder) / "seen.json"
        command = follower(address, seen, log, process_env(config))
        with NodeWatch(address, config.machine.nodes, command, seen) as nodes:
            yield nodes


def read_elsewhere(address: str | None, env: Mapping[str, str], deadline_s: float, native: bool) -> Elsewhere:
    """Where a run's processes stand on the nodes of the cluster that it has joined; nothing without one."""
    if address is None:
        return Elsewhere()
    cluster = ask_cluster(address, "stacks", {"deadline_s": deadline_s, "native": native}, env=env)
    if cluster.fault is not None:
        return Elsewhere(unseen=(f"the Ray cluster did not answer: {cluster.fault}",))
    return Elsewhere(
        stacks=tuple(stack for node in cluster.alive for stack in stacks_of(node)),
        unseen=tuple(f"node {node}: {node.fault}" for node in cluster.alive if node.fault),
    )
