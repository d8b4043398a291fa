"""Asks a Ray cluster for its nodes and, with a question, each of them: a line of JSON each.

    python -m drzero.ops.cluster.ask 10.0.0.1:6379
    python -m drzero.ops.cluster.ask 10.0.0.1:6379 stacks '{"deadline_s": 8, "native": false}'

The first line is about the whole cluster. A question is a function of `drzero.ops.cluster.on_node`.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drzero.ops.cluster import on_node

_ROOT = Path(__file__).resolve().parents[3]
_ANSWER_S = 40.0
"""For all nodes together: a worker has to start there, and to import this project."""
_RELEASED_S = 15.0
"""Within this a run that has just ended has left its GPUs."""


def main(arguments: Sequence[str]) -> None:
    """Print what the cluster answers."""
    address, question = arguments[0], arguments[1] if len(arguments) > 1 else None
    connect(address)
    if question == "facts":
        _wait_for_release()
    all_of, free = ray.cluster_resources(), ray.available_resources()
    whole = {name.lower(): all_of.get(name, 0.0) for name in ("CPU", "GPU")}
    print(json.dumps(whole | {f"free_{name.lower()}": free.get(name, 0.0) for name in ("CPU", "GPU")}))
    nodes = about_nodes()
    answers = _answers(nodes, question, json.loads(arguments[2])) if question else {}
    for node in nodes:
        print(json.dumps(node | answers.get(node["id"], {})))


def connect(address: str) -> None:
    """Connect this process; what runs in its name on the nodes imports this project."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    # Ray would take the environment's address where the two differ.
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )


def _wait_for_release() -> None:
    """A run that ended a moment ago still holds its GPUs in Ray's books."""
    end = time.monotonic() + _RELEASED_S
    while time.monotonic() < end and ray.available_resources().get("GPU", 0) < ray.cluster_resources().get(
        "GPU", 0
    ):
        time.sleep(0.5)


def about_nodes() -> list[dict[str, Any]]:
    """What `drzero.ops.cluster.cluster.Node` has of each node, those that Ray remembers included."""
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
    """By node, `answer`, or `fault` with why there is none."""
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
            answers[node] = {"fault": _last_line(error)}
    return answers


def _last_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
