"""The retrieval service on Modal: one machine that keeps the index open, searched by any number of runs.

    modal run modal_search.py        # preflight on that machine: index, embedder, memory
    modal deploy modal_search.py     # start it; prints its address
    modal run --detach modal_train.py --action challenger retrieval.url=https://….modal.run …
    modal app stop dr-zero-search    # it costs by the hour until then

Machine and settings are a run file, config/runs/search.yaml or what DRZERO_SEARCH_FILE names. The index is
that of the corpus volume (`modal_train.py --action prepare-data`), as it was when the container started:
deploy again to serve a newer one. Requests carry the token RETRIEVAL_TOKEN of `.env`.

At the client this file needs what modal_train.py needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import modal
from dotenv import dotenv_values

from launch.compute import MODAL_LIMIT_S, Compute
from launch.errors import LaunchError
from launch.image.image import ImageExtras, cpu_image
from launch.runfile import read_runfile
from launch.search_service import PORT, described, start, words_here
from launch.secrets import dotenv_secret
from launch.volumes import MOUNTS, volume_names

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = {**{key: value or "" for key, value in dotenv_values(ROOT / ".env").items()}, **os.environ}
FILE = ENVIRONMENT.get("DRZERO_SEARCH_FILE") or "config/runs/search.yaml"
START_S = 1800
"""Until its port is open: Chroma reads its index into memory first, and a model may be downloaded."""
SEARCHES = 1000
"""Requests at once; the service itself batches them, and refuses what is beyond `retrieval.max_queue`."""


def _plan() -> tuple[Compute, list[str], ImageExtras, dict[str, str]]:
    try:
        file = read_runfile(FILE)
        machine, words = described(file, FILE, ENVIRONMENT.get("RETRIEVAL_TOKEN"))
        extras = ImageExtras(**{part: tuple(items) for part, items in file.image.items()})
        return machine, words, extras, volume_names(ENVIRONMENT)
    except LaunchError as error:
        print(f"modal_search: {error}", file=sys.stderr)
        sys.exit(2)


MACHINE, WORDS, EXTRAS, NAMES = _plan()
app = modal.App("dr-zero-search")
_shared: dict[str, Any] = {
    "image": cpu_image(EXTRAS),
    "cpu": float(MACHINE.cpu),
    "memory": MACHINE.memory,
    "region": MACHINE.region,
    "volumes": {
        MOUNTS[kind]: modal.Volume.from_name(NAMES[kind], create_if_missing=True)
        for kind in ("corpus", "cache")
    },
    "secrets": [dotenv_secret(ROOT)],
    # A container imports this file too, without the `.env`.
    "env": {
        **{key: ENVIRONMENT.get(key, "") for key in ("EXPERIMENTER", "EXPERIMENT_NAME")},
        "DRZERO_SEARCH_FILE": FILE,
    },
}


# One container: each would read the index, and has its own cache.
@app.function(min_containers=1, max_containers=1, timeout=MODAL_LIMIT_S, **_shared)
@modal.concurrent(max_inputs=SEARCHES)
@modal.web_server(PORT, startup_timeout=START_S)
def search() -> None:
    """Serve until the app is stopped."""
    start(WORDS)


@app.function(timeout=START_S, **_shared)
def check() -> int:
    """Preflight the service on its machine; its exit code."""
    from launch.container import run_module

    return run_module("pipeline.cli", ["preflight", "serve-search", *words_here(WORDS)])


@app.local_entrypoint()
def main() -> None:
    """`modal run modal_search.py`."""
    size, usd = f"{MACHINE.cpu:g} cores, {MACHINE.memory:,} MiB", MACHINE.usd_per_hour
    print(f"[search] {size}: ${usd:.2f} an hour once it is deployed")
    raise SystemExit(check.remote())
