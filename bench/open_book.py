"""What the gate open_book catches and refuses wrongly, and what it costs; the demo policy is the solver.

    python -m bench.open_book

Clean pairs of the demo world and those of the planted faults that no other gate sees are answered from what
the challenger read, as by `drzero synthesize gates.open_book=true`. The table goes into bench/README.md.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.gates import ALL_FAULTS, README, replace_section
from bench.machine import machine
from bench.planted_faults import clean_pairs
from drzero.recipe.compose import compose_stage, resolve
from drzero.stages.demo import prepare_demo_models
from drzero.stages.open_book import check_open_book
from drzero.stages.services import choose_ports

TITLE = "## The gate open_book"


def measure(per_hop: int, seed: int) -> str:
    """The text of the section."""
    clean = clean_pairs(seed, per_hop)
    groups = {f"clean, hops: {hop}": [p for p in clean.pairs if p.hop == hop] for hop in (1, 2, 3, 4)}
    groups |= {fault.name: fault.plant(clean, seed) for fault in ALL_FAULTS if not fault.visible}
    pairs = [replace(pair, prompt_index=i) for i, pair in enumerate(p for g in groups.values() for p in g)]
    with tempfile.TemporaryDirectory() as folder:
        prepare_demo_models(Path(folder) / "models")
        choices = ["hardware=cpu", "model=demo-policy", "retrieval.embedder=packaged-minilm"]
        paths = [f"paths.corpus={folder}", f"run.dir={folder}/run"]
        config = compose_stage("synthesize", [*choices, *paths])
        choose_ports(config)
        started = time.monotonic()
        found = check_open_book(resolve(config), pairs, {"bench": seed})
        took = time.monotonic() - started
    refused = iter([verdict is not None for verdict in found.verdicts.values()])
    lines = ["| pairs | asked | refused | share |", "|---|---|---|---|"]
    for name, group in groups.items():
        count = sum(next(refused) for _ in group)
        lines.append(f"| {name} | {len(group)} | {count} | {count / len(group):.1%} |")
    calls = len(found.records)
    read, written = (sum(r[key] for r in found.records) / calls for key in ("tokens_in", "tokens_out"))
    about = (
        f"`python -m bench.open_book`, {machine()}: the demo policy answers from what the challenger read, "
        f"as with `gates.open_book=true`. One call a pair, {calls} in {took:.0f} s ({took / calls:.1f} s "
        f"a pair, the server's start included), {read:.0f} tokens read and {written:.0f} written a pair."
    )
    return "\n".join([about, "", *lines, "", NOTES])


NOTES = (
    "The clean pairs that are refused are false alarms: answers that this solver cannot read off the "
    "passages in front of it. The gate is worth its cost where it refuses far fewer of them than of the "
    "planted ones. The demo policy, with 135M parameters, is too weak a reader for that, so the gate is off "
    "by default; look at `open_book` in the report of `synthesize` before you rely on it with another solver."
)


def main() -> None:
    """Measure, print, and write the section into bench/README.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--per-hop", type=int, default=8, help="clean pairs of each hop count")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    section = measure(args.per_hop, args.seed)
    print(section)
    README.write_text(replace_section(README.read_text(encoding="utf-8"), TITLE, section), encoding="utf-8")


if __name__ == "__main__":
    main()
