"""The recipe on one GPU, piece by piece: does each stage run, how fast, with how much memory.

    python -m bench.gpu --page outputs/gpu/page.md              # all unfinished pieces, then the tables
    python -m bench.gpu reference-solver                        # one piece
    python -m bench.gpu --shape qwen2.5-7b real-size-solver
    python -m bench.gpu --hardware cpu --shape smollm2-135m …   # the same pieces without a GPU

A piece is one command on the demo world, a short solver or challenger run:

- `reference-…`, `sglang-…`: the packaged model on either rollout engine
- `…-stock-solver`: on stock veRL, without our trainer
- `…-streamed`: every other step's reward waits for the last rollout (`bench.streamed_reward`)
- `real-size-…`: random weights of real size, at the recipe's lengths, with the settings of `8xh100`. On a GPU
  of 80 GB preflight refuses the 3B challenger, and names the settings that fit: add them with `--set`.

A finished piece has a record in the work folder and does not run again. A failed one starts over.
docs/gpu.md shows some of the tables.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import psutil
import torch

from bench import streamed_reward
from bench.machine import machine
from bench.shapes import SHAPES, shape_folder
from data.benchmarks import load_benchmark
from data.parquet_io import training_row, write_training_rows
from data.solver_rows import TRAIN, VAL
from drzero.ops.files import atomic_write
from drzero.ops.records import Record, RunRecords
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage, options
from drzero.recipe.metrics import is_training, read_metrics
from verl_ext.method.prompts import solver_messages
from verl_ext.method.solver_reward import SYNTHESIZED

STEPS = 3
"""Steps of a run. The first one is left out of the means: it compiles, allocates and fills caches."""
PHASES = {
    "rollout": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
    "save": "timing_s/save_checkpoint",
    "step": "timing_s/step",
}
CHECKS = {
    "drift": "drzero/rollout/token_drift_rate",
    "failures": "drzero/failures/share",
    "KL to the sampler": "actor/rollout_corr/kl",
    "reward": "critic/rewards/mean",
    "tokens a step": "perf/total_num_tokens",
    "MFU": "perf/mfu/actor",
}
LEDGER = {"rollout": "rollout", "update": "update", "weight-sync": "weight sync"}
"""The trainer's phases, and the ledger's names of them."""
SMALL = (
    # 135M: nothing in host memory, nothing recomputed.
    "actor_rollout_ref.actor.fsdp_config.offload_policy=false",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
)
STOCK = (
    # veRL's own trainer and loss: no row is spoiled here, so both do the same.
    "trainer.v1.trainer_mode=sync",
    "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
)
STREAMED = (
    "reward.custom_reward_function.path=pkg://bench.streamed_reward",
    f"trainer.total_training_steps={streamed_reward.STEPS}",
    f"trainer.save_freq={streamed_reward.STEPS}",
    # All steps have the same weights, for all that matters.
    "actor_rollout_ref.actor.optim.lr=1e-9",
)


@dataclass(frozen=True)
class Piece:
    """One run."""

    stage: str
    engine: str
    overrides: tuple[str, ...] = ()
    batch: int = 16
    """Prompts a step."""
    of_real_size: bool = False


PIECES = {
    "reference-solver": Piece("solver", "reference"),
    "stock-solver": Piece("solver", "reference", STOCK),
    "reference-challenger": Piece("challenger", "reference"),
    "reference-streamed": Piece("challenger", "reference", STREAMED, batch=128),
    "sglang-solver": Piece("solver", "sglang"),
    "sglang-stock-solver": Piece("solver", "sglang", STOCK),
    "sglang-challenger": Piece("challenger", "sglang"),
    "sglang-streamed": Piece("challenger", "sglang", STREAMED, batch=128),
    "real-size-solver": Piece("solver", "sglang", of_real_size=True),
    "real-size-challenger": Piece("challenger", "sglang", of_real_size=True),
}


@dataclass
class Result:
    """The result of a piece."""

    piece: str
    machine: str
    code: int
    seconds: float
    """Of the whole command, start and end included."""
    start: float
    """Seconds until the first rollout begins."""
    peak_gib: dict[str, float]
    """The most memory in use in each of the ledger's phases: of the GPU, or without one of the machine."""
    ledger_gib: dict[str, float]
    """What preflight's ledger expects in each phase."""
    estimate: str
    """What preflight said of the time."""
    steps: list[dict[str, float]] = field(default_factory=list)
    streamed: str = ""
    """Of a run whose steps take turns: their tables."""
    error: str = ""
    """The last lines of a failed command."""


def device_name() -> str:
    """The GPU and its torch, or the processor."""
    packages = ("torch", "verl", "sglang", "transformers")
    gpu = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}; " if torch.cuda.is_available() else ""
    return gpu + machine(*packages)


def used_gib() -> float:
    """Memory in use: of the first GPU by all processes, or without one of the machine."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        return (total - free) / 2**30
    return psutil.virtual_memory().used / 2**30


@contextmanager
def sampled() -> Iterator[list[tuple[float, float]]]:
    """Collect the time and the memory in use beyond the memory before, five times a second."""
    before, ended = used_gib(), threading.Event()
    samples: list[tuple[float, float]] = []

    def poll() -> None:
        while not ended.wait(0.2):
            samples.append((time.time(), used_gib() - before))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def peaks(samples: Sequence[tuple[float, float]], beats: Sequence[Record]) -> dict[str, float]:
    """The most memory in use in each of the ledger's phases, by the trainer's heartbeats."""
    most: dict[str, float] = {}
    for when, gib in samples:
        now = next((beat["phase"] for beat in reversed(beats) if beat["time"] <= when), "")
        if phase := LEDGER.get(now):
            most[phase] = max(most.get(phase, 0.0), gib)
    return most


def prepare(work: Path) -> None:
    """The demo world with its models and index, and the solver's rows: the questions of its evaluation."""
    drzero("demo-data", *roots(work))
    questions = load_benchmark(work / "corpus" / "chains.jsonl")
    rows = [
        training_row(
            SYNTHESIZED,
            solver_messages(question.question, "short"),
            list(question.targets),
            {
                **{"index": index, "split": "train", "hop": question.hop or 1, "document": ""},
                **{"doc_id": question.key, "question": question.question},
            },
            {"corpus_id": "demo", "generator_checkpoint": None, "seed": 0, "trajectory": None},
        )
        for index, question in enumerate(questions)
    ]
    folder = work / "checkpoints" / "synthesize_iter1"
    for name in (TRAIN, VAL):
        write_training_rows(folder / name, rows)


def roots(work: Path) -> tuple[str, str]:
    """Where everything is read and written."""
    return (f"paths.corpus={work / 'corpus'}", f"paths.checkpoints={work / 'checkpoints'}")


def arguments(
    name: str, work: Path, hardware: str, batch: int | None, shape: str, more: Sequence[str] = ()
) -> list[str]:
    """The overrides of a piece's command."""
    piece = PIECES[name]
    words = [
        "retrieval.embedder=packaged-minilm",
        "prompts.form=short",  # as the demo's rows have it, whichever model is trained
        f"run.name={name}",
        f"data.train_batch_size={batch or piece.batch}",
        # A profile's disk is for a model 20 times as large; nobody follows a bench on Weights & Biases.
        "run.min_free_gb=10",
        "trainer.logger=[file,tensorboard]",
        f"trainer.total_training_steps={STEPS}",
    ]
    if piece.stage == "solver":
        words += ["trainer.val_before_train=false", "trainer.test_freq=-1"]
    else:
        words.append(f"solver.engine={piece.engine}")
    words += real_size(work, hardware, shape) if piece.of_real_size else demo_size(hardware)
    return [*words, f"rollout={piece.engine}", *roots(work), *piece.overrides, *more]


def demo_size(hardware: str) -> list[str]:
    """The packaged model, with everything on the GPU."""
    words = [f"hardware={hardware}", "model=demo-policy", f"trainer.save_freq={STEPS}"]
    return words if hardware == "cpu" else [*words, *SMALL]


def real_size(work: Path, hardware: str, shape: str) -> list[str]:
    """Random weights of that architecture; on a GPU with the settings of `8xh100`. Nothing is saved."""
    words = [f"model={shape}", f"base_model={shape_folder(shape, work / 'models')}", "trainer.save_freq=-1"]
    if hardware == "cpu":
        return ["hardware=cpu", *words]
    if find_spec("flash_attn_2_cuda") is None:
        words.append("+actor_rollout_ref.model.override_config.attn_implementation=drzero_packed")
    return ["hardware=8xh100", "machine.gpus=1", *words]


def drzero(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project, its output passed on and kept."""
    command = [sys.executable, "-m", "drzero.cli", *words]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | environment
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return subprocess.CompletedProcess(command, process.returncode, "".join(lines))


def run_piece(name: str, args: argparse.Namespace) -> Result:
    """Run one piece from its beginning. A failure is a record too."""
    work = args.work.resolve()
    piece, folder, rewards = PIECES[name], work / "checkpoints" / name, work / "rewards" / name
    for stale in (folder, rewards):
        if stale.exists():
            shutil.rmtree(stale)
    words = arguments(name, work, args.hardware, args.batch, args.shape, args.set or [])
    report = preflight(compose_stage(piece.stage, words), piece.stage)
    is_streamed = piece.overrides is STREAMED
    told = streamed_reward.environment(rewards, args.batch or piece.batch) if is_streamed else {}
    ledger, began, started = report.ledger, time.time(), time.monotonic()
    with sampled() as samples:
        done = drzero(piece.stage, *words, **told)
    beats, last = RunRecords(folder).beats, done.stdout.strip().splitlines()[-3:]
    steps = [step for step in read_metrics(folder).values() if is_training(step)] if folder.exists() else []
    return Result(
        piece=name,
        machine=device_name(),
        code=done.returncode,
        seconds=time.monotonic() - started,
        start=next((beat["time"] - began for beat in beats if beat["phase"] == "rollout"), float("nan")),
        peak_gib=peaks(samples, beats),
        ledger_gib={phase: ledger.total(phase) for phase in ledger.phases} if ledger else {},
        estimate=str(report.estimate),
        steps=steps,
        streamed=streamed_reward.tables(rewards, beats) if is_streamed and done.returncode == 0 else "",
        error="" if done.returncode == 0 else "; ".join(map(str.strip, last)) or "no output",
    )


def read_records(folder: Path) -> list[Result]:
    """The results of all pieces that have run. A success counts more than a failure."""
    pairs = ([folder / f"{name}.json", folder / f"{name}.failed.json"] for name in PIECES)
    paths = (next(filter(Path.exists, pair), None) for pair in pairs)
    return [Result(**json.loads(path.read_text())) for path in paths if path]


def page(records: Sequence[Result]) -> str:
    """The tables, in Markdown."""
    first = records[0]
    lines = [
        "# One GPU",
        "",
        f"`python -m bench.gpu`: {first.machine}. The demo world, {STEPS} steps a run,",
        f"{streamed_reward.STEPS} where they take turns; means over all steps but the first.",
        "",
        "| run | "
        + " | ".join([f"{phase}, s" for phase in PHASES] + ["to the first rollout, s", "whole command, s"])
        + " |",
        "|---|" + "---|" * (len(PHASES) + 2),
        *(_row(record, PHASES, f"{record.start:.0f}", f"{record.seconds:.0f}") for record in records),
        "",
        "| run | " + " | ".join(CHECKS) + " |",
        "|---|" + "---|" * len(CHECKS),
        *(_row(record, CHECKS) for record in records),
        "",
        "Most memory in use and the ledger's, GiB:",
        "",
        "| run | " + " | ".join(LEDGER.values()) + " |",
        "|---|" + "---|" * len(LEDGER),
        *(_memory(record) for record in records),
        "",
        *(f"- `{record.piece}`: {record.seconds:.0f} s, estimated {record.estimate}" for record in records),
    ]
    steps = {record.piece: _mean(record, PHASES["step"]) for record in records if record.code == 0}
    for ours, stock in (("reference-solver", "stock-solver"), ("sglang-solver", "sglang-stock-solver")):
        if ours in steps and stock in steps:
            ratio = steps[ours] / steps[stock]
            lines += [
                "",
                f"A step of `{ours}` takes {ratio:.2f} times one of `{stock}`, without our trainer.",
            ]
    for record in records:
        if record.streamed:
            lines += ["", f"`{record.piece}`:", "", record.streamed]
    failed = [f"`{record.piece}` failed: {record.error}" for record in records if record.code]
    return "\n".join([*lines, *(line for text in failed for line in ("", text))]) + "\n"


def _row(record: Result, keys: dict[str, str], *rest: str) -> str:
    cells = [f"{_mean(record, key):.3g}" for key in keys.values()]
    return f"| {record.piece} | " + " | ".join([*cells, *rest]) + " |"


def _memory(record: Result) -> str:
    ledger, nan = record.ledger_gib, float("nan")
    cells = [
        # On a CPU the ledger has one phase.
        f"{record.peak_gib.get(phase, nan):.1f} / {ledger.get(phase, ledger.get('training', nan)):.1f}"
        for phase in LEDGER.values()
    ]
    return f"| {record.piece} | {' | '.join(cells)} |"


def _mean(record: Result, key: str) -> float:
    values = [step[key] for step in record.steps[1:] if key in step]
    return mean(values) if values else float("nan")


def chosen(names: Sequence[str], hardware: str) -> Iterator[str]:
    """The pieces to run. Pieces that cannot run here are skipped with a message."""
    for name in names or PIECES:
        if PIECES[name].engine == "sglang" and find_spec("sglang") is None:
            print(f"{name}: SGLang is not installed here")
        elif PIECES[name].overrides is STOCK and hardware == "cpu":
            print(f"{name}: stock veRL has no worker for a CPU")
        else:
            yield name


def main() -> int:
    """Run unfinished pieces, and write the page. Returns 1 if a piece failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pieces", nargs="*", choices=[[], *PIECES], help="default: all")
    parser.add_argument("--work", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--hardware", default="single_gpu", choices=("single_gpu", "cpu"))
    parser.add_argument("--batch", type=int, help="prompts a step; default: the piece's own")
    parser.add_argument(
        "--shape",
        default="qwen2.5-3b",
        choices=sorted(SHAPES.keys() & options("model")),
        help="the architecture of a model of real size",
    )
    parser.add_argument("--set", action="append", help="one more override; repeatable")
    parser.add_argument("--page", type=Path, help="write the tables here, e.g. outputs/gpu/page.md")
    args = parser.parse_args()
    work = args.work.resolve()
    records = work / "records"
    records.mkdir(parents=True, exist_ok=True)
    pieces = list(chosen(args.pieces, args.hardware))
    if not pieces:
        return 1
    if not (work / "checkpoints" / "synthesize_iter1" / VAL).exists():
        prepare(work)
    for name in pieces:
        path = records / f"{name}.json"
        if not path.exists():
            record = run_piece(name, args)
            # A failed piece is run again by the next call.
            where = path if record.code == 0 else path.with_suffix(".failed.json")
            atomic_write(where, json.dumps(asdict(record)))
    found = read_records(records)
    text = page(found)
    print(text)
    if args.page:
        atomic_write(args.page, text)
    return int(any(record.code for record in found))


if __name__ == "__main__":
    sys.exit(main())
