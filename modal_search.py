"""The retrieval service on Modal: one machine keeps the index open for any number of runs.

    modal deploy modal_search.py     # start it. Prints its address
    modal run --detach modal_train.py --action challenger retrieval.url=https://….modal.run …
    modal app rollover dr-zero-search    # a new container, which reads the current index
    modal app stop dr-zero-search        # it is billed by the hour until then

Its run file is config/runs/search.yaml, or DRZERO_SEARCH_FILE. Requests need RETRIEVAL_TOKEN.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import modal

from drzero.launch.compute import MODAL_LIMIT_S, Compute
from drzero.launch.errors import LaunchError
from drzero.launch.image.image import SOURCE, ImageExtras, cpu_image
from drzero.launch.runfile import read_runfile
from drzero.launch.search_service import PORT, START_S, described, start, words_here
from drzero.launch.secrets import client_environment
from drzero.launch.volumes import MOUNTS, NAMING, search_name, volume_names

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = client_environment(ROOT)
FILE = ENVIRONMENT.get("DRZERO_SEARCH_FILE") or "config/runs/search.yaml"
KEYS = ("RETRIEVAL_TOKEN", "HF_TOKEN", "CHROMA_API_KEY")
"""All that the service's container, which is open to the internet, gets of `.env`."""
SEARCHES = 1000  # Concurrent requests. Beyond `retrieval.max_queue` the service itself refuses them.


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
    "env": {key: ENVIRONMENT.get(key, "") for key in NAMING} | {"DRZERO_SEARCH_FILE": FILE},
}


# One container, since each reads the index and has its own cache. `modal run` only checks, and starts none.
STAYS = 0 if sys.argv[1:2] == ["run"] else 1


@app.function(min_containers=STAYS, max_containers=1, timeout=MODAL_LIMIT_S, **_shared)
@modal.concurrent(max_inputs=SEARCHES)
@modal.web_server(PORT, startup_timeout=START_S)
def search() -> None:
    """Serve until the app is stopped."""
    start(WORDS)


@app.function(timeout=START_S, **_shared)
def check() -> int:
    """Preflight the service on its machine. Returns the exit code."""
    from drzero.launch.container import run_module

    return run_module("drzero.cli", ["preflight", "serve-search", *words_here(WORDS)])


@app.local_entrypoint()
def main() -> None:
    """`modal run modal_search.py`."""
    size, usd = f"{MACHINE.cpu:g} cores, {MACHINE.memory:,} MiB", MACHINE.usd_per_hour
    print(f"[search] {NAME}: {size}, ${usd:.2f} an hour once it is deployed")
    raise SystemExit(check.remote())
