"""A run that needs the nodes of a cluster, with a scripted view of them: what ends it, in which words."""

import json
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from search_parts import wait_for

from drzero.ops import supervisor
from drzero.ops.cluster.watch import NodeLost, NodeWatch, follower
from drzero.ops.files import atomic_write
from drzero.ops.process.child import Command
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.services.services import ServiceGroup
from drzero.ops.supervisor import ChildFailed, run_supervised
from drzero.ops.watchdog.post_mortem import examine

ADDRESS, HEAD, SECOND, THIRD = "10.0.0.1:6379", "10.0.0.1", "10.0.0.2", "10.0.0.3"
See = Callable[[dict[str, bool]], None]
"""Shows the follower which nodes are alive, by address."""


def seen(nodes: dict[str, bool]) -> str:
    return json.dumps(
        [
            {"id": address[-1] * 56, "address": address, "host": "gpu", "alive": alive, "cpu": 8, "gpu": 1}
            for address, alive in nodes.items()
        ]
    )


@pytest.fixture
def see(tmp_path):
    return lambda nodes: atomic_write(tmp_path / "seen.json", seen(nodes))


def python(name: str, program: str, folder: Path) -> Command:
    return Command(name=name, command=(sys.executable, "-c", program), log_path=folder / f"logs/{name}.log")


def watch(folder: Path, follower: str = "import time; time.sleep(600)") -> NodeWatch:
    return NodeWatch(ADDRESS, 2, python("nodes", follower, folder), folder / "seen.json")


@pytest.fixture
def nodes(tmp_path):
    with watch(tmp_path) as following:
        yield following


@pytest.mark.parametrize(
    "views",
    [
        [],
        [{HEAD: True, SECOND: True}, {HEAD: True, SECOND: True}],
        [{HEAD: True, SECOND: True, THIRD: False}],
        [{HEAD: True, SECOND: True, THIRD: third} for third in (False, True, False)],
    ],
    ids=["no answer yet", "all there", "lost before the start", "joined and left later"],
)
def test_nothing_is_raised_while_the_first_nodes_are_there(nodes, see, views):
    nodes.check()
    for view in views:
        see(view)
        nodes.check()


LOST = (
    "node 10.0.0.2 (gpu, 22222222) is lost: it gives Ray no sign of life; start Ray there again "
    "(docs/scale.md), then rerun to resume"
)


@pytest.mark.parametrize(
    ("views", "said"),
    [
        ([{HEAD: True, SECOND: True}, {HEAD: True, SECOND: False}], LOST),
        # Its Ray comes back as another node, by another id.
        ([{HEAD: True, SECOND: True}, {HEAD: True, SECOND: False, THIRD: True}], LOST),
        ([{HEAD: True, SECOND: False}], "has 1 of 2 nodes: 10.0.0.1 (gpu, 11111111)"),
    ],
    ids=["left", "came back", "too few at the start"],
)
def test_a_missing_node_is_named_with_what_to_do(nodes, see, views, said):
    for view in views[:-1]:
        see(view)
        nodes.check()
    see(views[-1])
    with pytest.raises(NodeLost, match=re.escape(said)):
        nodes.check()


def test_a_head_that_does_not_answer_is_named_with_the_reason(tmp_path):
    said = r"head .*10\.0\.0\.1:6379.* not answer: nothing answers there"
    with (
        watch(tmp_path, "raise SystemExit('nothing answers there')") as nodes,
        pytest.raises(NodeLost, match=said),
    ):
        nodes.check(patience_s=60)


def test_a_follower_that_ends_after_an_answer_is_started_again(tmp_path):
    answers = f"""
import pathlib
begun = pathlib.Path({str(tmp_path / "begun")!r})
first = not begun.exists()
begun.touch()
pathlib.Path({str(tmp_path / "seen.json")!r}).write_text({seen({HEAD: True, SECOND: True})!r} if first
    else {seen({HEAD: True, SECOND: False})!r})
"""
    with watch(tmp_path, answers) as nodes:
        wait_for((tmp_path / "seen.json").exists, 60)
        with pytest.raises(NodeLost, match=r"node 10\.0\.0\.2 "):
            nodes.check(patience_s=60)


def test_an_address_at_which_nothing_listens_is_a_head_that_does_not_answer(tmp_path):
    command = follower("127.0.0.1:1", tmp_path / "seen.json", tmp_path / "nodes.log", {})
    with (
        NodeWatch("127.0.0.1:1", 2, command, tmp_path / "seen.json") as nodes,
        pytest.raises(NodeLost, match=r"nothing answers there \(Connection refused\)"),
    ):
        nodes.check(patience_s=120)


# What becomes of the run -----------------------------------------------------------------------------------


def losing(folder: Path) -> Command:
    """A trainer that has the view of the cluster lose a node, and then waits."""
    program = f"""
import os, pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path({str(folder / "pid")!r}).write_text(str(child.pid))
time.sleep(1.0)
pathlib.Path({str(folder / "next")!r}).write_text({seen({HEAD: True, SECOND: False})!r})
os.replace({str(folder / "next")!r}, {str(folder / "seen.json")!r})
time.sleep(600)
"""
    return python("trainer", program, folder)


def supervise(folder: Path, trainer: Command, nodes: NodeWatch) -> None:
    events = EventLog(folder / "logs" / EVENTS_FILE)
    with ServiceGroup([], events=events) as services:
        run_supervised(trainer, services, nodes=nodes)


def test_a_run_whose_node_is_lost_ends_at_once_with_all_of_its_processes(tmp_path, nodes, see):
    see({HEAD: True, SECOND: True})
    nodes.check()
    with pytest.raises(NodeLost, match=r"node 10\.0\.0\.2 .* is lost") as raised:
        supervise(tmp_path, losing(tmp_path), nodes)
    assert raised.value.exit_code == 1
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    death = examine(tmp_path)
    assert (death.state, death.culprit) == ("failed", "node 10.0.0.2 (gpu, 22222222)")
    assert "rerun to resume" in death.advice


def test_a_trainer_that_fails_because_of_a_lost_node_is_not_blamed(tmp_path, nodes, see):
    # Its connections break sooner than Ray calls the node lost.
    see({HEAD: True, SECOND: True})
    nodes.check()
    ended = python("trainer", "raise SystemExit(1)", tmp_path)
    noticed = threading.Timer(3.0, see, [{HEAD: True, SECOND: False}])
    noticed.start()
    with pytest.raises(NodeLost):
        supervise(tmp_path, ended, nodes)
    noticed.join()


def test_a_trainer_that_fails_by_itself_is_blamed(tmp_path, nodes, see, monkeypatch):
    monkeypatch.setattr(supervisor, "NOTICED_S", 0.5)
    see({HEAD: True, SECOND: True})
    nodes.check()
    with pytest.raises(ChildFailed):
        supervise(tmp_path, python("trainer", "raise SystemExit(1)", tmp_path), nodes)
