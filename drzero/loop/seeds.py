"""The same loop with several training seeds, one after another.

A seed orders the data of challenger and solver, and draws the conversations they learn from. Everything else
is shared. Each seed has a loop in `paths.checkpoints`/seedN.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from drzero.loop.plan import compose_loop, plan_loop, take_option
from drzero.loop.report import print_seeds, read_answers
from drzero.ops.console import say
from drzero.ops.errors import RunFailed
from drzero.ops.files import atomic_write
from drzero.recipe.compose import compose_stage
from drzero.recipe.errors import CheckError
from drzero.recipe.overrides import assigned
from drzero.stages.evaluate import ANSWERS
from drzero.stages.result import RESULT

_BASE = "evaluate_iter0"


class SeedsFailed(RunFailed):
    """The loops of some seeds have failed. The others are finished."""


def split_seeds(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number after `--seeds`, None without it, and the other arguments. Raises CheckError."""
    count, rest = take_option(arguments, "--seeds")
    if count is None:
        return None, rest
    if not count.isdecimal() or int(count) < 1:
        raise CheckError(f"--seeds {count}: it needs a number of at least 1, for example --seeds 3")
    if take_option(rest, "--from")[0] is not None:
        raise CheckError(
            "--from redoes a stage of one loop: without --seeds, and with the overrides of that seed, which "
            "the start of its loop prints"
        )
    return int(count), rest


def seed_folders(root: Path, count: int) -> dict[int, Path]:
    """The folder of each seed's loop, below the one for all."""
    return {seed: root / f"seed{seed}" for seed in range(1, count + 1)}


def run_seeds(count: int, overrides: Sequence[str], run_loop: Callable[[Sequence[str]], None]) -> None:
    """Run or resume the loops of seeds 1 to `count`. If loops fail, raises SeedsFailed after the others."""
    first = plan_loop(compose_loop(overrides))[0]
    folders = seed_folders(Path(compose_stage(first.stage, first.overrides).paths.checkpoints), count)
    failed: dict[int, RunFailed] = {}
    for seed, folder in folders.items():
        own = seed_overrides(folder, seed)
        say("evolve", f"seed {seed} of {count}: {' '.join(own)}")
        if seed > 1:
            share_base(folders[1], folder)
        try:
            run_loop([*overrides, *own])
        except RunFailed as error:
            failed[seed] = error
            say("evolve", f"seed {seed} failed: {error}")
    print_seeds({seed: read_answers(folder) for seed, folder in folders.items()})
    if failed:
        reasons = "; ".join(f"seed {seed}: {str(error).splitlines()[0]}" for seed, error in failed.items())
        raise SeedsFailed(f"{len(failed)} of {count} seeds failed. {reasons}. Rerun to resume these")


def seed_overrides(folder: Path, seed: int) -> list[str]:
    """The overrides of one seed's loop."""
    return [
        assigned("paths.checkpoints", str(folder)),
        *(f"stages.{stage}.data.seed={seed}" for stage in ("challenger", "synthesize", "solver")),
        *(f"stages.{stage}.actor_rollout_ref.rollout.seed={seed}" for stage in ("challenger", "solver")),
    ]


def share_base(source: Path, target: Path) -> None:
    """Copy the base model's answers, only if finished: the last line of others may be half written."""
    answers, copy = (folder / _BASE / ANSWERS for folder in (source, target))
    if (source / _BASE / RESULT).is_file() and not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(copy, answers.read_text(encoding="utf-8"))
