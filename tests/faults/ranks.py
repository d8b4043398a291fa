"""Two gloo ranks that fall out of step in one of the known ways; the parent is the run's driver.

python tests/faults/ranks.py --folder FOLDER --fault exception|mismatch|clean-up|init
"""

import argparse
import datetime
import json
import os
import queue
import subprocess
import sys
import time
import traceback
from pathlib import Path

from setproctitle import setproctitle

from verl_ext.telemetry import Heartbeat


def strike(options: argparse.Namespace) -> None:
    (options.folder / "fault.json").write_text(json.dumps({"time": time.time()}))


def rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    setproctitle(f"fault: rank {options.rank}")
    if options.fault == "init" and options.rank == 1:
        strike(options)
        load_model()
    store = dist.FileStore(str(options.folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=2, timeout=LONG)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    if options.rank == 0:
        (options.folder / "together").touch()
    if options.fault == "exception":
        learn_with_error(options, ones)
    elif options.fault == "mismatch":
        learn_with_branch(options, ones)
    elif options.fault == "clean-up":
        learn_and_close(options, ones)


LONG = datetime.timedelta(hours=2)


def load_model() -> None:
    from_pretrained()


def from_pretrained() -> None:
    time.sleep(100_000)


def learn_with_error(options: argparse.Namespace, ones: "object") -> None:
    import torch.distributed as dist

    try:
        if options.rank == 1:
            strike(options)
            raise ValueError("loss is NaN")
        dist.all_reduce(ones)
    except ValueError:
        # As an actor does: the error goes to the caller, the process waits for its next task.
        traceback.print_exc()
        queue.Queue().get()


def learn_with_branch(options: argparse.Namespace, ones: "object") -> None:
    import torch
    import torch.distributed as dist

    if options.rank == 0:
        dist.all_reduce(ones)
    else:
        strike(options)
        dist.all_gather([torch.zeros(4), torch.zeros(4)], ones)
    dist.all_reduce(ones)


def learn_and_close(options: argparse.Namespace, ones: "object") -> None:
    import torch.distributed as dist

    if options.rank == 1:
        strike(options)
        close()
    else:
        dist.recv(ones, 1)


def close() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--rank", type=int)
    options, _ = parser.parse_known_args()
    if options.rank is not None:
        rank(options)
        return
    beat = Heartbeat(options.folder / "heartbeats.jsonl")
    beat.beat(0, "start-up")
    ranks = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(place)], env=os.environ)
        for place in range(2)
    ]
    if options.fault != "init":
        while not (options.folder / "together").exists():
            time.sleep(0.1)
        beat.beat(1, "update")
    for process in ranks:
        process.wait()


if __name__ == "__main__":
    main()
