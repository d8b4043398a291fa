"""Many conversations with a served model: what synthesize and evaluate share.

    async with served_agent(SolverAgent, config, url, "solver", tokenizer) as agent:
        failed = await play_all(jobs, play, on_result, services, concurrency=256, description="evaluate")
    check_failed_share(failed, len(jobs), config.run.max_failed_share)

Conversations run side by side, as many as `concurrency`, and are started only when there is room, so a list
of any length will do. A result is handed over as soon as it is there: what a journal keeps of it survives a
kill. Meanwhile the services are watched, so that a dead one ends the stage at once with its name and last
lines. A conversation that a service has cut short is played once more after all others; what fails again is
returned to the caller, never passed off as a result. When the stop time comes near, no conversation is begun
any more; those that do not end in time are dropped, and are the next run's.
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

from ops.events import OUT_OF_TIME
from ops.logs import say
from ops.services import ServiceGroup
from pipeline.out_of_time import OutOfTime
from search.client import SearchClient, SearchRequestError
from verl_ext.method.search_agent import Conversation, SearchAgent, SolverServerError
from verl_ext.method.solver_agent import SolverAgent
from verl_ext.stop_time import seconds_left, told_left

LAST_BEGIN_S = 60.0
"""No conversation is begun with less than this left, and no service is started for one."""
_LAST_END_S = 20.0
"""A conversation that has not ended this long before the stop time is dropped: services take time to end."""
_CHECK_EVERY_S = 1.0
_TELL_EVERY_S = 15.0
"""Between two lines of progress where there is no terminal to draw a bar on."""
_BLAME_S = 1.0  # a service whose end made a conversation fail may take a moment to be seen as ended
_HOPELESS = 2
"""Generations of conversations, none of which has ended well, after which the rest need not be tried."""

Job = TypeVar("Job")
Played = TypeVar("Played", bound=Conversation)
Agent = TypeVar("Agent", bound=SearchAgent)


class ConversationsFailed(RuntimeError):
    """Conversations could not be had although every service lives; the message says how many and why."""


@dataclass(frozen=True)
class Failed(Generic[Job]):
    """A job whose conversation was cut short twice, and by what the last time."""

    job: Job
    reason: str


def completions_url(config: DictConfig) -> str:
    """Where the stage's own model server answers completions."""
    return f"http://{config.solver.host}:{config.solver.port}/v1/completions"


@asynccontextmanager
async def served_agent(
    kind: type[Agent], config: DictConfig, url: str, model_name: str, tokenizer: Any
) -> AsyncIterator[Agent]:
    """An agent for the running event loop, with the limits of `solver` and `retrieval` in a resolved config.

    `kind` is SearchAgent or SolverAgent, `url` the whole address of the completions endpoint. Its
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
    """Play every job, hand each finished conversation to `on_result`, and return the jobs that failed twice.

    `on_result` is called in this thread, in the order in which conversations end.

    Raises:
        OutOfTime: the stop time came before all were played.
        ServiceDied: a service ended.
        ConversationsFailed: a server refused a request, or no conversation ended well for so long that the
            rest would not either.
    """
    failed = await _pass(jobs, play, on_result, services, concurrency, description)
    if failed:
        again = [failure.job for failure in failed]
        failed = await _pass(
            again, play, on_result, services, concurrency, f"{description}, failed ones again"
        )
    return failed


def check_failed_share(failed: Sequence[Failed[Any]], total: int, max_share: float) -> None:
    """Raise ConversationsFailed when more than `max_share` of `total` conversations failed."""
    if len(failed) > max_share * total:
        raise ConversationsFailed(
            f"{len(failed)} of {total} conversations failed twice, more than the run.max_failed_share="
            f"{max_share:g} allowed: what is left would be a biased sample. {_most_common(failed)}. Finished "
            "ones are kept: rerun once the cause is gone"
        )


async def _pass(
    jobs: Sequence[Job],
    play: Callable[[Job], Awaitable[Played]],
    on_result: Callable[[Job, Played], None],
    services: ServiceGroup,
    concurrency: int,
    description: str,
) -> list[Failed[Job]]:
    """Play every job once; returns those whose conversations are not finished."""
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
                    await _give_up(failed, since_success, services)
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
    """Start jobs while there is room and time; returns whether any is running."""
    while len(running) < concurrency and seconds_left() > LAST_BEGIN_S:
        job = next(waiting, None)
        if job is None:
            break
        running[asyncio.ensure_future(play(job))] = job
    return bool(running)


def _stop_in_time(description: str, ended: int, total: int, services: ServiceGroup) -> NoReturn:
    told = f"out of time after {ended} of {total} conversations of this start: {told_left(seconds_left())}"
    services.events.add(OUT_OF_TIME, description, told)
    raise OutOfTime(f"{told}. Finished ones are kept: rerun to go on")


async def _result(future: asyncio.Future[Played], services: ServiceGroup) -> Played:
    try:
        return future.result()
    except (SolverServerError, SearchRequestError) as error:
        await _blame(services)
        raise ConversationsFailed(str(error)) from error


async def _give_up(failed: Sequence[Failed[Any]], in_a_row: int, services: ServiceGroup) -> None:
    await _blame(services)
    raise ConversationsFailed(
        f"{in_a_row} conversations in a row failed, and the rest would too. {_most_common(failed)}. Finished "
        "ones are kept: rerun once the cause is gone"
    )


async def _blame(services: ServiceGroup) -> None:
    """Raise ServiceDied if it was a service's end that made conversations fail."""
    await asyncio.sleep(_BLAME_S)
    services.check()


def _most_common(failed: Sequence[Failed[Any]]) -> str:
    reasons = [failure.reason for failure in failed]
    reason = max(set(reasons), key=reasons.count)
    return f"The most common cause ({reasons.count(reason)} times): {reason}"


class _RateColumn(ProgressColumn):
    """The rate in a bar."""

    def render(self, task: Task) -> Text:
        return Text(_rate(task))


def _rate(task: Task) -> str:
    """Conversations per second, and how many failed."""
    speed = task.finished_speed or task.speed
    failed = f", {task.fields['failed']} failed" if task.fields["failed"] else ""
    return f"{speed:.3g}/s{failed}" if speed else f"–/s{failed}"


class _ProgressReport:
    """A bar on a terminal; where there is none, a line now and then."""

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
            # Conversations take minutes on a small machine: a rate over less would jump.
            speed_estimate_period=300,
            refresh_per_second=2,
        )
        self._task = self._progress.add_task(description, total=total, failed=0)
        self._tell_at = time.monotonic() + _TELL_EVERY_S

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
            self._tell()

    def advance(self, failed: int) -> None:
        """One more conversation has ended; `failed` of all that have did not end well."""
        self._progress.update(self._task, advance=1, failed=failed)
        if not self._console.is_terminal and time.monotonic() >= self._tell_at:
            self._tell()
            self._tell_at = time.monotonic() + _TELL_EVERY_S

    def _tell(self) -> None:
        task = self._progress.tasks[0]
        left = f", {task.time_remaining:.0f} s left" if task.time_remaining else ""
        say(self._description, f"{task.completed:g} of {task.total:g}, {_rate(task)}{left}")
