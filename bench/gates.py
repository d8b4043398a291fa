"""How many planted faults each gate catches, and how many clean pairs it refuses.

    python -m bench.gates

Prints the table and writes it into bench/README.md, with one row for all faults that a gate catches whole.
bench/planted_faults.py and planted_wording.py plant the faults, and mark as "beyond" the ones that a gate
cannot see.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.machine import machine
from bench.planted_faults import FAULTS, FILE_FAULTS, Clean, Fault, clean_pairs, damaged
from bench.planted_wording import ORDINARY, WORDING_FAULTS
from data.benchmarks import BenchmarkQuestion
from data.demo_world import Chain, generate_world
from data.duplicates import Embed
from data.errors import PairingError
from data.gates import Gates, GateSettings
from data.pairs import Pair
from data.parquet_io import TRAINING_SCHEMA, read_parquet
from data.selection import prompts_by_index
from data.solver_rows import check_pairing, write_solver_split
from search.embedders import PACKAGED_EMBEDDER, Embedder, EmbedderSpec
from verl_ext.method.prompts import solver_messages

ALL_FAULTS = (*FAULTS, *WORDING_FAULTS)
README = Path(__file__).parent / "README.md"
TITLE = "## Gates"
PAIRING = "pairing"


@dataclass(frozen=True)
class Measured:
    """One line of the table."""

    gate: str
    fault: str
    visible: bool
    planted: int
    caught: int


def benchmark(chains: Sequence[Chain]) -> list[BenchmarkQuestion]:
    """The chains as benchmark questions."""
    return [BenchmarkQuestion("demo", each.id, each.question, (each.answer,), each.hop) for each in chains]


def gates_for(clean: Clean, embed: Embed, cosine: float | None = None) -> Gates:
    """All gates, with the clean pairs' own questions as the benchmark."""
    settings = GateSettings(near_duplicate_cosine=cosine)
    return Gates(settings, embed=embed, benchmark_questions=benchmark(clean.chains))


def count_caught(gates: Gates, gate: str, pairs: Sequence[Pair], before: Sequence[Pair]) -> int:
    """Return how many of `pairs` the gate refuses, after the accepted pairs `before`."""
    if gate in gates.per_pair:
        return sum(gates.per_pair[gate](pair) is not None for pair in pairs)
    accepted = gates.accepted([*before, *pairs])
    for pair in before:
        accepted.add(pair)
    return sum(gates.across_pairs[gate](pair, accepted) is not None for pair in pairs)


def measure_fault(fault: Fault, clean: Clean, gates: Gates, seed: int) -> Measured:
    """Plant one kind of fault in every pair that it applies to."""
    planted = fault.plant(clean, seed)
    caught = count_caught(gates, fault.gate, planted, clean.pairs)
    return Measured(fault.gate, fault.name, fault.visible, len(planted), caught)


def measure_pairing(clean: Clean, folder: Path, trials: int, seed: int) -> tuple[list[Measured], int]:
    """Damage a written file in each way, `trials` times, and count false alarms on the clean file."""
    split = write_solver_split(
        clean.pairs, clean.prompts, folder, prompt_form="short", generator_checkpoint="demo", seed=seed
    )
    rows = read_parquet(split.train_path).to_pylist()
    written = {row["extra_info"]["index"] for row in rows}
    check = partial(
        check_pairing,
        pairs=[pair for pair in clean.pairs if pair.prompt_index in written],
        prompts=prompts_by_index(clean.prompts),
        ask=partial(solver_messages, form="short"),
        split="train",
        generator_checkpoint="demo",
    )

    def refused(path: Path) -> bool:
        try:
            check(path)
        except PairingError:
            return True
        return False

    lines = []
    for name, fault in FILE_FAULTS.items():
        caught = 0
        for number, changed in enumerate(damaged(rows, fault, trials, seed)):
            path = folder / f"damaged{number}.parquet"
            pq.write_table(pa.Table.from_pylist(changed, schema=TRAINING_SCHEMA), path)
            caught += refused(path)
        lines.append(Measured(PAIRING, name, True, trials, caught))
    return lines, int(refused(split.train_path))


def false_alarms(clean: Clean, gates: Gates, foreign: Gates) -> dict[str, int]:
    """Count the clean pairs that each gate refuses. `foreign` has another world's questions as benchmark."""
    alarms = {name: count_caught(foreign, name, clean.pairs, []) for name in foreign.per_pair}
    for name in gates.across_pairs:
        accepted, refused = gates.accepted(clean.pairs), 0
        for pair in clean.pairs:
            refused += gates.across_pairs[name](pair, accepted) is not None
            accepted.add(pair)
        alarms[name] = refused
    return alarms


def refused_ordinary(clean: Clean, gates: Gates) -> list[str]:
    """The questions of `ORDINARY` that the gate integrity refuses."""
    gate = gates.per_pair["integrity"]
    pairs = [replace(clean.pairs[0], question=question, answer=answer) for question, answer in ORDINARY]
    return [pair.question for pair in pairs if gate(pair)]


def table(lines: Sequence[Measured], alarms: dict[str, str]) -> Iterator[str]:
    """Markdown, with one row for the faults that a gate catches whole. Its first row has its false alarms."""
    yield "| gate | planted fault | planted | caught | catch rate | false alarms on clean pairs |"
    yield "|---|---|---|---|---|---|"
    shown = []
    for gate in dict.fromkeys(line.gate for line in lines):
        caught = [line for line in lines if line.gate == gate and line.caught == line.planted]
        total = sum(line.planted for line in caught)
        if caught:
            shown.append(Measured(gate, f"{len(caught)} kinds", True, total, total))
        shown += [line for line in lines if line.gate == gate and line.caught < line.planted]
    seen: set[str] = set()
    for line in shown:
        alarm = "" if line.gate in seen else alarms[line.gate]
        seen.add(line.gate)
        beyond = "" if line.visible else " (beyond)"
        rate = f"{line.caught / line.planted:.1%}"
        yield f"| {line.gate} | {line.fault}{beyond} | {line.planted} | {line.caught} | {rate} | {alarm} |"


def replace_section(readme: str, title: str, body: str) -> str:
    """The README's text with the section of that title replaced, or appended."""
    before, found, after = readme.partition(f"{title}\n")
    following = after.partition("\n## ")
    rest = f"\n## {following[2]}" if found and following[1] else ""
    return f"{before.rstrip()}\n\n{title}\n\n{body}\n{rest}".lstrip()


def measure(per_hop: int, trials: int, seed: int) -> str:
    """The text of the section."""
    embedder = Embedder(EmbedderSpec(PACKAGED_EMBEDDER, "cpu"))
    clean = clean_pairs(seed, per_hop)
    gates = gates_for(clean, embedder.encode_queries)
    world = generate_world(seed, "run", chains_per_hop=per_hop)
    foreign = Gates(GateSettings(near_duplicates=False), benchmark_questions=benchmark(world.chains))
    order = [*gates.per_pair, *gates.across_pairs]
    by_gate = sorted(ALL_FAULTS, key=lambda fault: order.index(fault.gate))
    lines = [measure_fault(fault, clean, gates, seed) for fault in by_gate]
    with tempfile.TemporaryDirectory() as folder:
        file_lines, file_alarms = measure_pairing(clean, Path(folder), trials, seed)
    alarms = {
        gate: f"{refused} of {len(clean.pairs)}"
        for gate, refused in false_alarms(clean, gates, foreign).items()
    } | {PAIRING: f"{file_alarms} of 1 file"}
    refused = refused_ordinary(clean, gates)
    alarms["integrity"] += f", {len(refused)} of {len(ORDINARY)} ordinary"
    about = (
        f"`python -m bench.gates`, {machine()}: faults planted into {len(clean.pairs)} clean pairs of a "
        f"demo world, {per_hop} of each of 1 to 4 hops (seed {seed}), and {trials} times into a file. "
        f"Near-duplicates by {PACKAGED_EMBEDDER} from a cosine of {gates.near_duplicate_cosine:.3f}, "
        'measured on another world. "Beyond" marks faults that the gate cannot see.'
    )
    return "\n".join([about, "", *table([*lines, *file_lines], alarms), "", NOTES])


NOTES = (
    "Contamination's false alarms are counted against the questions of another world, the hardest case: "
    "all demo questions share a few phrasings. A wrong answer that occurs in the passage passes every gate, "
    "but no solver attempt agrees with it, so the challenger's reward for difficulty is 0. The ordinary "
    "questions and planted wordings were written next to the gates' patterns. Expect other wordings to be "
    "caught less often, and other good questions refused."
)


def main() -> None:
    """Measure, print, and write the section into bench/README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--per-hop", type=int, default=100, help="clean pairs of each hop count")
    parser.add_argument("--trials", type=int, default=50, help="damaged files of each kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    section = measure(args.per_hop, args.trials, args.seed)
    print(section)
    README.write_text(replace_section(README.read_text(encoding="utf-8"), TITLE, section), encoding="utf-8")


if __name__ == "__main__":
    main()
