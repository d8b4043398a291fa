"""The trained agent on Modal: `drzero serve-agent` on one GPU with SGLang, its index beside it.

    modal run modal_agent.py         # preflight on a CPU, and the prices
    modal deploy modal_agent.py      # start it. Prints its address; AGENT_GPU=L40S chooses the GPU
    modal app rollover dr-zero-agent     # a new container, which reads the current solver and index
    modal app stop dr-zero-agent         # nobody can ask it any more

Nothing runs, and nothing is billed, until someone asks. Its run file is config/runs/agent.yaml, or
DRZERO_AGENT_FILE. Requests need AGENT_TOKEN.
"""

from __future__ import annotations

import sys
from pathlib import Path

import modal

from drzero.launch.agent_service import AGENT, IDLE_S, REQUEST_S, price_lines, words_here
from drzero.launch.image.image import cpu_image
from drzero.launch.service import PORT, REQUESTS, START_S, planned, preflight, start

PLAN = planned(AGENT, Path(__file__).resolve().parent)
app = modal.App(PLAN.name)
if sys.argv[1:2] in (["run"], ["deploy"], ["serve"]):  # A container imports this file too.
    print("\n".join(f"[agent] {line}" for line in price_lines(PLAN.machine)), flush=True)


# One container at most: that is the price an hour.
@app.function(
    max_containers=1,
    scaledown_window=IDLE_S,
    timeout=REQUEST_S,
    startup_timeout=START_S,
    **PLAN.on_machine(),
)
@modal.concurrent(max_inputs=REQUESTS)
@modal.web_server(PORT, startup_timeout=START_S)
def agent() -> None:
    """Serve until nobody has asked for a while."""
    start(AGENT.command, words_here(PLAN.words))


@app.function(image=cpu_image(PLAN.image), cpu=2, memory=8192, timeout=START_S, **PLAN.shared)
def check() -> int:
    """Preflight the service for its machine. Returns the exit code."""
    return preflight(AGENT.command, words_here(PLAN.words))


@app.local_entrypoint()
def main() -> None:
    """`modal run modal_agent.py`."""
    raise SystemExit(check.remote())
