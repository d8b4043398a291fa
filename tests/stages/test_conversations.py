"""Many conversations at once: bounds, retries, and who is blamed when they fail."""

import asyncio
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from drzero.ops.errors import OutOfTime
from drzero.ops.services.services import Service, ServiceDied, ServiceGroup, ServiceSpec
from drzero.ops.stop_time import STOP_VARIABLE
from drzero.stages import conversations
from drzero.stages.conversations import ConversationsFailed, Failed, play_all
from search.client import SearchRequestError
from verl_ext.clients.search_agent import Conversation
from verl_ext.clients.served_model import SolverServerError
from verl_ext.method.trajectory import Trajectory, Turn


@pytest.fixture(autouse=True)
def no_pause_for_blame(monkeypatch):
    """The moment that a dying service is given is nothing to wait for where there is no service."""
    monkeypatch.setattr(conversations, "_BLAME_S", 0.0)


def conversation(text, failure=None):
    return Conversation(Trajectory((Turn(text),)), failure is None, failure, 1, 1, 0, 0.0)


class Player:
    """Plays jobs by a function: their starts in order, results as they are handed over, what failed twice."""

    def __init__(self, play):
        self.started, self.results, self.failed, self._play = [], [], [], play

    async def _start(self, job):
        self.started.append(job)
        played = self._play(job)
        return await played if asyncio.iscoroutine(played) else played

    def _keep(self, job, played):
        self.results.append((job, played.trajectory.final_text))

    def play(self, jobs, concurrency=4, services=None, max_share=1.0, total=None):
        group, total = services or ServiceGroup([]), total or len(jobs)
        config = OmegaConf.create(
            {"solver": {"concurrency": concurrency}, "run": {"max_failed_share": max_share}}
        )
        playing = play_all(config, jobs, self._start, self._keep, group, total=total, description="test")
        self.failed = asyncio.run(playing)


@given(st.integers(0, 20), st.integers(1, 6))
def test_every_job_is_played_once_with_no_more_at_once_than_asked(count, concurrency):
    running = most = 0

    async def play(job):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return conversation(f"result {job}")

    player = Player(play)
    player.play(range(count), concurrency)
    assert sorted(player.started) == list(range(count))
    assert sorted(player.results) == [(job, f"result {job}") for job in range(count)]
    assert (player.failed, most) == ([], min(count, concurrency))


def test_a_result_is_handed_over_while_others_still_run():
    async def play(job):
        while job == 0 and not player.results:  # would wait for ever if results came only at the end
            await asyncio.sleep(0)
        return conversation("done")

    player = Player(play)
    player.play([0, 1], concurrency=2)
    assert player.results == [(1, "done"), (0, "done")]


def test_a_conversation_cut_short_is_played_again_after_all_others_with_a_line_that_says_why(capsys):
    def play(job):
        return conversation("text", "server away" if job == 1 and player.started.count(1) == 1 else None)

    player = Player(play)
    player.play([0, 1, 2, 3], concurrency=1)
    assert player.started == [0, 1, 2, 3, 1]
    assert [job for job, _ in player.results] == [0, 2, 3, 1] and player.failed == []
    assert "1 failed and are tried again; 1 times: server away" in capsys.readouterr().out


def test_what_fails_twice_is_returned_with_its_reason_and_never_handed_over():
    player = Player(lambda job: conversation("half a text", "search away" if job == 1 else None))
    player.play([0, 1, 2])
    assert sorted(job for job, _ in player.results) == [0, 2]
    assert player.failed == [Failed(1, "search away")]


def test_at_the_stop_time_no_job_is_begun_and_one_that_takes_too_long_is_dropped(monkeypatch):
    async def play(job):
        if job == 3:
            monkeypatch.setenv(STOP_VARIABLE, str(time.time() + 10))
            await asyncio.sleep(3600)
        return conversation("done")

    player = Player(play)
    ended = r"after 3 of 8 conversations.*Finished ones are kept: rerun to resume"
    with pytest.raises(OutOfTime, match=ended):
        player.play(range(8), concurrency=1)
    assert player.started == [0, 1, 2, 3] and [job for job, _ in player.results] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (SolverServerError("refused: HTTP 400"), ConversationsFailed),
        (SearchRequestError("HTTP 404"), ConversationsFailed),
        (KeyError("typo"), KeyError),  # a mistake of our own is not taken for a failing server
    ],
)
def test_a_refused_request_ends_it_at_once_with_the_servers_words(error, ends):
    async def play(job):
        raise error

    player = Player(play)
    with pytest.raises(ends, match=str(error)):
        player.play(range(100), concurrency=2)
    assert len(player.started) == 2


def test_a_long_row_of_failures_ends_it_without_trying_the_rest():
    player = Player(lambda job: conversation("", "server away"))
    with pytest.raises(ConversationsFailed, match=r"8 conversations in a row.*8 times.*server away"):
        player.play(range(1000))
    assert len(player.started) == 8


def test_no_conversation_is_left_running_when_it_ends_in_an_error():
    cancelled = []

    async def play(job):
        if job == 0:
            raise SolverServerError("refused")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(job)
            raise

    with pytest.raises(ConversationsFailed):
        Player(play).play([0, 1, 2])
    assert cancelled == [1, 2]


def test_a_dead_service_is_named_while_conversations_still_wait_for_it(tmp_path):
    spec = ServiceSpec(
        name="retrieval",
        command=(sys.executable, "-c", "import sys; print('ValueError: lost my index'); sys.exit(3)"),
        log_path=tmp_path / "retrieval.log",
        health_url="never asked",
    )
    with ServiceGroup([]) as services:
        services.services.append(Service(spec, grace_s=1.0))
        with pytest.raises(ServiceDied, match=r"service 'retrieval' died(.|\n)*lost my index"):
            Player(lambda job: asyncio.sleep(3600)).play([0, 1], services=services)


def test_too_large_a_share_of_failures_is_an_error_that_names_the_commonest_cause():
    reasons = ["server away", "search away", "search away"]
    player = Player(lambda job: conversation("", reasons[job] if job < 3 else None))
    player.play(range(1, 8), max_share=0.25, total=8)  # two of eight, one of them played by an earlier start
    assert len(player.failed) == 2
    with pytest.raises(ConversationsFailed, match=r"3 of 8 .*2 times\): search away.*rerun"):
        player.play(range(8), max_share=0.25)
