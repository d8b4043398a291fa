"""Compares the loop with gold questions, and with an untrained challenger, at equally many updates.

    drzero evolve loop=demo --seeds 3 paths.checkpoints=outputs/yardstick/loop
    python -m bench.yardstick gold outputs/yardstick/gold --seeds 3
    python -m bench.yardstick untrained outputs/yardstick/untrained --seeds 3
    python -m bench.learning outputs/yardstick/{loop,untrained,gold} --out docs/learning.png

Every stage is the one of `loop=demo` with the same seeds, so each arm's solver makes equally many updates.
Only its questions differ. In `untrained` the base model asks them. In `gold` they are the demo world's own,
about the documents and for the hop counts of the same prompts. `--packages` asks about a corpus of
examples/package_corpus.py instead. Further arguments are the loop's. Rerun to resume. A seed takes about 20
minutes an iteration on two cores.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from data.demo_world import chain_leaks, chain_of, generate_world, walks_of
from data.pairs import Pair
from data.solver_rows import TRAIN, write_solver_split
from drzero.loop.plan import StageRun, compose_loop, plan_loop
from drzero.loop.seeds import seed_overrides, share_base
from drzero.ops.records import read_json_lines
from drzero.preflight.inputs import partition_rows
from drzero.recipe.compose import compose_stage
from drzero.stages.demo import EVALUATION_SHARE, WORLD_SEED, prepare_demo
from drzero.stages.result import RESULT
from examples.package_language import REQUIRES, ask, facts_in
from verl_ext.method.answers import contains_answer
from verl_ext.method.trajectory import Trajectory, Turn

ARMS = ("gold", "untrained")
Gold = Callable[[Mapping[str, Any], random.Random], Iterator[tuple[str, str]]]
"""Gives questions about a prompt's document with their answers, in random order."""


def run_arm(arm: str, root: Path, seeds: int, packages: Path | None, overrides: Sequence[str]) -> None:
    """Run or resume the stages of every seed, each in `root`/seedN."""
    if packages is None:
        prepare_demo()
    for seed in range(1, seeds + 1):
        folder = root / f"seed{seed}"
        (folder / "evolve").mkdir(parents=True, exist_ok=True)  # by which bench.learning finds a seed
        if seed > 1:
            share_base(root / "seed1", folder)
        for run in plan_loop(compose_loop(["loop=demo", *overrides, *seed_overrides(folder, seed)])):
            run_stage(arm, run, packages)


def run_stage(arm: str, run: StageRun, packages: Path | None) -> None:
    """Run a stage, unless it is finished or the arm has none."""
    own = list(run.overrides)
    if run.stage == "challenger":
        return
    if run.stage == "synthesize" and arm == "untrained":
        own.append("challenger=${base_model}")
    config = compose_stage(run.stage, own)
    if run.stage == "synthesize" and arm == "gold":
        write_gold(config, of_packages(packages) if packages else of_world())
    elif not (Path(config.run.dir) / RESULT).is_file():
        subprocess.run([sys.executable, "-m", "drzero.cli", run.stage, *own], check=True)


def write_gold(config: DictConfig, gold: Gold) -> None:
    """Write one gold pair for each prompt of a synthesize stage's partition that has one."""
    folder = Path(config.run.dir)
    if (folder / TRAIN).is_file():
        return
    rng = random.Random(f"gold/{config.data.seed}/{config.partition}")
    rows, used = partition_rows(config), set[str]()
    pairs: list[Pair] = []
    for row in rows:
        about = row["extra_info"]
        if fresh := next((pair for pair in gold(about, rng) if pair[0] not in used), None):
            question, answer = fresh
            used.add(question)
            said = f"<question>{question}</question>\n<answer>{answer}</answer>"
            asked = Trajectory((Turn(said),))
            source = about["hop"], about["doc_id"], about["document"]
            pairs.append(Pair(about["index"], 0, 0, *source, question, answer, asked, format_score=1.0))
    write_solver_split(
        pairs,
        rows,
        folder,
        prompt_form=config.prompts.form,
        max_turns=config.rollout.max_turns,
        generator_checkpoint="gold",
        seed=config.data.seed,
    )


def of_world() -> Gold:
    """The demo world's questions that no shortcut answers."""
    world = generate_world(WORLD_SEED, "run", chain_share=EVALUATION_SHARE)

    def gold(about: Mapping[str, Any], rng: random.Random) -> Iterator[tuple[str, str]]:
        walks = list(walks_of(world, about["doc_id"], about["hop"]))
        for walk in rng.sample(walks, len(walks)):
            chain = chain_of(world, walk, f"gold-{about['doc_id']}", rng)
            if not chain_leaks(chain, world):
                yield chain.question, chain.answer

    return gold


def of_packages(corpus: Path) -> Gold:
    """The facts that a package corpus states, asked for over first requirements."""
    documents = list(read_json_lines(corpus))
    facts = {one["title"]: facts_in(one["text"]) for one in documents}
    titles = {one["id"]: one["title"] for one in documents}

    def gold(about: Mapping[str, Any], rng: random.Random) -> Iterator[tuple[str, str]]:
        path = [titles[about["doc_id"]]]
        while len(path) < about["hop"] and (needed := facts[path[-1]].get(REQUIRES)):
            path.append(needed)
        if len(path) < about["hop"]:
            return
        shown = about["document"] if len(path) > 1 else ""  # which answers a question of one hop
        hops = (REQUIRES,) * (len(path) - 1)
        stated = list(facts[path[-1]].items())
        for name, value in rng.sample(stated, len(stated)):
            if not contains_answer(shown, value):
                yield ask(path[0], (*hops, name), rng), value

    return gold


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--packages", type=Path, help="the JSONL file of a package corpus")
    given, overrides = parser.parse_known_args()
    run_arm(given.arm, given.folder, given.seeds, given.packages, overrides)


if __name__ == "__main__":
    main()
