"""Tasksets of `verifiers` that run without a network, each played with the reference engine: do they, and as
ids?

    drzero demo                         # or anything else that unpacks the small models, once
    python -m bench.verifiers_tasksets --model outputs/corpus/models/demo-policy --episodes 4

Seven games of TextArena through the library's own taskset, and the tasksets that the library tests itself
with: an answer, a conversation with a scripted user, two with tools. The latter are in its source
distribution, which is fetched once. All are played as evaluations are (`verl_ext.episodes`), several episodes
at a time, in one process. The table is Markdown. It says nothing of the library's quality, and of the model's
only what a 135M one can do.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.machine import machine
from drzero.ops.versions import pinned
from environments.registry import find
from environments.taskset import Taskset
from verl_ext.engine.engine import ReferenceEngine
from verl_ext.engine.loading import eos_token_ids, load_model
from verl_ext.engine.sampling import SamplingParams
from verl_ext.episodes import EpisodeLimits, Played, Sampled, play_row

LIMITS = EpisodeLimits(prompt_tokens=1500, response_tokens=1000, tokens_per_turn=64, max_turns=8)
GAMES = ("Mastermind", "2048", "FrozenLake", "Sudoku", "GuessTheNumber", "Minesweeper", "LightsOut")
CASES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("textarena", {"game": f"{game}-v0"}) for game in GAMES),
    ("echo-v1", {}),
    ("echo-user-sim-v1", {}),
    ("echo-tool-v1", {}),
    ("counter-tool-v1", {}),
)
"""Name and options; the tasks of the last four come from the config for evaluation, all of them."""
TIMEOUT_S = 900.0
"""Of an environment: a tool server imports the library again, which takes minutes on a busy machine."""


@dataclass
class Engine:
    """The reference engine as the model of all episodes."""

    engine: ReferenceEngine
    tokenizer: Any
    log_probs: list[float] = field(default_factory=list)
    """Every one that was sampled, in no order."""

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        """The next turn, at temperature 1."""
        result = await self.engine.generate(prompt_ids, SamplingParams(max_tokens=max_tokens))
        self.log_probs += result.log_probs
        return Sampled(result.token_ids, result.log_probs, result.finish_reason == "length")


def library_tests(folder: Path) -> None:
    """Put the tasksets of the library's own tests on the path, here and in tool servers."""
    release = pinned("verifiers")
    tasksets = folder / f"verifiers-{release}" / "tests" / "v1" / "fixtures"
    if not tasksets.is_dir():
        wanted = ["--no-deps", "--no-binary", "verifiers", f"verifiers=={release}", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
        with tarfile.open(folder / f"verifiers-{release}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    sys.path.insert(0, str(tasksets))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tasksets), os.environ.get("PYTHONPATH")]))


async def play_case(name: str, options: Mapping[str, Any], model: Engine, episodes: int) -> list[Played]:
    """Episodes of held-out tasks; a taskset with fewer tasks has each of them several times."""
    finite = {} if "game" in options else {"evaluation": {}}
    taskset: Taskset = find(f"verifiers:{name}").load(timeout_s=TIMEOUT_S, **options, **finite)
    rows = list(taskset.rows("eval", episodes, seed=0))
    rows = [rows[number % len(rows)] for number in range(episodes)]
    played = await asyncio.gather(*(play_row(taskset, row, model, LIMITS) for row in rows))
    return [branch for branches in played for branch in branches]


def table_row(name: str, played: Sequence[Played]) -> str:
    """What happened, as a row of the table."""
    scored = [one for one in played if one.score is not None]
    rewards = [one.score.reward for one in scored if one.score is not None]
    solved = sum(one.score.success for one in scored if one.score is not None)
    calls = [call for one in played for call in one.conversation.calls]
    cells = (
        name,
        f"{len(played)}",
        f"{solved}",
        f"{fmean(rewards):.3f}" if rewards else "–",
        f"{fmean(len(one.conversation.turns) for one in played):.1f}",
        f"{len(calls)} ({sum(call.valid for call in calls)})" if calls else "–",
        f"{sum(one.tokens_out for one in played)}",
        f"{sum(one.token_drift for one in played)}",
        f"{len(played) - len(scored)}",
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| taskset | episodes | solved | reward | turns | calls (valid) | tokens sampled | drift | failed |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def kept_log_probs(played: Sequence[Played]) -> list[float]:
    """The log-probs of all sampled ids as the library gave them back."""
    return [
        value
        for one in played
        for value, mask in zip(one.log_probs or (), one.response_mask, strict=False)
        if mask
    ]


async def measure(model: Engine, episodes: int, only: Sequence[str]) -> None:
    """Play the cases, or `only` those of some tasksets, one after the other, and print the table."""
    print(HEAD)
    everything: list[Played] = []
    for name, options in (case for case in CASES if not only or case[0] in only):
        started = time.monotonic()
        played = await play_case(name, options, model, episodes)
        everything += played
        print(table_row(" ".join([name, *options.values()]), played), flush=True)
        for fault, times in Counter(one.fault for one in played if one.fault).items():
            print(f"{times} × {fault}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    same = sorted(kept_log_probs(everything)) == sorted(model.log_probs)
    print(f"\nlog-probs of all {len(model.log_probs)} sampled ids as the engine gave them: {same}")
    print(machine("verifiers", "textarena", "renderers", "torch"))


def main() -> None:
    """Load the model, fetch the library's tests, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of a ChatML model")
    parser.add_argument("--episodes", type=int, default=4, help="of each taskset")
    parser.add_argument(
        "--only", nargs="*", default=(), choices=sorted({name for name, _ in CASES}), help="tasksets"
    )
    folder = Path(tempfile.gettempdir()) / "drzero-verifiers-tests"
    parser.add_argument("--fixtures", type=Path, default=folder, help="where the source distribution is kept")
    arguments = parser.parse_args()
    arguments.fixtures.mkdir(parents=True, exist_ok=True)
    library_tests(arguments.fixtures)
    model, tokenizer = load_model(arguments.model)
    engine = ReferenceEngine(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        max_batch_size=8,
        max_seq_len=LIMITS.prompt_tokens + LIMITS.response_tokens,
        prefix_cache_bytes=256 << 20,
        seed=0,
    )
    asyncio.run(measure(Engine(engine, tokenizer), arguments.episodes, arguments.only))


if __name__ == "__main__":
    main()
