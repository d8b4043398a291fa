"""The same loop with several training seeds, one after another.

A seed orders the data of challenger and solver and draws the conversations that they learn from. Corpus,
prompts and the questions of the evaluation are the same for all, and so is the base model, which is evaluated
once. Each seed has a loop of its own in `paths.checkpoints`/seedN, which resumes as any loop does.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from drzero.loop.plan import compose_loop, plan_loop
from drzero.loop.score_report import print_seeds, read_answers
from drzero.ops.console import say
from drzero.ops.errors import RunFailed
from drzero.ops.files import atomic_write
from drzero.recipe.compose import compose_stage
from drzero.recipe.errors import CheckError
from drzero.stages.result import RESULT
from drzero.stages.scores import ANSWERS

_BASE = "evaluate_iter0"


class SeedsFailed(RunFailed):
    """The loops of some seeds have failed; the others are finished."""


def split_seeds(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number after `--seeds`, None without it, and the other arguments; CheckError if it is none."""
    rest, count = [], None
    words = iter(arguments)
    for word in words:
        if word.partition("=")[0] == "--seeds":
            count = word.partition("=")[2] or next(words, "")
        else:
            rest.append(word)
    if count is None:
        return None, rest
    if not count.isdecimal() or int(count) < 1:
        raise CheckError(f"--seeds {count}: it needs a number of at least 1, for example --seeds 3")
    if any(word.partition("=")[0] == "--from" for word in rest):
        raise CheckError(
            "--from redoes a stage of one loop: without --seeds, and with the overrides of that seed, which "
            "the start of its loop prints"
        )
    return int(count), rest


def run_seeds(count: int, overrides: Sequence[str], run_loop: Callable[[Sequence[str]], None]) -> None:
    """Run or resume the loops of the seeds 1 to `count`, and print what they have in common.

    A loop that fails does not keep the next ones from running; SeedsFailed is raised in the end. Anything
    else that a loop raises ends them all: a mistake, the stop time, Ctrl-C.
    """
    first = plan_loop(compose_loop(overrides))[0]
    root = Path(compose_stage(first.stage, first.overrides).paths.checkpoints)
    failed: dict[int, RunFailed] = {}
    for seed in range(1, count + 1):
        folder = root / f"seed{seed}"
        own = seed_overrides(folder, seed)
        say("evolve", f"seed {seed} of {count}: {' '.join(own)}")
        if seed > 1:
            _share_base(root / "seed1", folder)
        try:
            run_loop([*overrides, *own])
        except RunFailed as error:
            failed[seed] = error
            say("evolve", f"seed {seed} failed: {error}")
    print_seeds({seed: read_answers(root / f"seed{seed}") for seed in range(1, count + 1)})
    if failed:
        reasons = "; ".join(f"seed {seed}: {str(error).splitlines()[0]}" for seed, error in failed.items())
        raise SeedsFailed(f"{len(failed)} of {count} seeds failed. {reasons}. Rerun to resume these")


def seed_overrides(folder: Path, seed: int) -> list[str]:
    """What a seed's loop is given on top of the others' overrides."""
    escaped = str(folder).replace("'", "\\'")
    return [
        f"paths.checkpoints='{escaped}'",
        *(f"stages.{stage}.data.seed={seed}" for stage in ("challenger", "synthesize", "solver")),
        *(f"stages.{stage}.actor_rollout_ref.rollout.seed={seed}" for stage in ("challenger", "solver")),
    ]


def _share_base(source: Path, target: Path) -> None:
    """Begin a loop with the first one's answers of the base model: that stage then finds nothing left to ask.

    The journal refuses them if they are of another model, index or setting. An evaluation that has not ended
    is not copied: its last line may be half written.
    """
    answers, copy = (folder / _BASE / ANSWERS for folder in (source, target))
    if (source / _BASE / RESULT).is_file() and not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(copy, answers.read_text(encoding="utf-8"))
