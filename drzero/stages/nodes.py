"""Train on a Ray cluster: the workers' environment, and a watch on the nodes."""

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

_OURS = "DRZERO_"  # these variables hold a stage's stop time, and where it announces complete files


def share_environment(config: DictConfig, environment: Mapping[str, str]) -> None:
    """Have Ray give workers this environment, without secrets: the config is a file of the run."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    with open_dict(config):
        config.ray_kwargs.ray_init.runtime_env.env_vars = {**ours, **environment}


@contextmanager
def node_watch(config: DictConfig) -> Iterator[NodeWatch | None]:
    """A watch on the cluster's nodes. None if the run starts its own Ray."""
    if not joins_cluster(config):
        yield None
        return
    address, log = config.machine.ray_address, Path(config.run.dir) / "logs" / "nodes.log"
    # On the local disk: the supervisor must not wait for a shared file system.
    with tempfile.TemporaryDirectory(prefix="drzero-nodes-") as folder:
        seen = Path(folder) / "seen.json"
        command = follower(address, seen, log, process_env(config))
        with NodeWatch(address, config.machine.nodes, command, seen) as nodes:
            yield nodes


def read_elsewhere(address: str | None, env: Mapping[str, str], deadline_s: float, native: bool) -> Elsewhere:
    """The stacks of a run's processes on the cluster's nodes. Empty without a cluster."""
    if address is None:
        return Elsewhere()
    cluster = ask_cluster(address, "stacks", {"deadline_s": deadline_s, "native": native}, env=env)
    if cluster.fault is not None:
        return Elsewhere(unseen=(f"the Ray cluster did not answer: {cluster.fault}",))
    return Elsewhere(
        stacks=tuple(stack for node in cluster.alive for stack in stacks_of(node)),
        unseen=tuple(f"node {node}: {node.fault}" for node in cluster.alive if node.fault),
    )
