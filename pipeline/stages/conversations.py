"""Many conversations with a served model: what synthesize and evaluate share.

    async with served_agent(SolverAgent, config, url, "solver", tokenizer) as agent:
        failed = await play_all(jobs, play, on_result, services, concurrency=256, description="evaluate")
    check_failed_share(failed, len(jobs), config.run.max_failed_share)

Up to `concurrency` conversations run at once, and each starts only when one has ended, so a job list may have
any length. A result is handed over as soon as its conversation ends: what a journal keeps of it survives a
kill. Meanwhile the services are polled, so that a dead one ends the stage at once with its name and last log
lines. A conversation that a service cut short is retried once after all others; one that fails twice is
returned to the caller, never counted as a result. Near the stop time no conversation is started; those that
do not end in time are dropped and left to the next run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ops.errors import OutOfTime, RunFailed
from ops.process.logs import OUT_OF_TIME, say
from ops.services.services import ServiceGroup
from search.client import SearchClient, SearchRequestError
from verl_ext.method.search_agent import Conversation, SearchAgent, SolverServerError
from verl_ext.method.solver_agent import SolverAgent
from verl_ext.stop_time import describe_left, seconds_left

LAST_BEGIN_S = 60.0
"""With less than this left, no conversation is started, and no service for one."""
_LAST_END_S = 20.0
"""Conversations still running this long before the stop time are dropped: services take time to stop."""
_CHECK_EVERY_S = 1.0
_LOG_EVERY_S = 15.0
"""Between two lines of progress, if there is no terminal to draw a bar on."""
_BLAME_S = 1.0  # a service whose end made a conversation fail may take a moment to be seen as ended
_HOPELESS = 2
"""After this many times `concurrency` failures in a row, the rest is not tried."""

Job = TypeVar("Job")
Played = TypeVar("Played", bound=Conversation)
Agent = TypeVar("Agent", bound=SearchAgent)


class ConversationsFailed(RunFailed):
    """Conversations failed although every service lives; the message says how many and why."""


@dataclass(frozen=True)
class Failed(Generic[Job]):
    """A job whose conversation was cut short twice, and the reason of the second time."""

    job: Job
    reason: str


def completions_url(config: DictConfig) -> str:
    """The completions endpoint of the stage's own model server."""
    return f"http://{config.solver.host}:{config.solver.port}/v1/completions"


@asynccontextmanager
async def served_agent(
    kind: type[Agent], config: DictConfig, url: str, model_name: str, tokenizer: Any
) -> AsyncIterator[Agent]:
    """An agent for the running event loop, with the limits of `solver` and `retrieval` in a resolved config.

    `kind` is SearchAgent or SolverAgent, `url` the full address of the completions endpoint. Its
    connections are closed at the end.
    """
    solver, retrieval = config.solver, config.retrieval
    search = SearchClient(
        f"http://{retrieval.host}:{retrieval.port}", topk=retrieval.topk, deadline_s=retrieval.deadline_s
    )
    wording = {"prompt_form": config.prompts.form} if issubclass(kind, SolverAgent) else {}
    agent = kind(
        url,
        model_name,
        tokenizer,
        search,
        topk=retrieval.topk,
        max_turns=solver.max_turns,
        max_tokens_per_turn=solver.max_tokens_per_turn,
        max_context_tokens=solver.max_context_tokens,
        tool_response_limit=retrieval.response_limit,
        temperature=solver.temperature,
        concurrency=solver.concurrency,
        deadline_s=solver.deadline_s,
        **wording,
    )
    try:
        yield agent
    finally:
        await agent.aclose()
        await search.aclose()


async def play_all(
    jobs: Sequence[Job],
    play: Callable[[Job], Awaitable[Played]],
    on_result: Callable[[Job, Played], None],
    services: ServiceGroup,
    *,
    concurrency: int,
    description: str,
) -> list[Failed[Job]]:
    """Run every job, hand each finished conversation to `on_result`, and return the jobs that failed twice.

    `on_result` is called in this thread, in the order in which conversations end.

    Raises:
        OutOfTime: the stop time came before all had run.
        ServiceDied: a service ended.
        ConversationsFailed: a server refused a request, or so many conversations failed in a row that the
            rest would too.
    """
    failed = await _pass(jobs, play, on_result, services, concurrency, description)
    if failed:
        retried = [failure.job for failure in failed]
        failed = await _pass(retried, play, on_result, services, concurrency, f"{description}, retries")
    return failed


def check_failed_share(failed: Sequence[Failed[Any]], total: int, max_share: float) -> None:
    """Raise ConversationsFailed when more than `max_share` of `total` conversations failed."""
    if len(failed) > max_share * total:
        raise ConversationsFailed(
            f"{len(failed)} of {total} conversations failed twice, more than the run.max_failed_share="
            f"{max_share:g} allowed: the rest would be a biased sample. {_most_common(failed)}. Finished "
            "ones are kept: rerun once the cause is fixed"
        )


async def _pass(
    jobs: Sequence[Job],
    play: Callable[[Job], Awaitable[Played]],
    on_result: Callable[[Job, Played], None],
    services: ServiceGroup,
    concurrency: int,
    description: str,
) -> list[Failed[Job]]:
    """Run every job once; returns those whose conversations are not finished."""
    failed: list[Failed[Job]] = []
    waiting, running = iter(jobs), dict[asyncio.Future[Played], Job]()
    since_success, check_at = 0, time.monotonic()
    with _ProgressReport(description, len(jobs)) as progress:
        try:
            while _fill(running, waiting, play, concurrency) and seconds_left() > _LAST_END_S:
                done, _ = await asyncio.wait(
                    running, timeout=_CHECK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if time.monotonic() >= check_at:
                    services.check()
                    check_at = time.monotonic() + _CHECK_EVERY_S
                for future in done:
                    job, result = running.pop(future), await _result(future, services)
                    if result.finished:
                        on_result(job, result)
                        since_success = 0
                    else:
                        failed.append(Failed(job, result.failure or "no reason given"))
                        since_success += 1
                    progress.advance(len(failed))
                if since_success >= _HOPELESS * concurrency:
                    await _blame(services)
                    raise ConversationsFailed(
                        f"{since_success} conversations in a row failed, and the rest would too. "
                        f"{_most_common(failed)}. Finished ones are kept: rerun once the cause is fixed"
                    )
            if left := len(running) + sum(1 for _ in waiting):
                _stop_in_time(description, len(jobs) - left, len(jobs), services)
        finally:
            for future in running:
                future.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    if failed:
        await _blame(services)
    return failed


def _fill(
    running: dict[asyncio.Future[Played], Job],
    waiting: Any,
    play: Callable[[Job], Awaitable[Played]],
    concurrency: int,
) -> bool:
    """Start jobs up to `concurrency` while time is left; returns whether any is running."""
    while len(running) < concurrency and seconds_left() > LAST_BEGIN_S:
        job = next(waiting, None)
        if job is None:
            break
        running[asyncio.ensure_future(play(job))] = job
    return bool(running)


def _stop_in_time(description: str, ended: int, total: int, services: ServiceGroup) -> NoReturn:
    told = (
        f"out of time after {ended} of {total} conversations of this start: {describe_left(seconds_left())}"
    )
    services.events.add(OUT_OF_TIME, description, told)
    raise OutOfTime(f"{told}. Finished ones are kept: rerun to resume")


async def _result(future: asyncio.Future[Played], services: ServiceGroup) -> Played:
    try:
        return future.result()
    except (SolverServerError, SearchRequestError) as error:
        await _blame(services)
        raise ConversationsFailed(str(error)) from error


async def _blame(services: ServiceGroup) -> None:
    """Raise ServiceDied if conversations failed because a service ended."""
    await asyncio.sleep(_BLAME_S)
    services.check()


def _most_common(failed: Sequence[Failed[Any]]) -> str:
    reasons = [failure.reason for failure in failed]
    reason = max(set(reasons), key=reasons.count)
    return f"The most common cause ({reasons.count(reason)} times): {reason}"


class _RateColumn(ProgressColumn):
    """The progress bar's column for the rate and the failures."""

    def render(self, task: Task) -> Text:
        return Text(_rate(task))


def _rate(task: Task) -> str:
    """Conversations per second, and how many failed."""
    speed = task.finished_speed or task.speed
    failed = f", {task.fields['failed']} failed" if task.fields["failed"] else ""
    return f"{speed:.3g}/s{failed}" if speed else f"–/s{failed}"


class _ProgressReport:
    """A progress bar on a terminal, else a log line every `_LOG_EVERY_S` seconds."""

    def __init__(self, description: str, total: int) -> None:
        self._description = description
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeRemainingColumn(),
            console=self._console,
            # Conversations take minutes on a small machine: a rate over a shorter period would jump.
            speed_estimate_period=300,
            refresh_per_second=2,
        )
        self._task = self._progress.add_task(description, total=total, failed=0)
        self._log_at = time.monotonic() + _LOG_EVERY_S

    def __enter__(self) -> _ProgressReport:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()
        else:
            self._log()

    def advance(self, failed: int) -> None:
        """Count one more ended conversation; `failed` is the number of failures so far."""
        self._progress.update(self._task, advance=1, failed=failed)
        if not self._console.is_terminal and time.monotonic() >= self._log_at:
            self._log()
            self._log_at = time.monotonic() + _LOG_EVERY_S

    def _log(self) -> None:
        task = self._progress.tasks[0]
        left = f", {task.time_remaining:.0f} s left" if task.time_remaining else ""
        say(self._description, f"{task.completed:g} of {task.total:g}, {_rate(task)}{left}")
