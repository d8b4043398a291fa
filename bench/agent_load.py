"""Many clients at once against serve-agent, next to the same questions without it.

    python -m bench.agent_load                   # 18 idle minutes; the table goes into bench/README.md
    python -m bench.agent_load --minutes 1 --dry

32 clients ask the demo world's questions of one and two hops, each its next one as soon as it has an answer.
First the agent alone plays them (`SolverAgent`, as evaluate does), then the service does, over OpenAI's API.
Both have the same engine and index. Each tenth question's client leaves after a second. A first search that
shares no name with its question would be a mixed conversation.
"""

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import openai
import psutil
from omegaconf import DictConfig
from prometheus_client.parser import text_string_to_metric_families

from bench.gates import README, replace_section
from bench.machine import machine
from data.benchmarks import BenchmarkQuestion
from drzero.agent.compose import compose_agent
from drzero.agent.running import running
from drzero.agent.server.chat_text import answer_in
from drzero.ops.process.ports import free_port
from drzero.preflight.inputs import load_questions
from drzero.recipe.compose import compose_stage
from verl_ext.method.answers import exact_match

TITLE = "## The agent's service"
CLIENTS = 32
LEAVES_EVERY, LEAVES_AFTER_S = 10, 1.0
SETTINGS = ["hardware=cpu", "model=demo-policy"]
MIB = 2**20
_NAME = re.compile(r"[A-Z]\w{3,}")


@dataclass
class Tally:
    """What came of the questions of one side."""

    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)  # right, wrong, none, mixed, left, failed
    tokens: int = 0
    memory_mib: list[float] = field(default_factory=list)  # of the service's own process, by minute

    @property
    def answered(self) -> int:
        """Questions with an answer of any kind."""
        return sum(self.answers[kind] for kind in ("right", "wrong", "none", "mixed"))

    def row(self, name: str) -> str:
        """A row of the table."""
        minutes = self.seconds / 60
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(self.answers.items()))
        return f"| {name} | {self.answered / minutes:.1f} | {self.tokens / self.seconds:.0f} | {kinds} |"


def kind_of(answer: str | None, search: str, question: BenchmarkQuestion) -> str:
    """How an answer counts, with its first search."""
    if search and not set(_NAME.findall(search)) & set(_NAME.findall(question.question)):
        return "mixed"
    if not answer:
        return "none"
    return "right" if exact_match(answer, question.targets) else "wrong"


async def load(
    questions: list[BenchmarkQuestion], seconds: float, ask: Callable[..., Awaitable[None]]
) -> None:
    """Have CLIENTS ask until the time is over."""
    numbered, end = enumerate(itertools.cycle(questions)), time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            await ask(*next(numbered))

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def alone(config: DictConfig, questions: list[BenchmarkQuestion], seconds: float) -> Tally:
    """The agent without a service."""
    tally = Tally()

    async def run() -> None:
        async with agents.opened() as (asker, *_):

            async def ask(number: int, question: BenchmarkQuestion) -> None:
                answer = await asker.ask(question.question)
                tally.answers[kind_of(answer.text, "".join(answer.searches[:1]), question)] += 1
                tally.tokens += answer.attempt.tokens_out

            began = time.monotonic()
            await load(questions, seconds, ask)
            tally.seconds = time.monotonic() - began

    with running(config) as agents:
        asyncio.run(run())
    return tally


@contextmanager
def service() -> Iterator[tuple[str, psutil.Process]]:
    """serve-agent as users start it: its address and its process."""
    url = f"http://127.0.0.1:{(port := free_port(None))}"
    words = ["serve-agent", *SETTINGS, f"port={port}", "sources_in_text=false", "solver.deadline_s=600"]
    child = subprocess.Popen([sys.executable, "-m", "drzero.cli", *words])
    try:
        while not is_up(url):
            if child.poll() is not None:
                raise SystemExit("serve-agent ended: see above")
            time.sleep(0.5)
        yield url, psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(60)


def is_up(url: str) -> bool:
    """Whether the service answers."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200
    return False


def served(questions: list[BenchmarkQuestion], seconds: float) -> Tally:
    """The same questions over OpenAI's API, with clients that leave."""
    tally = Tally()

    async def run(url: str, process: psutil.Process) -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=900)
        (model, *_) = (await client.models.list()).data

        async def ask(number: int, question: BenchmarkQuestion) -> None:
            messages = [{"role": "user", "content": question.question}]
            leaves = number % LEAVES_EVERY == LEAVES_EVERY - 1
            try:
                async with asyncio.timeout(LEAVES_AFTER_S if leaves else None):
                    done = await client.chat.completions.create(model=model.id, messages=messages)  # type: ignore[call-overload]
            except TimeoutError:
                tally.answers["left"] += 1
            except openai.OpenAIError as error:
                tally.answers[f"failed: {str(error)[:80]}"] += 1
            else:
                message = done.choices[0].message
                search = message.model_extra.get("reasoning_content", "").partition("\n")[0]
                search = search.removeprefix("Searching: ")
                tally.answers[kind_of(answer_in(message.content), search, question)] += 1
                tally.tokens += done.usage.completion_tokens

        async def watch() -> None:
            while True:
                tally.memory_mib.append(process.memory_info().rss / MIB)
                await asyncio.sleep(60)

        watching, began = asyncio.create_task(watch()), time.monotonic()
        await load(questions, seconds, ask)
        tally.seconds = time.monotonic() - began
        watching.cancel()
        await asyncio.sleep(2)
        tally.memory_mib.append(process.memory_info().rss / MIB)
        figures = httpx.get(f"{url}/metrics", trust_env=False).text
        families = text_string_to_metric_families(figures)
        still = {s.name: s.value for f in families for s in f.samples if s.name == "agent_running"}
        if still != {"agent_running": 0.0}:
            raise SystemExit(f"places that nobody uses are still taken: {still}")

    with service() as (url, process):
        asyncio.run(run(url, process))
    return tally


def main() -> None:
    """Run both sides and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the service; alone half of it")
    parser.add_argument("--dry", action="store_true", help="print the table only")
    options = parser.parse_args()
    asked = ["hops=[1,2]", "iteration=0"]
    questions = load_questions(compose_stage("evaluate", [*SETTINGS, *asked]))
    seconds = 60 * options.minutes
    first = alone(compose_agent("ask", SETTINGS), questions, seconds / 2)
    second = served(questions, seconds)
    memory = ", ".join(f"{mib:.0f}" for mib in second.memory_mib)
    ratio = second.answered / second.seconds / (first.answered / first.seconds)
    table = [
        f"`python -m bench.agent_load` on {machine('torch', 'openai', 'starlette')}: {CLIENTS} clients",
        f"at once for {options.minutes:g} minutes, the demo's policy and world.",
        "",
        "| side | answers a minute | tokens/s | questions |",
        "|---|---|---|---|",
        first.row("the agent alone"),
        second.row("serve-agent, OpenAI's client"),
        "",
        f"The service gives {ratio:.2f} times as many answers. Its own process took {memory} MiB, minute by",
        "minute. Every place was free at the end.",
    ]
    print("\n".join(table))
    if not options.dry:
        README.write_text(replace_section(README.read_text(), TITLE, "\n".join(table)))
    print(json.dumps({"alone": first.answers, "served": second.answers}))


if __name__ == "__main__":
    main()
