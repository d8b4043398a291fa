"""The actor's update alone: its speed, its memory, and where its time goes.

    python -m bench.update --shape qwen2.5-3b
    python -m bench.update --hardware cpu --rows 8 --profile 2
    python -m bench.update --case "8k tokens:actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192" --case …

veRL's own worker with its FSDP2 engine trains on random rows, without Ray and without rollouts. A case is a
name, maybe `@` and a number of rows, and the overrides to add; each case runs in a new process.
`--profile 4` also traces an update of four rows and writes the operations that took longest.
"""

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import machine
from drzero.ops.files import atomic_write
from drzero.recipe.compose import compose_stage, resolve, verl_env

CASES = ("as the profile has it:",)
COLUMNS = "case | rows | tokens | update, s | first, s | tokens/s | MFU"
COLUMNS += " | peak, GiB | reserved, GiB | loss | gradient"
_HEAD = "actor_rollout_ref"

Row = dict[str, torch.Tensor]


def main() -> int:
    """Run every case and print the table; 1 if one failed."""
    args = parse()
    if args.child:
        return run_case(args)
    from bench.shapes import shape_folder

    args.work.mkdir(parents=True, exist_ok=True)
    shape_folder(args.shape, args.work / "models")
    environment = os.environ | verl_env(config_of(args, ""))
    for stale in args.work.glob("ended-*"):
        stale.unlink()
    # They import at the same time, and then train one after the other.
    command = [sys.executable, "-m", "bench.update", *sys.argv[1:]]
    running = [
        subprocess.Popen(
            [*command, "--child", case, "--turn", str(turn)],
            env=environment,
            stdout=(args.work / f"{slug(case)}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for turn, case in enumerate(args.case)
    ]
    codes = []
    for turn, process in enumerate(running):
        codes.append(process.wait())
        (args.work / f"ended-{turn}").touch()
    print("\n".join(table(args.work, args.case)))
    return int(any(codes))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/update"))
    parser.add_argument("--hardware", default="single_gpu", help="a profile in config/hardware")
    parser.add_argument("--shape", default="smollm2-135m", help="the model's architecture")
    parser.add_argument("--rows", type=int, default=80, help="rows in an update")
    parser.add_argument("--lengths", default="250-500", help="fewest and most tokens in a row")
    parser.add_argument("--steps", type=int, default=2, help="updates to time, after a first one")
    parser.add_argument("--profile", type=int, default=0, help="rows in a traced update")
    parser.add_argument("--case", action="append", help="NAME:OVERRIDES or NAME@ROWS:OVERRIDES; repeatable")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.case = args.case or list(CASES)
    return args


def slug(case: str) -> str:
    """A file name for a case."""
    return re.sub(r"\W", "-", re.split("[:@]", case)[0])


def config_of(args: argparse.Namespace, overrides: str) -> Any:
    """The solver's config on this hardware."""
    fixed = [f"hardware={args.hardware}", f"base_model={args.work / 'models' / args.shape}"]
    return compose_stage("solver", [*fixed, *shlex.split(overrides)])


def run_case(args: argparse.Namespace) -> int:
    """Build the worker, train, and write a record."""
    name, _, overrides = args.child.partition(":")
    name, _, count = name.partition("@")
    config = resolve(config_of(args, overrides))[_HEAD]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from verl.utils import tensordict_utils as tu

    made = worker_type()
    rows = make_rows(int(count or args.rows), args.lengths)
    while args.turn and not (args.work / f"ended-{args.turn - 1}").exists():
        time.sleep(0.05)
    worker = made(config=config, role="actor")
    worker.init_model()
    seconds, metrics = [], {}
    for _ in range(1 + args.steps):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        metrics, took = timed(lambda: tu.get(worker.actor.train_mini_batch(batch_of(rows)), "metrics"))
        seconds.append(took)
        print(f"{name}: {took:.2f} s", flush=True)
    on_gpu = torch.cuda.is_available()
    record = {
        "case": name,
        "machine": device_name(),
        "shape": args.shape,
        "rows": len(rows),
        "tokens": sum(len(row["input_ids"]) for row in rows),
        "seconds": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
        **{key: mean_of(metrics.get(key)) for key in ("mfu", "loss", "grad_norm")},
    }
    atomic_write(args.work / f"{slug(name)}.json", json.dumps(record))
    if args.profile:
        traced = profiled(worker, rows[: args.profile])
        atomic_write(args.work / f"{slug(name)}.profile.txt", traced)
    return 0


def worker_type() -> Any:
    """veRL's worker for this device."""
    import verl  # noqa: F401 - registers our parts

    if os.environ.get("VERL_PLATFORM") == "cpu":
        from verl_ext.rollout.cpu_worker import CpuActorRolloutRefWorker

        return CpuActorRolloutRefWorker
    from verl.workers.engine_workers import ActorRolloutRefWorker

    return ActorRolloutRefWorker


def make_rows(count: int, lengths: str) -> list[Row]:
    """Rows as the trainer leaves them; every sixteenth is spoiled, with no mask and no advantage."""
    draw = torch.Generator().manual_seed(0)
    least, most = map(int, lengths.split("-"))
    rows = []
    for index in range(count):
        length = int(torch.randint(least, most + 1, (1,), generator=draw))
        ids_T = torch.randint(100, 40000, (length,), generator=draw)
        prompt = length // 5
        mask_R = torch.ones(length - prompt, dtype=torch.int64) * (index % 16 != 15)
        row = {
            "input_ids": ids_T,
            "position_ids": torch.arange(length),
            "prompts": ids_T[:prompt],
            "responses": ids_T[prompt:],
            "response_mask": mask_R,
            "loss_mask": mask_R,
            "old_log_probs": -10.8 - torch.rand(length - prompt, generator=draw) / 10,
            "advantages": torch.randn(1, generator=draw) * mask_R,
        }
        rows.append(row)
    return rows


def batch_of(rows: Sequence[Row]) -> Any:
    """The rows as veRL's worker takes them, for one update."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    columns: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged)
        for name in rows[0]
    }
    data = TensorDict(columns, batch_size=len(rows))
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        global_batch_size=len(rows),
        mini_batch_size=len(rows),
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
    )
    return data


def timed(function: Any) -> tuple[Any, float]:
    """What a function returns, and its seconds on the device."""
    began = time.monotonic()
    found = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, round(time.monotonic() - began, 3)


def profiled(worker: Any, rows: Sequence[Row]) -> str:
    """The operations of one update that took longest, on the device and on the processor."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _, alone = timed(lambda: worker.actor.train_mini_batch(batch_of(rows)))
    with profile(activities=activities) as recorded:
        timed(lambda: worker.actor.train_mini_batch(batch_of(rows)))
    found = recorded.key_averages()
    launches = sum(event.count for event in found if "LaunchKernel" in event.key)
    tokens = sum(len(row["input_ids"]) for row in rows)
    head = f"{len(rows)} rows, {tokens} tokens: {alone:.3f} s untraced, {launches} kernel launches"
    orders = ["self_cpu_time_total", *(["self_cuda_time_total"] if on_gpu else [])]
    tables = [found.table(sort_by=order, row_limit=14, max_name_column_width=70) for order in orders]
    return "\n\n".join([head, *tables])


def table(work: Path, cases: Sequence[str]) -> list[str]:
    """The records as lines of Markdown."""
    lines, heading = [], ""
    for case in cases:
        path = work / f"{slug(case)}.json"
        if not path.exists():
            log = (work / f"{slug(case)}.log").read_text().strip().splitlines() or [""]
            lines.append(f"| {slug(case)} | failed: {log[-1][:150]} |")
            continue
        found = json.loads(path.read_text())
        heading = f"{found['machine']}: {found['shape']}"
        best, first = min(found["seconds"][1:]), found["seconds"][0]
        cells = [found["case"], str(found["rows"]), f"{found['tokens']:,}", f"{best:.2f}", f"{first:.1f}"]
        cells += [f"{found['tokens'] / best:,.0f}", f"{found['mfu']:.3f}", f"{found['peak_gib']:.1f}"]
        cells += [f"{found['reserved_gib']:.1f}", f"{found['loss']:.6f}", f"{found['grad_norm']:.5f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return [heading, "", f"| {COLUMNS} |", "|---" * (COLUMNS.count("|") + 1) + "|", *lines]


def device_name() -> str:
    """The GPU, or the processor."""
    here = machine("torch", "verl", "transformers")
    return f"{torch.cuda.get_device_name(0)}; {here}" if torch.cuda.is_available() else here


def mean_of(value: Any) -> float:
    """The mean of a metric that may be a list."""
    numbers = [
        float(number) for number in (value if isinstance(value, list) else [value]) if number is not None
    ]
    return sum(numbers) / len(numbers) if numbers else float("nan")


if __name__ == "__main__":
    sys.exit(main())
