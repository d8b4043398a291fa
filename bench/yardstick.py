"""Compares the loop with gold questions, and with an untrained challenger, at equally many updates.

    drzero evolve loop=demo --seeds 3 paths.checkpoints=outputs/yardstick/loop
    python -m bench.yardstick gold outputs/yardstick/gold --seeds 3
    python -m bench.yardstick untrained outputs/yardstick/untrained --seeds 3
    python -m bench.learning outputs/yardstick/{loop,untrained,gold} --out docs/learning.png

Every stage is the one of `loop=demo` with the same seeds, so each arm's solver makes equally many updates.
Only its questions differ. In `untrained` the base model asks them. In `gold` they are the demo world's own,
about the documents and for the hop counts of the same prompts. Further arguments are the loop's. Rerun to
resume. A seed takes about 20 minutes an iteration on two cores.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from data.demo_world import Chain, World, chain_leaks, chain_of, generate_world, walks_of
from data.pairs import Pair
from data.solver_rows import TRAIN, write_solver_split
from drzero.loop.plan import StageRun, compose_loop, plan_loop
from drzero.loop.seeds import seed_overrides, share_base
from drzero.preflight.inputs import partition_rows
from drzero.recipe.compose import compose_stage
from drzero.stages.demo import EVALUATION_SHARE, WORLD_SEED, prepare_demo
from drzero.stages.result import RESULT
from verl_ext.method.trajectory import Trajectory, Turn

ARMS = ("gold", "untrained")


def run_arm(arm: str, root: Path, seeds: int, overrides: Sequence[str]) -> None:
    """Run or resume the stages of every seed, each in `root`/seedN."""
    prepare_demo()
    for seed in range(1, seeds + 1):
        folder = root / f"seed{seed}"
        (folder / "evolve").mkdir(parents=True, exist_ok=True)  # by which bench.learning finds a seed
        if seed > 1:
            share_base(root / "seed1", folder)
        for run in plan_loop(compose_loop(["loop=demo", *overrides, *seed_overrides(folder, seed)])):
            run_stage(arm, run)


def run_stage(arm: str, run: StageRun) -> None:
    """Run a stage, unless it is finished or the arm has none."""
    own = list(run.overrides)
    if run.stage == "challenger":
        return
    if run.stage == "synthesize" and arm == "untrained":
        own.append("challenger=${base_model}")
    config = compose_stage(run.stage, own)
    if run.stage == "synthesize" and arm == "gold":
        write_gold(config)
    elif not (Path(config.run.dir) / RESULT).is_file():
        subprocess.run([sys.executable, "-m", "drzero.cli", run.stage, *own], check=True)


def write_gold(config: DictConfig) -> None:
    """Write one gold pair for each prompt of a synthesize stage's partition that has one."""
    folder = Path(config.run.dir)
    if (folder / TRAIN).is_file():
        return
    world = generate_world(WORLD_SEED, "run", chain_share=EVALUATION_SHARE)
    rng = random.Random(f"gold/{config.data.seed}/{config.partition}")
    rows, used = partition_rows(config), set[str]()
    pairs: list[Pair] = []
    for row in rows:
        about = row["extra_info"]
        if chain := gold_chain(world, about["doc_id"], about["hop"], used, rng):
            used.add(chain.question)
            said = f"<question>{chain.question}</question>\n<answer>{chain.answer}</answer>"
            source = [about[name] for name in ("hop", "doc_id", "document")]
            asked = Trajectory((Turn(said),))
            pairs.append(Pair(about["index"], 0, 0, *source, chain.question, chain.answer, asked, 1.0))
    write_solver_split(
        pairs,
        rows,
        folder,
        prompt_form=config.prompts.form,
        max_turns=config.rollout.max_turns,
        generator_checkpoint="gold",
        seed=config.data.seed,
    )


def gold_chain(world: World, doc_id: str, hop: int, used: set[str], rng: random.Random) -> Chain | None:
    """A chain from a document without a shortcut, whose question is not used yet. None if it has none."""
    walks = list(walks_of(world, doc_id, hop))
    for walk in rng.sample(walks, len(walks)):
        chain = chain_of(world, walk, f"gold-{doc_id}", rng)
        if chain.question not in used and not chain_leaks(chain, world):
            return chain
    return None


def main() -> None:
    """Run one arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given, overrides = parser.parse_known_args()
    run_arm(given.arm, given.folder, given.seeds, overrides)


if __name__ == "__main__":
    main()
