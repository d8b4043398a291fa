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

import modal

from drzero.launch.compute import MODAL_LIMIT_S
from drzero.launch.search_service import SEARCH, words_here
from drzero.launch.service import PORT, REQUESTS, START_S, planned, preflight, start

PLAN = planned(SEARCH, Path(__file__).resolve().parent)
app = modal.App(PLAN.name)
# One container, since each reads the index and has its own cache. `modal run` only checks, and starts none.
STAYS = 0 if sys.argv[1:2] == ["run"] else 1


@app.function(min_containers=STAYS, max_containers=1, timeout=MODAL_LIMIT_S, **PLAN.on_machine())
@modal.concurrent(max_inputs=REQUESTS)
@modal.web_server(PORT, startup_timeout=START_S)
def search() -> None:
    """Serve until the app is stopped."""
    start(SEARCH.command, words_here(PLAN.words))


@app.function(timeout=START_S, **PLAN.on_machine())
def check() -> int:
    """Preflight the service on its machine. Returns the exit code."""
    return preflight(SEARCH.command, words_here(PLAN.words))


@app.local_entrypoint()
def main() -> None:
    """`modal run modal_search.py`."""
    machine = PLAN.machine
    size, usd = f"{machine.cpu:g} cores, {machine.memory:,} MiB", machine.usd_per_hour
    print(f"[search] {PLAN.name}: {size}, ${usd:.2f} an hour once it is deployed")
    raise SystemExit(check.remote())
