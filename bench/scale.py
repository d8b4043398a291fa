"""Simulate runs from 1 to 64 GPUs and indices from 10⁴ to 10⁸ passages, and name their limits.

    python -m bench.scale                                    # the tables of docs/scale.md
    python -m bench.scale --run outputs/checkpoints/demo     # a run of this machine, next to its simulation

It needs no GPU. Steps come from preflight's estimate (`drzero.preflight.cost`), indices from
`search.indexing.size`. Scale adds more: rollouts wait for their longest conversation, machines exchange
weights over a network, and searches need a fast enough service. Every number is a range, from the assumptions
below. Tables show its geometric mean and its ends.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from omegaconf import DictConfig, OmegaConf

from bench.gates import replace_section
from drzero.preflight.batch import longest_row
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.cost import STARTUP_S, Range, hours, step_parts
from drzero.preflight.index_size import CORE_SPEEDS, GPU_SHARES
from drzero.preflight.machine import declared_machine
from drzero.preflight.memory import stage_ledger
from drzero.preflight.model_shape import ModelShape
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.gpu_prices import GPUS
from drzero.recipe.metrics import read_metrics
from search.indexing.size import TOKEN_BYTES, IndexSize

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
TITLE = "## From 1 to 64 GPUs, from 10⁴ to 10⁸ passages"
INTRODUCTION = (
    "`python -m bench.scale --write`: arithmetic for H100s and the default model at the paper's sizes (256\n"
    "questions a step, groups of 5), eight GPUs a machine. The middle of a range, and in brackets its ends."
)
GPU_COUNTS = (1, 8, 64)
PASSAGE_COUNTS = (10**4, 10**5, 10**6, 21 * 10**6, 10**8)
MACHINE_GPUS = 8
"""GPUs per machine."""
PARTS = ("rollouts", "attempts", "update")
"""The parts of a step that depend on the number of GPUs."""

MEMORY_BANDWIDTH = np.array((2.0e12, 0.8e12))
"""Bytes a second at which an H100 reads weights to generate one token: 60 % and 25 % of its 3.35 TB/s."""
NETWORK = np.array((40e9, 10e9))
"""Bytes a second of a GPU to other machines: of a 400 Gbit/s port for each, and of one that four share."""
SEARCHES = np.array((1.0, 2.5))
"""Searches of a conversation: the demo's solver makes one at one hop, and two at two."""
PASSAGE_BYTES = 650
"""Text of a passage of 100 words, as Wikipedia's are."""
DIMENSION, EMBEDDER_OPERATIONS = 1024, 2 * 303_000_000
"""Of intfloat/e5-large-v2: numbers a vector, and operations a token, two for each of its layers' weights."""
QUERY_TOKENS = 24
INDEX_S = np.array((1.1e-3, 2.3e-3))
"""Core seconds of Chroma for a query of 384 numbers among 20,000 vectors, in batches and one by one
(bench/README.md, Retrieval)."""
INDEX_VECTORS, INDEX_DIMENSION = 20_000, 384
SERVICE_CORES = 16
"""Cores that a run's machine leaves to the index, of 32."""
HOST_GIB = 336.0
"""Memory of the declared machine (config/compute/8xh100.yaml)."""
RUN_GIB = 150.0
"""Of that, for a run's own processes and offloaded state (docs/preflight.md)."""


@dataclass(frozen=True)
class Step:
    """A step of one stage on so many GPUs: seconds by part, and what sets them."""

    stage: str
    gpus: int
    parts: dict[str, Range]
    limits: dict[str, str]
    """For each part what it waits for."""
    searches: Range
    gpu_gib: float
    """Memory of the fullest GPU in its fullest phase, by preflight's ledger."""
    usd_per_hour: float

    @property
    def seconds(self) -> Range:
        """All parts in sequence."""
        return sum(self.parts.values(), np.zeros(2))

    @property
    def bottleneck(self) -> str:
        """The longest part, and what it waits for."""
        part = max(self.parts, key=lambda name: middle(self.parts[name]))
        return f"{part}: {self.limits[part]}"

    @property
    def usd(self) -> Range:
        """Of the machines while it lasts."""
        return self.seconds / 3600 * self.usd_per_hour


def middle(of: Range) -> float:
    """The geometric mean of the ends."""
    return float(np.sqrt(of[0] * of[1]))


def context(stage: str, gpus: int, overrides: Sequence[str] = ()) -> CheckContext:
    """A stage of the paper's size under preflight, on so many H100s."""
    nodes, of_one = max(1, gpus // MACHINE_GPUS), min(gpus, MACHINE_GPUS)
    pool = f"trainer.n_gpus_per_node={of_one}"
    config = resolve(compose_stage(stage, ["hardware=8xh100", "compute=8xh100", pool, *overrides]))
    declared = declared_machine(config, starting=False)
    price = declared.usd_per_hour * gpus / MACHINE_GPUS
    machine = replace(declared, gpus=of_one, nodes=nodes, usd_per_hour=price)
    return CheckContext(config, stage, machine, starting=False, ahead=False, readings=Readings())


def simulate(stage: str, gpus: int) -> Step:
    """A step of a stage on so many GPUs."""
    ctx = context(stage, gpus)
    parts, ledger, policy = step_parts(ctx), stage_ledger(ctx), ctx.shape(ctx.config.base_model)
    assert parts is not None and ledger is not None and policy is not None, "a model of the group model/"
    config = ctx.config
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    limits = {"rollouts": "operations", "attempts": "operations", "update": "operations", "rest": "fixed"}
    lengths = {"rollouts": config.data.max_response_length, "attempts": config.solver.max_context_tokens}
    for part in ("rollouts", "attempts"):
        longest = longest_conversation(policy, lengths[part])
        if part in parts and middle(longest) > middle(parts[part]):
            parts[part], limits[part] = longest, "the longest conversation"
    if ctx.machine.nodes > 1:
        tokens = rows / gpus * longest_row(config)
        micro_batches = max(1, tokens / config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu)
        exchange = micro_batches * 3 * 2 * policy.parameters / NETWORK
        if middle(exchange) > middle(parts["update"]):
            limits["update"] = "the network between machines"
        parts["update"] = np.maximum(parts["update"], exchange)
    conversations = rows + (
        config.data.train_batch_size * config.solver.attempts if "attempts" in parts else 0
    )
    memory = ledger.total(ledger.worst)
    return Step(stage, gpus, parts, limits, SEARCHES * conversations, memory, ctx.machine.usd_per_hour)


def longest_conversation(shape: ModelShape, tokens: int) -> Range:
    """Seconds of a conversation of full length by itself: each token reads all weights, in bfloat16."""
    return tokens * 2 * shape.parameters / MEMORY_BANDWIDTH


@dataclass(frozen=True)
class Index:
    """An index of so many passages, and a service of it on a run's machine."""

    passages: int

    @property
    def size(self) -> IndexSize:
        """Its memory and disk."""
        return IndexSize(self.passages, DIMENSION, self.passages * PASSAGE_BYTES)

    @property
    def embedding_gpu_seconds(self) -> Range:
        """Seconds of one H100 for all passages."""
        tokens = self.passages * PASSAGE_BYTES / TOKEN_BYTES
        return tokens * EMBEDDER_OPERATIONS / (np.array(GPU_SHARES) * GPUS["H100"].bf16_tflops * 1e12)

    @property
    def embedding_core_seconds(self) -> Range:
        """Seconds of one core for all passages."""
        return self.passages * PASSAGE_BYTES / TOKEN_BYTES * EMBEDDER_OPERATIONS / np.array(CORE_SPEEDS)

    @property
    def graph_seconds(self) -> Range:
        """Seconds of two cores that insert the vectors."""
        return np.array(self.size.graph_seconds)

    @property
    def queries_per_second(self) -> Range:
        """What SERVICE_CORES answer, fast first: a query costs more by the depth of the graph's search."""
        depth = np.log(self.passages) / np.log(INDEX_VECTORS)
        return SERVICE_CORES / (INDEX_S * depth * DIMENSION / INDEX_DIMENSION)

    @property
    def machine(self) -> str:
        """The machine that serves it."""
        needed = self.size.serving_bytes / 2**30
        if needed < HOST_GIB - RUN_GIB:
            return "the run's own"
        return f"one of {2 ** int(np.ceil(np.log2(1.25 * needed))):,} GiB, or shards"


def queries_needed(step: Step) -> Range:
    """Queries a second while conversations are played."""
    playing = step.parts["rollouts"] + step.parts.get("attempts", np.zeros(2))
    return step.searches / playing[::-1]


def steps_table(steps: Sequence[Step], total: int) -> str:
    """Markdown: one row for a stage and a number of GPUs."""
    lines = [
        "| stage | GPUs | GiB a GPU | a step, s | rollouts | attempts | update | searches/s | $ a step | "
        f"{total} steps | longest part |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        whole = STARTUP_S + total * step.seconds
        cells = [
            step.stage,
            str(step.gpus),
            f"{step.gpu_gib:.0f}" + (" (too much)" if step.gpu_gib > GPUS["H100"].memory_gib else ""),
            spread(step.seconds),
            *(f"{middle(step.parts[name]):.0f}" if name in step.parts else "–" for name in PARTS),
            spread(queries_needed(step)),
            f"{middle(step.usd):.2f}",
            f"{hours(middle(whole))}, ${middle(whole) / 3600 * step.usd_per_hour:,.0f}",
            step.bottleneck,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def index_table(indices: Iterable[Index], busiest: float) -> str:
    """Markdown, a row per number of passages. A run on 8 GPUs sends `busiest` queries a second."""
    lines = [
        "| passages | memory to serve, GiB | served by | embedding, 8×H100 | embedding, 32 cores | "
        "graph, two cores | queries/s it answers | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for index in indices:
        gpu, core = index.embedding_gpu_seconds / 8, index.embedding_core_seconds / 32
        answered = index.queries_per_second
        cells = [
            f"{index.passages:,}",
            f"{index.size.serving_bytes / 2**30:,.1f}",
            index.machine,
            hours(middle(gpu)),
            hours(middle(core)),
            hours(middle(index.graph_seconds)),
            spread(answered[::-1]),
            limit_of(index, busiest),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def limit_of(index: Index, busiest: float) -> str:
    """What stands in the way first at this size."""
    if index.machine != "the run's own":
        return "memory of the service"
    if middle(index.queries_per_second) < busiest:
        return "queries a second"
    return "the graph's two cores" if middle(index.graph_seconds) > 3600 else "none"


def spread(of: Range) -> str:
    """Middle and ends, as whole numbers."""
    return f"{middle(of):,.0f} ({of[0]:,.0f}–{of[1]:,.0f})"


def compare_run(folder: Path) -> str:
    """Markdown: the median parts of a run's steps, next to the simulation for its config and machine."""
    config = cast(DictConfig, OmegaConf.load(folder / "resolved.yaml"))
    stage = "solver" if config.method == "grpo" else "challenger"
    machine = declared_machine(config, starting=True)
    ctx = CheckContext(config, stage, machine, starting=True, ahead=False, readings=Readings())
    parts = step_parts(ctx)
    assert parts is not None
    measured = [step for step in read_metrics(folder).values() if "timing_s/step" in step]
    simulated = {
        "timing_s/gen": parts["rollouts"] + parts.get("attempts", np.zeros(2)),
        "timing_s/update_actor": parts["update"],
        "timing_s/step": sum(parts.values(), np.zeros(2)),
    }
    lines = ["| part | measured, s | simulated, s |", "|---|---|---|"]
    for name, expected in simulated.items():
        seconds = [step[name] for step in measured if name in step]
        shown = f"{np.median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})" if seconds else "–"
        lines.append(f"| {name.removeprefix('timing_s/')} | {shown} | {spread(expected)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables, or write them into docs/scale.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run folder of a training stage, to compare with")
    parser.add_argument("--write", action="store_true", help="into docs/scale.md")
    asked = parser.parse_args()
    if asked.run is not None:
        print(compare_run(asked.run))
        return
    total = int(context("challenger", MACHINE_GPUS).config.steps_per_iteration)
    steps = [simulate(stage, gpus) for stage in ("challenger", "solver") for gpus in GPU_COUNTS]
    busiest = max(middle(queries_needed(step)) for step in steps if step.gpus == MACHINE_GPUS)
    indices = [Index(passages) for passages in PASSAGE_COUNTS]
    text = f"{steps_table(steps, total)}\n\n{index_table(indices, busiest)}\n"
    print(text)
    if asked.write:
        PAGE.write_text(replace_section(PAGE.read_text(), TITLE, f"{INTRODUCTION}\n\n{text}"))


if __name__ == "__main__":
    main()
