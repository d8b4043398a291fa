"""The flow monitor of a training run: the points a sample passes, and the sources that count them.

    with flow_monitor(config) as flow:
        run_supervised(trainer, services, plan=watch_plan(config, flow))

It writes `RUN_DIR/flow.jsonl`.
"""

import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from drzero.ops.console import detail
from drzero.ops.flow.monitor import FlowMonitor, FlowTimes
from drzero.ops.flow.sources import QueueMetrics, Source, counters_source, service_source, workers_source
from drzero.ops.records import FLOW_FILE
from drzero.recipe.compose import retrieval_url
from drzero.stages.watch import PROGRESS, WAITS_ON

COUNTERS_FILE = "flow_counters.json"  # as in `verl_ext.trainer.flow_counters`, which imports veRL

CALLS = ("rollout", "generation", "search", "reward", "completion")
"""The kinds of calls workers record (`drzero.ops.telemetry`), each a flow point."""
WORK = {"token": "generation"}  # progress within a call: the rollout engine's tokens

_RETRIEVAL = QueueMetrics(
    depth="retrieval_queue_depth",
    out="retrieval_request_seconds_count",
    dropped="retrieval_rejected_total",
    errors="retrieval_errors_total",
)
_SOLVER = {
    "reference": QueueMetrics(depth="engine_queue_depth", out="engine_requests_total"),
    "sglang": QueueMetrics(depth="sglang:num_queue_reqs"),
    "vllm": QueueMetrics(depth="vllm:num_requests_waiting"),
}


def flow_monitor(
    config: DictConfig, *, services: bool = True, log: Callable[[str, str], None] = detail
) -> FlowMonitor:
    """The monitor of a resolved config. `log` gets a line every `flow.log_every_s`."""
    folder, since = Path(config.run.dir), time.time()
    plays = config.method == "environment"
    calls = (*CALLS, "environment") if plays else CALLS
    sources: list[Source] = [
        counters_source(folder / COUNTERS_FILE, since),
        workers_source(folder / PROGRESS, calls, since, WORK),
    ]
    retrieval, solver, flow = config.retrieval, config.solver, config.flow
    # An environment counts its searches as calls. A service elsewhere has other runs in its queue.
    if services and not plays and retrieval.url is None:
        sources.append(service_source("retrieval queue", f"{retrieval_url(retrieval)}/metrics", _RETRIEVAL))
    # Only the challenger has a solver server next to its policy.
    if services and config.method == "hrpo":
        url = f"http://{solver.host}:{solver.port}/metrics"
        sources.append(service_source("solver queue", url, _SOLVER[solver.engine]))
    times = FlowTimes(every_s=flow.every_s, log_every_s=flow.log_every_s, floor_s=config.watchdog.floor_s)
    workers = folder / PROGRESS if flow.workers else None
    return FlowMonitor(folder / FLOW_FILE, sources, WAITS_ON, times, log=log, workers=workers)
