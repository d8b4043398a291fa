"""The retrieval service on Modal: one machine that keeps the index open, searched by any number of runs.

    modal run modal_search.py        # preflight on that machine: index, embedder, memory
    modal deploy modal_search.py     # start it; prints its address
    modal run --detach modal_train.py --action challenger retrieval.url=https://….modal.run …
    modal app rollover dr-zero-search    # a new container, which reads the index that there is now
    modal app stop dr-zero-search    # it costs by the hour until then

Machine and settings are a run file, config/runs/search.yaml or what DRZERO_SEARCH_FILE names. The index is
that of the corpus volume (`modal_train.py --action prepare-data`), as it was when the container started.
Requests carry RETRIEVAL_TOKEN, which is in `.env` or the environment. With EXPERIMENTER set, volumes and the
app's name end in it.

At the client this file needs what modal_train.py needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import modal
from dotenv import dotenv_values

from drzero.launch.compute import MODAL_LIMIT_S, Compute
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import SOURCE, ImageExtras, cpu_image
from drzero.launch.runfile import read_runfile
from drzero.launch.search_service import PORT, START_S, described, start, words_here
from drzero.launch.volumes import MOUNTS, search_name, volume_names

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = {**{key: value or "" for key, value in dotenv_values(ROOT / ".env").items()}, **os.environ}
FILE = ENVIRONMENT.get("DRZERO_SEARCH_FILE") or "config/runs/search.yaml"
KEYS = ("RETRIEVAL_TOKEN", "HF_TOKEN", "CHROMA_API_KEY")
"""What the service may need of `.env`; its container answers the internet, and gets nothing else."""
SEARCHES = 1000
"""Requests at once; the service itself batches them, and refuses what is beyond `retrieval.max_queue`."""


def _plan() -> tuple[Compute, list[str], modal.Image, dict[str, str]]:
    try:
        if Path(FILE).parts[0] not in SOURCE:
            raise LaunchError(f"DRZERO_SEARCH_FILE={FILE}: a container reads it too: put it under config/")
        file = read_runfile(FILE)
        machine, words = described(file, FILE, ENVIRONMENT.get("RETRIEVAL_TOKEN"))
        extras = ImageExtras.of(file.image)
        return machine, words, cpu_image(extras), volume_names(ENVIRONMENT)
    except LaunchError as error:
        print(f"modal_search: {error}", file=sys.stderr)
        sys.exit(2)


MACHINE, WORDS, IMAGE, NAMES = _plan()
NAME = search_name(NAMES)
app = modal.App(NAME)
_shared: dict[str, Any] = {
    "image": IMAGE,
    "cpu": float(MACHINE.cpu),
    "memory": MACHINE.memory,
    "region": MACHINE.region,
    "volumes": {
        MOUNTS[kind]: modal.Volume.from_name(NAMES[kind], create_if_missing=True)
        for kind in ("corpus", "cache")
    },
    "secrets": [modal.Secret.from_dict({key: ENVIRONMENT.get(key, "") for key in KEYS})],
    # A container imports this file too, without the `.env`.
    "env": {
        **{key: ENVIRONMENT.get(key, "") for key in ("EXPERIMENTER", "EXPERIMENT_NAME")},
        "DRZERO_SEARCH_FILE": FILE,
    },
}


# One container: each would read the index, and has its own cache. `modal run` checks, and starts none.
STAYS = 0 if sys.argv[1:2] == ["run"] else 1


@app.function(min_containers=STAYS, max_containers=1, timeout=MODAL_LIMIT_S, **_shared)
@modal.concurrent(max_inputs=SEARCHES)
@modal.web_server(PORT, startup_timeout=START_S)
def search() -> None:
    """Serve until the app is stopped."""
    start(WORDS)


@app.function(timeout=START_S, **_shared)
def check() -> int:
    """Preflight the service on its machine; its exit code."""
    from drzero.launch.container import run_module

    return run_module("drzero.cli", ["preflight", "serve-search", *words_here(WORDS)])


@app.local_entrypoint()
def main() -> None:
    """`modal run modal_search.py`."""
    size, usd = f"{MACHINE.cpu:g} cores, {MACHINE.memory:,} MiB", MACHINE.usd_per_hour
    print(f"[search] {NAME}: {size}, ${usd:.2f} an hour once it is deployed")
    raise SystemExit(check.remote())
