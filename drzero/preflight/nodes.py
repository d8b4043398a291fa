"""Checks of a training on several nodes: its Ray cluster, and services and files that nodes share."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from omegaconf import DictConfig

from drzero.ops.bearer import MODEL_KEY, bearer_of
from drzero.ops.cluster.cluster import Cluster, Node, ask_cluster
from drzero.ops.cluster.on_node import facts
from drzero.ops.text import counted, is_loopback
from drzero.preflight.context import CheckContext
from drzero.preflight.environment import writable_place
from drzero.preflight.finding import Finding, error, note, warning
from drzero.recipe.compose import CPUS_A_GPU, cpus_reserved, process_env
from search.wire import TOKEN_VARIABLE

ADDRESS = "machine.ray_address"
_TOKENS = {"retrieval": TOKEN_VARIABLE, "solver": MODEL_KEY}
_START = (
    "`ray start --head --port=6379` there and `ray start --address=HOST:6379` on the others (docs/scale.md)"
)
_EVERY = ("0.0.0.0", "::")


def check_services_reachable(ctx: CheckContext) -> Iterator[Finding]:
    """Several nodes need a Ray cluster, and must reach the head's services."""
    config = ctx.config
    address = config.machine.ray_address
    if config.machine.nodes > 1 and address is None:
        why = f"{config.machine.nodes} machines need a Ray cluster, and none is named"
        yield error(ADDRESS, why, f"start it by {_START}, and set {ADDRESS}=HOST:6379")
    if config.machine.nodes == 1 or address is None or is_loopback(address):
        return  # only this machine
    used = {"retrieval": ctx.searches, "solver": ctx.serves_model}
    for name in (name for name, is_used in used.items() if is_used):
        host = config[name].host
        if is_loopback(host) or host in _EVERY:
            why = f"the other nodes' workers cannot reach the {name} service at {host}"
            yield error(f"{name}.host", why, f"set it to the head's address, as in {ADDRESS}={address}")
        if bearer_of(_TOKENS[name]) is None:
            why = f"the {name} service would answer anyone, because {_TOKENS[name]} is not set"
            fix = "put it into the environment of this command and of each node's `ray start`"
            yield error(f"{name}.host", why, fix)


def check_cluster(ctx: CheckContext) -> Iterator[Finding]:
    """The cluster must have enough free GPUs and CPUs, and its nodes must match this one."""
    address = ctx.config.machine.ray_address
    if address is None or not ctx.machine.is_local:
        return
    cluster, here = _ask(ctx.config, address, ctx.starting)
    if cluster.fault is not None:
        severity = error if ctx.starting else warning
        yield severity(ADDRESS, f"the Ray cluster cannot be asked: {cluster.fault}", f"start it: {_START}")
        return
    found = [*judge_size(ctx.config, cluster), *judge_nodes(cluster, here, address)]
    yield from found
    if not found:
        yield note(ADDRESS, f"{len(cluster.alive)} nodes: {', '.join(map(str, cluster.alive))}")


def _ask(config: DictConfig, address: str, starting: bool) -> tuple[Cluster, dict[str, Any]]:
    arguments: dict[str, Any] = {"salt": secrets.token_hex(16), "variables": list(_TOKENS.values())}
    with ExitStack() as stack:
        marker = ""
        if starting:  # a file that every node must see
            place = writable_place(Path(config.paths.checkpoints))
            marker = stack.enter_context(NamedTemporaryFile(dir=place, prefix=".nodes-")).name
        arguments["marker"] = marker
        cluster = ask_cluster(address, "facts", arguments, env=process_env(config))
        return cluster, facts(**arguments)


def judge_size(config: DictConfig, cluster: Cluster) -> Iterator[Finding]:
    """The cluster must have the declared nodes and GPUs (as `ray start --num-gpus` counts), and free CPUs."""
    nodes, gpus = config.machine.nodes, config.machine.gpus
    cpus = CPUS_A_GPU * gpus
    fit = [node for node in cluster.alive if node.gpu >= gpus and node.cpu >= cpus]
    listed = ", ".join(
        f"{node} {counted(node.gpu, 'GPU')} and {counted(node.cpu, 'CPU')}" for node in cluster.alive
    )
    if len(fit) < nodes:
        why = (
            f"{counted(nodes, 'node')} of {counted(gpus, 'GPU')} and {counted(cpus, 'CPU')} are declared, "
            f"and the Ray cluster has {len(fit)} ({listed or 'no node'})"
        )
        fix = "start the others by `ray start --address=…`. Ray counts what --num-gpus and --num-cpus say."
        yield error("machine.nodes", why, fix)
        return
    if cluster.free["gpu"] < nodes * gpus:
        why = f"{cluster.free['gpu']:g} of the cluster's GPUs are free, and {nodes * gpus} are needed"
        fix = "another run holds them: wait for its end (veRL's transfer queue serves one run per cluster)"
        yield error(ADDRESS, why, fix)
    elif cluster.free["cpu"] < (needed := cpus_reserved(config)):
        why = (
            f"{cluster.free['cpu']:g} of the cluster's CPUs are free, and veRL would wait for ever for the "
            f"{needed} that it reserves"
        )
        yield error(ADDRESS, why, "start its nodes with more (`ray start --num-cpus=…`): they are logical")


def judge_nodes(cluster: Cluster, here: dict[str, Any], address: str) -> Iterator[Finding]:
    """Each node must answer, with the same versions, code, files and tokens as this one."""
    for node in cluster.alive:
        if node.fault is not None:
            why = f"node {node} did not answer a task: {node.fault}"
            yield error(ADDRESS, why, "install this project there, at the same path, and start its Ray again")
        else:
            yield from _differences(node, here)
        if is_loopback(address) and not is_loopback(node.address):
            why = f"node {node} is another machine, which does not know the head as {address}"
            yield error(ADDRESS, why, "name the head by the address that other nodes use")


def _differences(node: Node, here: dict[str, Any]) -> Iterator[Finding]:
    answer = node.answer
    for package, version in dict(here["versions"], python=here["python"]).items():
        there = dict(answer["versions"], python=answer["python"]).get(package)
        if there != version:
            why = f"node {node} has {package} {there or 'not installed'}, and this one {version}"
            yield error(ADDRESS, why, "use the same environment, at the same path, on every node")
    if answer["code"] != here["code"]:
        why = f"node {node} has another state of this project's code"
        yield error(ADDRESS, why, "check the same revision out on every node, and start its Ray again")
    if not answer["sees_folder"]:
        why = f"node {node} does not see the checkpoints' folder"
        yield error("paths.checkpoints", why, "put it on a file system that all nodes mount at the same path")
    for variable, hidden in here["secrets"].items():
        if answer["secrets"][variable] != hidden:
            why = f"node {node} has another {variable} than this command"
            yield error(variable, why, "set the same one where `ray start` runs there", value="differs")
