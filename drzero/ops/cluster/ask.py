"""Prints a Ray cluster as JSON: a line for the whole, then each node, with its answer to a question.

python -m drzero.ops.cluster.ask 10.0.0.1:6379 stacks '{"deadline_s": 8, "native": false}'
python -m drzero.ops.cluster.ask 10.0.0.1:6379 follow /tmp/nodes.json     # rewritten at each change
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drzero.ops.cluster import on_node
from drzero.ops.cluster.cluster import unreachable
from drzero.ops.files import atomic_write

_ROOT = Path(__file__).resolve().parents[3]
_FOLLOW_S = 2.0
_ANSWER_S = 40.0  # for all nodes together: a worker must start there and import this project
_RELEASED_S = 15.0  # a run that just ended has released its GPUs within this time


def main(arguments: Sequence[str]) -> None:
    """Print the cluster's answers."""
    address, question = arguments[0], arguments[1] if len(arguments) > 1 else None
    if question == "follow":
        follow(address, Path(arguments[2]))
    connect(address)
    if question == "facts":  # Ray still counts the GPUs of a run that ended a moment ago
        end, gpus = time.monotonic() + _RELEASED_S, ray.cluster_resources().get("GPU", 0)
        while time.monotonic() < end and ray.available_resources().get("GPU", 0) < gpus:
            time.sleep(0.5)
    total, free = ray.cluster_resources(), ray.available_resources()
    whole = {name.lower(): total.get(name, 0.0) for name in ("CPU", "GPU")}
    print(json.dumps(whole | {f"free_{name.lower()}": free.get(name, 0.0) for name in ("CPU", "GPU")}))
    nodes = about_nodes()
    answers = _answers(nodes, question, json.loads(arguments[2])) if question else {}
    for node in nodes:
        print(json.dumps(node | answers.get(node["id"], {})))


def follow(address: str, path: Path) -> NoReturn:
    """Write the nodes to a file at each change, over one connection: Ray remembers each as a job."""
    if fault := unreachable(address):
        sys.exit(fault)
    connect(address)
    written: list[dict[str, Any]] = []
    while True:
        if (nodes := about_nodes()) != written:
            written = nodes
            atomic_write(path, json.dumps(nodes))
        time.sleep(_FOLLOW_S)


def connect(address: str) -> None:
    """Connect this process and let its tasks on the nodes import this project."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # Ray would prefer the environment's address.
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )


def about_nodes() -> list[dict[str, Any]]:
    """Return the fields of `drzero.ops.cluster.cluster.Node` for each node, including lost ones."""
    return [
        {
            "id": node["NodeID"],
            "address": node["NodeManagerAddress"],
            "host": node["NodeManagerHostname"],
            "alive": node["Alive"],
            "cpu": node["Resources"].get("CPU", 0.0),
            "gpu": node["Resources"].get("GPU", 0.0),
        }
        for node in sorted(ray.nodes(), key=lambda node: node["NodeID"])
    ]


def _answers(
    nodes: list[dict[str, Any]], question: str, arguments: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    asked = {}
    for node in nodes:
        if node["alive"]:
            there = NodeAffinitySchedulingStrategy(node_id=node["id"], soft=False)
            task = ray.remote(num_cpus=0, max_retries=0)(getattr(on_node, question))
            asked[node["id"]] = task.options(scheduling_strategy=there).remote(**arguments)
    end, answers = time.monotonic() + _ANSWER_S, {}
    for node, reference in asked.items():
        try:
            answers[node] = {"answer": ray.get(reference, timeout=max(end - time.monotonic(), 0.1))}
        except GetTimeoutError:
            answers[node] = {"fault": f"no answer within {_ANSWER_S:.0f} s"}
        except RayError as error:
            lines = [line.strip() for line in str(error).split("\n") if line.strip()]
            answers[node] = {"fault": lines[-1][:300] if lines else type(error).__name__}
    return answers


if __name__ == "__main__":
    main(sys.argv[1:])
