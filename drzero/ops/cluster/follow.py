"""Writes the nodes of a Ray cluster to a file, at the start and whenever one joins or leaves: a list of JSON.

    python -m drzero.ops.cluster.follow 10.0.0.1:6379 /tmp/nodes.json

It stays connected, because each connection is a job that Ray remembers for as long as the cluster is up. It
ends with an error when the cluster does not answer (any more).
"""

import json
import sys
import time
from pathlib import Path

from drzero.ops.cluster.ask import about_nodes, connect
from drzero.ops.cluster.cluster import unreachable
from drzero.ops.files import atomic_write

_POLL_S = 2.0


def main(address: str, path: Path) -> None:
    """Follow the cluster until this process is ended."""
    if fault := unreachable(address):
        sys.exit(fault)
    connect(address)
    written: list[dict[str, object]] = []
    while True:
        if (nodes := about_nodes()) != written:
            written = nodes
            atomic_write(path, json.dumps(nodes))
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
