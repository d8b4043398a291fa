"""Run many conversations with a served model: what synthesize, preview and evaluate share.

async with served_agent(SolverAgent, config, own_model(config, "solver")) as agent:
    failed = await play_all(config, jobs, play, on_result, services, total=len(jobs), description="evaluate")
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import DictConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from drzero.ops.artefacts import announce
from drzero.ops.console import has_live_terminal, say
from drzero.ops.errors import OutOfTime, RunFailed
from drzero.ops.records import OUT_OF_TIME
from drzero.ops.services.services import AnySpec, ServiceGroup
from drzero.ops.stop_time import describe_left, require_time, seconds_left
from drzero.recipe.compose import retrieval_url, write_resolved
from drzero.recipe.fingerprint import fingerprint_index
from drzero.recipe.settings.schema import schema_of
from drzero.stages.models import StageModel
from drzero.stages.result import RESULT
from search.client import SearchClient, SearchRequestError
from verl_ext.clients.environment_agent import EpisodeAttempt
from verl_ext.clients.search_agent import Conversation, SearchAgent
from verl_ext.clients.served_model import SolverServerError
from verl_ext.clients.solver_agent import SolverAgent

LAST_BEGIN_S = 60.0  # with less time left, no conversation and no service is started
_LAST_END_S = 20.0
"""Conversations are dropped this long before the stop time, because services take time to stop."""
_CHECK_EVERY_S = 1.0
_LOG_EVERY_S = 60.0
_BLAME_S = 1.0  # a dead service may take a moment to be seen as dead
_HOPELESS = 2  # this many times `concurrency` failures in a row end the stage


Job = TypeVar("Job")
Played = TypeVar("Played", bound=Conversation | EpisodeAttempt)
Agent = TypeVar("Agent", bound=SearchAgent)


class ConversationsFailed(RunFailed):
    """Conversations failed although every service lives. The message says how many, and why."""


@dataclass(frozen=True)
class Failed(Generic[Job]):
    """A job that failed twice, and the second reason."""

    job: Job
    reason: str


def journal_conditions(config: DictConfig, stage: str, model: StageModel, **inputs: Any) -> dict[str, Any]:
    """All that a stage's answers depend on. An endpoint chooses its own engine."""
    keys = set(schema_of(stage).changing_journal())
    keys -= {"solver.engine", "solver.dtype"} if config.endpoint else set()
    values = {key: OmegaConf.select(config, key) for key in sorted(keys)}
    return {"model": model.identity, **inputs, "collection": fingerprint_index(config)} | {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for key, value in values.items()
    }


@asynccontextmanager
async def served_agent(kind: type[Agent], config: DictConfig, model: StageModel) -> AsyncIterator[Agent]:
    """An agent for the running event loop, with the limits of `solver` and `retrieval`."""
    solver, retrieval = config.solver, config.retrieval
    search = SearchClient(retrieval_url(retrieval), topk=retrieval.topk, deadline_s=retrieval.deadline_s)
    wording = {"prompt_form": config.prompts.form} if issubclass(kind, SolverAgent) else {}
    agent = kind(
        model.url,
        model.name,
        model.tokenizer,
        search,
        topk=retrieval.topk,
        max_turns=solver.max_turns,
        max_tokens_per_turn=solver.max_tokens_per_turn,
        max_context_tokens=solver.max_context_tokens,
        tool_response_limit=retrieval.response_limit,
        temperature=solver.temperature,
        concurrency=solver.concurrency,
        deadline_s=solver.deadline_s,
        endpoint=model.endpoint,
        key_variable=model.key_variable,
        **wording,
    )
    try:
        yield agent
    finally:
        await agent.aclose()
        await search.aclose()
        if model.endpoint:
            await model.endpoint.aclose()


def with_services(
    config: DictConfig,
    specs: Sequence[AnySpec],
    journal: Path,
    play: Callable[[ServiceGroup], Coroutine[Any, Any, list[Failed[Job]]]],
) -> list[Failed[Job]]:
    """Run `play` with the services up, then announce the journal. Raises OutOfTime if time is short."""
    require_time(config.run.name, LAST_BEGIN_S)
    # Unfinished work must not keep an old result.
    (Path(config.run.dir) / RESULT).unlink(missing_ok=True)
    write_resolved(config)
    try:
        with ServiceGroup(specs) as services:
            return asyncio.run(play(services))
    finally:
        announce(journal)


async def play_all(
    config: DictConfig,
    jobs: Sequence[Job],
    play: Callable[[Job], Awaitable[Played]],
    on_result: Callable[[Job, Played], None],
    services: ServiceGroup,
    *,
    total: int,
    description: str,
) -> list[Failed[Job]]:
    """Run every job, a failed one once more after all others. Returns the jobs that failed twice.

    `total` includes the jobs of earlier starts. Raises OutOfTime at the stop time, ServiceDied, or
    ConversationsFailed if a server refuses a request, too many fail in a row, or too many of `total` twice.
    """
    player = _Player(play, on_result, services, config.solver.concurrency)
    failed = await player.once(jobs, description)
    if failed:
        (reason, times), *_ = Counter(failure.reason for failure in failed).most_common(1)
        say(description, f"{len(failed)} failed and are tried again; {times} times: {reason}")
        failed = await player.once([failure.job for failure in failed], f"{description}, retries")
    max_share = config.run.max_failed_share
    if len(failed) > max_share * total:
        raise ConversationsFailed(
            f"{len(failed)} of {total} conversations failed twice, more than the run.max_failed_share="
            f"{max_share:g} allowed: the rest would be a biased sample. {_cause_and_advice(failed)}"
        )
    return failed


@dataclass(frozen=True)
class _Player(Generic[Job, Played]):
    play: Callable[[Job], Awaitable[Played]]
    on_result: Callable[[Job, Played], None]
    services: ServiceGroup
    concurrency: int

    async def once(self, jobs: Sequence[Job], description: str) -> list[Failed[Job]]:
        failed: list[Failed[Job]] = []
        waiting, running = iter(jobs), dict[asyncio.Future[Played], Job]()
        since_success, check_at = 0, time.monotonic()
        with _progress(description, len(jobs)) as advance:
            try:
                while self._fill(running, waiting) and seconds_left() > _LAST_END_S:
                    done, _ = await asyncio.wait(
                        running, timeout=_CHECK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    if time.monotonic() >= check_at:
                        self.services.check()
                        check_at = time.monotonic() + _CHECK_EVERY_S
                    for future in done:
                        job, result = running.pop(future), await self._result(future)
                        if result.finished:
                            self.on_result(job, result)
                            since_success = 0
                        else:
                            failed.append(Failed(job, result.failure or "no reason given"))
                            since_success += 1
                        advance(len(failed))
                    if since_success >= _HOPELESS * self.concurrency:
                        await self._blame()
                        raise ConversationsFailed(
                            f"{since_success} conversations in a row failed, and the rest would too. "
                            f"{_cause_and_advice(failed)}"
                        )
                if left := len(running) + sum(1 for _ in waiting):
                    ended = f"{len(jobs) - left} of {len(jobs)} conversations of this start"
                    message = f"out of time after {ended}: {describe_left(seconds_left())}"
                    self.services.events.add(OUT_OF_TIME, description, message)
                    raise OutOfTime(f"{message}. Finished ones are kept: rerun to resume")
            finally:
                for future in running:
                    future.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        if failed:
            await self._blame()
        return failed

    def _fill(self, running: dict[asyncio.Future[Played], Job], waiting: Iterator[Job]) -> bool:
        """Start jobs up to `concurrency` while time is left. Returns whether any is running."""
        while len(running) < self.concurrency and seconds_left() > LAST_BEGIN_S:
            job = next(waiting, None)
            if job is None:
                break
            running[asyncio.ensure_future(self.play(job))] = job
        return bool(running)

    async def _result(self, future: asyncio.Future[Played]) -> Played:
        try:
            return future.result()
        except (SolverServerError, SearchRequestError) as error:
            await self._blame()
            raise ConversationsFailed(str(error)) from error

    async def _blame(self) -> None:
        """Raise ServiceDied if a dead service is why conversations failed."""
        await asyncio.sleep(_BLAME_S)
        self.services.check()


def _cause_and_advice(failed: Sequence[Failed[Any]]) -> str:
    (reason, times), *_ = Counter(failure.reason for failure in failed).most_common(1)
    advice = "Finished ones are kept: rerun once the cause is fixed"
    return f"The most common cause ({times} times): {reason}. {advice}"


@contextmanager
def _progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar or log lines. Yields a function that counts one more, given the failures so far."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        # On a small machine conversations take minutes, so a rate over a shorter period would jump.
        speed_estimate_period=300,
        refresh_per_second=2,
    )
    bar.add_task(description, total=total, rate="–/s")
    task = bar.tasks[0]
    is_terminal, log_at = has_live_terminal(), time.monotonic() + _LOG_EVERY_S

    def log() -> None:
        left = f", {task.time_remaining:.0f} s left" if task.time_remaining else ""
        say(description, f"{task.completed:g} of {task.total:g}, {task.fields['rate']}{left}")

    def advance(failed: int) -> None:
        nonlocal log_at
        bar.update(task.id, advance=1)
        speed = task.finished_speed or task.speed
        rate = f"{speed:.3g}/s" if speed else "–/s"
        bar.update(task.id, rate=f"{rate}, {failed} failed" if failed else rate)
        if not is_terminal and time.monotonic() >= log_at:
            log()
            log_at = time.monotonic() + _LOG_EVERY_S

    with bar if is_terminal else nullcontext():
        try:
            yield advance
        finally:
            if not is_terminal:
                log()
