"""64 agents of one's own at once through the gateway, against the same turns by the project's own episodes.

    python -m bench.gateway                      # 15 idle minutes; the table goes into bench/README.md
    python -m bench.gateway --rounds 1 --dry

Both sides play three turns of at most 64 tokens against one `drzero serve-model` with the demo's policy. The
agents use OpenAI's client. The gateway's part of a call is the client's time less the engine's.
"""

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from bench.gates import README, replace_section
from bench.machine import machine
from drzero.ops.files import atomic_write, write_jsonl
from drzero.ops.process.ports import free_port
from environments.agent.contract import Agent, Endpoint
from environments.agent.taskset import AgentTaskset
from environments.conversation import Message, Turn
from environments.episode import Episode
from environments.row import Row, Split
from environments.score import Score
from environments.taskset import Taskset
from verl_ext.clients.environment_agent import EnvironmentAgent
from verl_ext.episodes import EpisodeLimits, Sampled

TITLE = "## The gateway of agents of one's own"
EPISODES, TURNS, TOKENS = 64, 3, 64
LIMITS = EpisodeLimits(prompt_tokens=256, response_tokens=512, tokens_per_turn=TOKENS)
MORE = "Tell me more."
_WHICH = re.compile(r"Story (\d+)")

asked_s: dict[tuple[int, int], float] = {}
"""Seconds of each call for the client, by episode and turn."""


def opening(number: int) -> list[Message]:
    """The first messages of an episode."""
    return [{"role": "user", "content": f"Story {number}: tell me about a town by the sea."}]


async def agent(task: dict[str, Any], endpoint: Endpoint) -> float:
    """The episode as an agent of one's own."""
    messages: list[Any] = opening(task["number"])
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for turn in range(TURNS):
            began = time.perf_counter()
            answer = await client.chat.completions.create(model=endpoint.model, messages=messages)
            asked_s[task["number"], turn] = time.perf_counter() - began
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": MORE}]
    return 1.0


class Stories(Taskset):
    """The same as an environment."""

    name, max_turns = "stories", TURNS

    def rows(self, split: Split, n: int | None, seed: int) -> Sequence[Row]:
        """Not asked for."""
        return []

    def episode(self, row: Row) -> Episode:
        """One episode."""
        return Story(row.data["task"]["number"])


class Story(Episode):
    """One episode."""

    def __init__(self, number: int) -> None:
        self._number, self._turns = number, 0

    def messages(self) -> Sequence[Message]:
        """Its first message."""
        return opening(self._number)

    def respond(self, turn: Turn) -> Sequence[Message] | None:
        """The same request, until the last turn."""
        self._turns += 1
        return None if self._turns == TURNS else [{"role": "user", "content": MORE}]

    def score(self) -> Score:
        """Nothing is learnt."""
        return Score(1.0, True)


@dataclass(eq=False, kw_only=True)
class Timed(EnvironmentAgent):
    """Keeps the engine's time of each call, by episode and turn."""

    sampled_s: dict[tuple[int, int], float] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)

    async def sample(self, prompt_ids: list[int], max_tokens: int) -> Sampled:
        """Sample the next turn."""
        found = _WHICH.search(self.tokenizer.decode(prompt_ids))
        assert found is not None
        number = int(found[1])
        self.turns[number] = turn = self.turns.get(number, -1) + 1
        began = time.perf_counter()
        sampled = await super().sample(prompt_ids, max_tokens)
        self.sampled_s[number, turn] = time.perf_counter() - began
        return sampled


async def play(taskset: Taskset, url: str, tokenizer: Any) -> tuple[float, int, Timed]:
    """All episodes at once: seconds, sampled tokens, and the engine's times."""
    timed = Timed(
        f"{url}/v1/completions", "policy", tokenizer, taskset=taskset, limits=LIMITS, temperature=0.0
    )
    rows = [Row(str(number), {"task": {"number": number}}) for number in range(EPISODES)]
    began = time.perf_counter()
    attempts = await asyncio.gather(*map(timed.attempt, rows))
    seconds = time.perf_counter() - began
    await timed.aclose()
    if failed := [attempt.failure for attempt in attempts if not attempt.finished]:
        raise SystemExit(f"{len(failed)} episodes failed, the first: {failed[0]}")
    return seconds, sum(one.played.tokens_out for one in attempts if one.played), timed


@contextmanager
def served(model: Path) -> Iterator[str]:
    """serve-model with the demo's policy."""
    port = free_port(None)
    words = ["--model", str(model), "--port", str(port), "--served-model-name", "policy"]
    words += ["--max-batch-size", str(EPISODES), "--max-seq-len", "1024"]
    child = subprocess.Popen(
        [sys.executable, "-m", "verl_ext.engine.api_server", *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()  # it says that it listens
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(60)


def measure(rounds: int, model: Path) -> str:
    """The text of the section."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rates: dict[str, list[float]] = {"own episodes": [], "agents": []}
    added: list[float] = []
    with served(model) as url, TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks.jsonl"
        write_jsonl(tasks, [{"number": 0}])
        agents = AgentTaskset("bench.gateway:agent", data=str(tasks), tries=1)
        agents.agent = Agent("agent", agent)  # this module's own, as it notes the times here
        for _ in range(rounds):
            for name, taskset in (("own episodes", Stories()), ("agents", agents)):
                asked_s.clear()
                seconds, tokens, timed = asyncio.run(play(taskset, url, tokenizer))
                rates[name].append(tokens / seconds)
                added += [1000 * (asked_s[key] - timed.sampled_s[key]) for key in asked_s]
                print(f"{name}: {tokens} tokens in {seconds:.1f} s", flush=True)
    means = {name: statistics.mean(found) for name, found in rates.items()}
    rows = [f"| {name} | {mean:.1f} | {mean / means['own episodes']:.3f} |" for name, mean in means.items()]
    return "\n".join(
        [
            f"`python -m bench.gateway` on {machine('aiohttp', 'openai')}.",
            f"{EPISODES} episodes at once, {TURNS} turns of at most {TOKENS} tokens, {rounds} rounds.",
            "",
            "| side | tokens a second | ratio |",
            "|---|---|---|",
            *rows,
            "",
            f"What the gateway and OpenAI's client add to a call, of {len(added)} calls: median "
            f"{np.percentile(added, 50):.0f} ms, p99 {np.percentile(added, 99):.0f} ms.",
        ]
    )


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=Path("outputs/corpus/models/demo-policy"))
    parser.add_argument("--dry", action="store_true", help="print only")
    options = parser.parse_args()
    body = measure(options.rounds, options.model)
    print(body)
    if not options.dry:
        atomic_write(README, replace_section(README.read_text(), TITLE, body))


if __name__ == "__main__":
    main()
