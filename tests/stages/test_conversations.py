"""Many conversations at once: bounds, retries, and who is blamed when they fail."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.ops.services.services import Service, ServiceDied, ServiceGroup, ServiceSpec
from drzero.stages import conversations as served_model
from drzero.stages.conversations import ConversationsFailed, Failed, check_failed_share, play_all
from search.client import SearchRequestError
from verl_ext.clients.search_agent import Conversation
from verl_ext.clients.served_model import SolverServerError
from verl_ext.method.trajectory import Trajectory, Turn

Play = Callable[[int], Awaitable[Conversation]]


@pytest.fixture(autouse=True)
def no_pause_for_blame(monkeypatch):
    """The moment that a dying service is given is nothing to wait for where there is no service."""
    monkeypatch.setattr(served_model, "_BLAME_S", 0.0)


def conversation(text, failure=None):
    return Conversation(Trajectory((Turn(text),)), failure is None, failure, 1, 1, 0, 0.0)


def play_jobs(jobs, play, concurrency=4, services=None):
    """What was handed over, in order, and what failed twice."""
    results: list[tuple[int, str]] = []

    def keep(job, played):
        results.append((job, played.trajectory.final_text))

    failed = asyncio.run(
        play_all(jobs, play, keep, services or ServiceGroup([]), concurrency=concurrency, description="test")
    )
    return results, failed


@given(st.integers(0, 20), st.integers(1, 6))
def test_every_job_is_played_once_with_no_more_at_once_than_asked(count, concurrency):
    started: list[int] = []
    running = most = 0

    async def play(job):
        nonlocal running, most
        started.append(job)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return conversation(f"result {job}")

    results, failed = play_jobs(range(count), play, concurrency)
    assert sorted(started) == list(range(count))
    assert sorted(results) == [(job, f"result {job}") for job in range(count)]
    assert failed == []
    assert most == min(count, concurrency)


def test_a_result_is_handed_over_while_others_still_run():
    handed_over = asyncio.Event()

    async def play(job):
        if job == 0:
            await handed_over.wait()  # would wait for ever if results came only at the end
        return conversation("done")

    order: list[int] = []

    def keep(job, _):
        order.append(job)
        handed_over.set()

    asyncio.run(play_all([0, 1], play, keep, ServiceGroup([]), concurrency=2, description="test"))
    assert order == [1, 0]


def test_a_conversation_cut_short_is_played_again_after_all_others_with_a_line_that_says_why(capsys):
    played: list[int] = []

    async def play(job):
        played.append(job)
        return conversation("text", "server away" if job == 1 and played.count(1) == 1 else None)

    results, failed = play_jobs([0, 1, 2, 3], play, concurrency=1)
    assert played == [0, 1, 2, 3, 1]
    assert [job for job, _ in results] == [0, 2, 3, 1]
    assert failed == [] and "1 failed and are tried again; 1 times: server away" in capsys.readouterr().out


def test_what_fails_twice_is_returned_with_its_reason_and_never_handed_over():
    async def play(job):
        return conversation("half a text", "search away" if job == 1 else None)

    results, failed = play_jobs([0, 1, 2], play)
    assert sorted(job for job, _ in results) == [0, 2]
    assert failed == [Failed(1, "search away")]


@pytest.mark.parametrize("error", [SolverServerError("refused: HTTP 400"), SearchRequestError("HTTP 404")])
def test_a_refused_request_ends_it_at_once_with_the_servers_words(error):
    played: list[int] = []

    async def play(job):
        played.append(job)
        raise error

    with pytest.raises(ConversationsFailed, match=str(error)):
        play_jobs(range(100), play, concurrency=2)
    assert len(played) == 2


def test_a_mistake_of_our_own_is_not_taken_for_a_failing_server():
    async def play(job):
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        play_jobs([0], play)


def test_a_long_row_of_failures_ends_it_without_trying_the_rest():
    played: list[int] = []

    async def play(job):
        played.append(job)
        return conversation("", "server away")

    with pytest.raises(ConversationsFailed, match=r"8 conversations in a row.*8 times.*server away"):
        play_jobs(range(1000), play, concurrency=4)
    assert len(played) == 8


def test_no_conversation_is_left_running_when_it_ends_in_an_error():
    cancelled: list[int] = []

    async def play(job):
        if job == 0:
            raise SolverServerError("refused")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(job)
            raise
        return conversation("never")

    with pytest.raises(ConversationsFailed):
        play_jobs([0, 1, 2], play, concurrency=3)
    assert cancelled == [1, 2]


def test_a_dead_service_is_named_while_conversations_still_wait_for_it(tmp_path):
    spec = ServiceSpec(
        name="retrieval",
        command=(sys.executable, "-c", "import sys; print('ValueError: lost my index'); sys.exit(3)"),
        log_path=tmp_path / "retrieval.log",
        health_url="never asked",
    )

    async def play(job):
        await asyncio.sleep(3600)
        return conversation("never")

    with ServiceGroup([]) as services:
        services.services.append(Service(spec, grace_s=1.0))
        with pytest.raises(ServiceDied, match=r"service 'retrieval' died(.|\n)*lost my index"):
            play_jobs([0, 1], play, services=services)


@pytest.mark.parametrize(("failed", "raises"), [(0, False), (2, False), (3, True)])
def test_too_large_a_share_of_failures_is_an_error_that_names_the_commonest_cause(failed, raises):
    failures = [Failed(job, "search away" if job else "server away") for job in range(failed)]
    if not raises:
        check_failed_share(failures, total=8, max_share=0.25)
        return
    with pytest.raises(ConversationsFailed, match=r"3 of 8 .*2 times\): search away.*rerun"):
        check_failed_share(failures, total=8, max_share=0.25)
