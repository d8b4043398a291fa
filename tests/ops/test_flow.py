"""The flow monitor: what it reads, what it writes, and when it logs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import PlainTextResponse
from search_parts import wait_for

from drzero.ops.console import say
from drzero.ops.flow.monitor import FlowMonitor, FlowTimes, line
from drzero.ops.flow.snapshot import FlowPoint, Snapshot
from drzero.ops.flow.sources import QueueMetrics, counters_source, service_source, workers_source
from drzero.ops.flow.workers import OpenCall, Worker, worker_lines

COUNTERS: dict[str, Any] = {
    "points": {"prompts": {"depth": 5, "oldest_age_s": 12.0, "in": 20, "out": 15, "dropped": 0, "errors": 0}},
    "samples": {"asked": 20, "produced": 15, "accepted": 12, "invalid": 1, "stale": 2, "in_flight": 5},
    "warmup": False,
    "about": {"step": 3, "mode": "sync"},
}


def write_counters(path: Path, at: float, **changes: Any) -> None:
    path.write_text(json.dumps(COUNTERS | {"time": at} | changes) + "   ")


@pytest.fixture
def monitor(tmp_path):
    return FlowMonitor(
        tmp_path / "flow.jsonl",
        [counters_source(tmp_path / "counters.json", 1000.0)],
        {"buffer": ("prompts",)},
        FlowTimes(every_s=5, log_every_s=30, floor_s=60),
        log=say,
    )


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (tmp_path / "flow.jsonl").read_text().splitlines()]


def test_every_poll_is_one_line_of_the_stream(tmp_path, monitor):
    write_counters(tmp_path / "counters.json", 1005.0)
    monitor.poll(1006.0)
    write_counters(
        tmp_path / "counters.json", 1010.0, samples=COUNTERS["samples"] | {"produced": 20, "accepted": 17}
    )
    monitor.poll(1011.0)
    first, second = records(tmp_path)
    assert first["points"]["prompts"] == COUNTERS["points"]["prompts"]
    assert first["about"] == {"step": 3, "mode": "sync"}
    assert first["rates"] is None
    assert second["rates"] == dict.fromkeys(("produced", "accepted"), 1.0) | dict.fromkeys(
        ("invalid", "stale", "filtered"), 0.0
    )
    assert second["silent_s"] == 1.0
    assert second["samples"]["lost"] == 0
    assert second["symptoms"] == []


@pytest.mark.parametrize(
    "content", [None, "", "{", '{"time": 2000}', '{"time": 2000, "points": 5}', json.dumps({"time": 999.0})]
)
def test_without_counts_of_this_start_nothing_is_written(tmp_path, monitor, content):
    if content is not None:
        (tmp_path / "counters.json").write_text(content)
    assert monitor.poll(2001.0) is None and not (tmp_path / "flow.jsonl").exists()
    write_counters(tmp_path / "counters.json", 999.0)  # an earlier start
    assert monitor.poll(2002.0) is None


def test_a_line_is_logged_periodically_and_a_symptom_at_once_and_once(tmp_path, monitor, capsys):
    monitor._logged_at = 1000.0
    for number in range(1, 13):
        at = 1000.0 + 5 * number
        errors = 1 if number >= 2 else 0
        points = {"prompts": COUNTERS["points"]["prompts"] | {"errors": errors}}
        write_counters(tmp_path / "counters.json", at, points=points)
        monitor.poll(at)
    found, first, over, last = capsys.readouterr().out.splitlines()
    assert found.startswith("[flow] errors, prompts: 1 more have failed, 1 in all")
    assert over == "[flow] errors, prompts: over"
    assert first.startswith("[flow] step 3: ") and last.startswith("[flow] step 3: ")
    assert [symptom.check for symptom in monitor.symptoms] == ["errors"]


def test_a_stream_that_cannot_be_written_does_not_stop_the_monitor(tmp_path, monitor):
    (tmp_path / "flow.jsonl").mkdir()
    write_counters(tmp_path / "counters.json", 1005.0)
    assert monitor.poll(1006.0) is not None


def test_the_teardown_after_the_end_is_not_written(tmp_path, monitor):
    write_counters(tmp_path / "counters.json", 1005.0, ended=True)
    monitor.poll(1006.0)
    monitor.poll(1011.0)
    assert [record["ended"] for record in records(tmp_path)] == [True]


# Sources ---------------------------------------------------------------------------------------------


def worker_file(folder: Path, pid: int, at: float, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    record = {"time": at, "pid": pid, "title": "w", "done": {}, "failed": {}, "open": [], "loops": []}
    (folder / f"{pid}.json").write_text(json.dumps(record | fields))


def test_a_poll_that_fails_is_logged_once_and_polling_continues_until_the_end(tmp_path, capsys):
    polls = []

    def source(now: float) -> Snapshot:
        polls.append(now)
        if len(polls) < 4:
            raise ValueError("nonsense")
        return Snapshot(time=now, points={"prompts": FlowPoint(depth=1)})

    with FlowMonitor(tmp_path / "flow.jsonl", [source], {}, FlowTimes(every_s=0.05)) as monitor:
        wait_for(lambda: monitor.last is not None, 20)
    assert capsys.readouterr().out == "[flow] cannot read the flow: ValueError('nonsense')\n"
    assert records(tmp_path) and not monitor.is_alive()


def test_calls_in_flight_are_summed_over_the_workers_with_the_age_of_the_oldest(tmp_path):
    alive, gone = os.getpid(), 2**22 + 1
    calls = [["search", 990.0, 60], ["rollout", 980.0, None], ["search", 999.0, 60]]
    worker_file(tmp_path, alive, 1000.0, done={"search": 7, "token": 500}, failed={"search": 1}, open=calls)
    worker_file(tmp_path, gone, 1000.0, done={"search": 3}, open=[["search", 900.0, 60]])
    read = workers_source(tmp_path, ("search", "rollout", "reward"), 0.0, {"token": "rollout"})
    taken = read(1001.0)
    assert taken is not None
    assert taken.points["search"] == FlowPoint(
        depth=2, oldest_age_s=11.0, came=13, out=10, errors=1, at=1001.0
    )
    assert taken.points["rollout"].work == 500
    assert "reward" not in taken.points  # never called: this run has none


def test_workers_of_an_earlier_start_are_left_out(tmp_path):
    worker_file(tmp_path, os.getpid(), 1000.0, done={"search": 7})
    assert workers_source(tmp_path, ("search",), 1500.0, {})(1600.0) is None


def test_a_services_queue_is_read_from_its_metrics(start_peer):
    page = '# HELP q x\nq_depth 4\nq_done_total{a="1"} 10\nq_done_total{a="2"} 5\nq_refused_total 2\n'
    peer = start_peer("/post", lambda body: body, {"/metrics": PlainTextResponse(page)})
    metrics = QueueMetrics(depth="q_depth", out="q_done_total", dropped="q_refused_total")
    taken = service_source("queue", f"{peer.url}/metrics", metrics)(50.0)
    assert taken is not None
    assert taken.points["queue"] == FlowPoint(depth=4, came=21, out=15, dropped=2, at=50.0)
    assert service_source("queue", "http://127.0.0.1:9/metrics", metrics)(50.0) is None  # it does not answer


# The line ---------------------------------------------------------------------------------------------


def test_the_line_has_rates_depths_ages_waits_and_staleness(tmp_path):
    read = counters_source(tmp_path / "counters.json", 0.0)
    write_counters(tmp_path / "counters.json", 1000.0)
    before = read(1000.0)
    points = {
        "prompts": COUNTERS["points"]["prompts"],
        "buffer": {"depth": 6, "oldest_age_s": 3.2, "in": 0, "out": 0, "dropped": 0, "capacity": 40},
        "search": {"depth": 0, "oldest_age_s": None, "in": 4, "out": 4, "dropped": 0},
    }
    write_counters(
        tmp_path / "counters.json",
        1010.0,
        points=points,
        samples=COUNTERS["samples"] | {"produced": 20, "stale": 3},
        waiting={"point": "buffer", "have": 6, "want": 8, "since": 1002.0},
        about={"step": 4, "staleness": {"limit": 7, "waiting_max": 2, "trained_mean": 0.5, "evicted": 3}},
    )
    now = read(1010.0)
    assert before is not None and now is not None
    assert line(before, now) == (
        "step 4: produced 0.5/s accepted 0/s invalid 0/s stale 0.1/s filtered 0/s | "
        "prompts 5 (12 s), buffer 6/40 (3 s), search 0 | next batch 6/8 for 8 s | "
        "behind 2, trained 0.5 (limit 7), evicted 3"
    )


def test_a_run_of_which_nothing_is_known_has_a_line_too():
    assert line(None, Snapshot(time=1.0)) == "no point is known yet"


def test_the_end_of_the_warm_up_is_a_line_with_its_time_and_once(tmp_path, monitor, capsys):
    write_counters(tmp_path / "counters.json", 1005.0, warmup=True)
    monitor.poll(1006.0)
    assert "warm-up" not in capsys.readouterr().out
    for at in (1010.0, 1015.0):
        write_counters(tmp_path / "counters.json", at, about={"step": 1, "mode": "sync", "warmup_s": 4.1})
        monitor.poll(at + 1)
    assert capsys.readouterr().out == "[flow] warm-up is complete after 4.1 s: the first batch is taken\n"


def test_each_worker_has_a_line_of_what_it_has_done_failed_and_waits_for():
    was = Worker(7, "ray::LoadWorker(x)", {"put": 20.0}, {}, (), 0.0, None)
    calls = (OpenCall("rollout", 7, 3.0), OpenCall("rollout", 7, 1.0))
    now = Worker(7, "ray::LoadWorker(x)", {"put": 40.0}, {"put": 2.0}, calls, 9.0, None)
    idle = Worker(8, "ray::Idle", {}, {}, (), 0.0, None)
    assert worker_lines([was], [now, idle], 10.0) == [
        "ray::LoadWorker 7: put 40 (2/s), 2 failed | rollout 0 (0/s), 2 open for up to 3 s | silent for 9 s"
    ]
