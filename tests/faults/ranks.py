"""Two gloo ranks that fall out of step in a known way, with the run's driver as their parent.

python tests/faults/ranks.py --folder FOLDER --fault exception|mismatch|clean-up|init|silence|shapes
"""

import argparse
import datetime
import json
import os
import queue
import re
import select
import subprocess
import sys
import time
import traceback
from pathlib import Path

from setproctitle import setproctitle

from drzero.ops.telemetry import Heartbeat


def strike(options):
    (options.folder / "fault.json").write_text(json.dumps({"time": time.time()}))


def rank(options):
    import torch
    import torch.distributed as dist

    setproctitle(f"fault: rank {options.rank}")
    if options.fault == "init" and options.rank == 1:
        strike(options)
        load_model()
    if options.fault == "shapes":
        import torch.distributed.pipelining  # takes seconds, which are the start-up's
    store = dist.FileStore(str(options.folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=2, timeout=LONG)
    ones = torch.ones(4)
    dist.all_reduce(ones)
    if options.rank == 0:
        (options.folder / "together").touch()
    learn = {
        "exception": learn_with_error,
        "mismatch": learn_with_branch,
        "clean-up": learn_and_close,
        "silence": learn_in_silence,
        "shapes": learn_in_stages,
    }
    learn[options.fault](options, ones)


LONG = datetime.timedelta(hours=2)


def load_model():
    from_pretrained()


def from_pretrained():
    time.sleep(100_000)


def learn_with_error(options, ones):
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


def learn_with_branch(options, ones):
    import torch
    import torch.distributed as dist

    if options.rank == 0:
        dist.all_reduce(ones)
    else:
        strike(options)
        dist.all_gather([torch.zeros(4), torch.zeros(4)], ones)
    dist.all_reduce(ones)


def learn_and_close(options, ones):
    import torch.distributed as dist

    if options.rank == 1:
        strike(options)
        close()
    else:
        dist.recv(ones, 1)


def close():
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def learn_in_silence(options, ones):
    """All ranks agree, and the network between them carries nothing any more."""
    import torch.distributed as dist

    if options.rank == 1:
        strike(options)
        stop_listening()
    for _ in range(3):
        dist.all_reduce(ones)


def stop_listening():
    """Have gloo's thread hear its sockets no more: they stay open, as when a network falls silent."""
    opened = {
        int(link.name): os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
    }
    for number in (number for number, what in opened.items() if what == "anon_inode:[eventpoll]"):
        watched = re.findall(r"^tfd:\s*(\d+)", Path(f"/proc/self/fdinfo/{number}").read_text(), re.MULTILINE)
        with select.epoll.fromfd(os.dup(number)) as poll:
            for socket in (int(place) for place in watched if opened[int(place)].startswith("socket:")):
                poll.unregister(socket)


def learn_in_stages(options, ones):
    """A pipeline whose first stage sends micro-batches of 2 rows, and whose second expects more, of 4."""
    import torch
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rows, micro_batches = (2, 2) if options.rank == 0 else (4, 4)
    part = torch.zeros(rows, 8, requires_grad=True)
    layers, device = torch.nn.Linear(8, 8), torch.device("cpu")
    stage = PipelineStage(layers, options.rank, 2, device, input_args=part, output_args=part)
    schedule = ScheduleGPipe(stage, micro_batches, loss_fn=torch.nn.functional.mse_loss)
    batch = torch.ones(rows * micro_batches, 8)
    if options.rank == 0:
        strike(options)
        schedule.step(batch)
    else:
        schedule.step(target=batch)


def main():
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
