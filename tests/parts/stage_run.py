"""A training stage as a user runs it: a process of its own, watched to its end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from data_order import Batch
from omegaconf import DictConfig, OmegaConf
from watch import Watch

ROOT = Path(__file__).resolve().parents[2]
RUN_LIMIT_S = 900


@dataclass
class Run:
    """A finished run: exit code, output, folder, and what was seen on the way."""

    code: int
    out: str
    err: str
    folder: Path
    watch: Watch

    @property
    def config(self) -> DictConfig:
        return cast(DictConfig, OmegaConf.load(self.folder / "resolved.yaml"))

    @property
    def export(self) -> Path:
        return Path(self.config.run.export_dir)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


def run_stage(
    stage: str,
    arguments: list[str],
    folder: Path,
    meanwhile: Callable[[Watch], None] | None = None,
    env: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Run:
    """Run the stage to its end, watching its processes; `meanwhile` runs at the same time, in a thread.

    `env` is added to the environment; `python` may be that of another one.
    """
    output = {name: folder.parent / f"{folder.name}.{name}" for name in ("out", "err")}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with output["out"].open("w") as out, output["err"].open("w") as err:
        child = subprocess.Popen(
            [python, "-m", "drzero.cli", stage, *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=err,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        watch, root = Watch(), psutil.Process(child.pid)
        helper = threading.Thread(target=meanwhile, args=(watch,), daemon=True) if meanwhile else None
        if helper:
            helper.start()
        deadline = time.monotonic() + RUN_LIMIT_S
        try:
            while child.poll() is None and time.monotonic() < deadline:
                with suppress(psutil.Error):
                    watch.poll(root)
                time.sleep(0.5)
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            code = child.wait(60)
    return Run(code, output["out"].read_text(), output["err"].read_text(), folder, watch)


def stop_after_first_step(finished: Run) -> float:
    """The stop time (Unix seconds) at which the same run, started now, has time for one step and no other.

    It is what the finished run took until it saved its first step, and some more, for a machine that has
    become busier. A second step would need the time of the first, of a save (120 s, as none has been timed)
    and of the shutdown (30 s): too much even if all goes twice as fast.
    """
    began = finished.lines("logs/events.jsonl")[0]["time"]
    saved_s = (
        next(beat["time"] for beat in finished.lines("heartbeats.jsonl") if beat["phase"] == "save") - began
    )
    return time.time() + saved_s + max(75.0, 145.0 - saved_s / 2)


def checkpoint_weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    """The actor's float32 weights, as the first rank saved them: of one rank, all of them."""
    (shard,) = (run.folder / f"global_step_{step}" / "actor").glob("model_world_size_*_rank_0.pt")
    state = torch.load(shard, weights_only=False)
    return {
        name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in state.items()
    }


def assert_nothing_left(run: Run) -> None:
    deadline = time.monotonic() + 30
    while run.watch.alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run.watch.alive() == []
    own = {port for _, port in run.watch.listeners} & {run.config.retrieval.port, run.config.solver.port}
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not listening & own
    in_folder = str(run.folder)
    assert [
        process.info
        for process in psutil.process_iter(["cmdline"])
        if in_folder in " ".join(process.info["cmdline"] or [])
    ] == []


def dumped_order(run: Run, steps: Iterable[int]) -> list[Batch]:
    """What a run trained on, by its rollout dumps: (document, hops) per step, once a rollout."""
    return [
        Counter((line["doc_id"], line["hop"]) for line in run.lines(f"dumps/step_{step:04d}.jsonl"))
        for step in steps
    ]
