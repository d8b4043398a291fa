"""The view of a recorded run: on terminals, in a pipe, by `drzero top`."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import replay
from omegaconf import OmegaConf
from terminal import Terminal, stopped_terminal

from bench.console_picture import draw
from drzero.cli import main
from drzero.ops.console import say
from drzero.ops.files import write_jsonl
from drzero.ops.notices import Notice
from drzero.ops.process.lock import HeldLock
from drzero.ops.records import JsonTail, append_json_lines, read_json_lines, shape
from drzero.recipe.metrics import read_metrics
from drzero.runs.view.follow import LiveView
from drzero.runs.view.run_state import RunFacts, RunFiles, RunState, shown_s
from drzero.runs.view.screen import screen, trend

Starts = Callable[..., Terminal]
Printed = pytest.CaptureFixture[str]
FACTS = RunFacts("demo", "hrpo", steps=4)
HOSTILE = "\x1b]0;mine\x07\x1b[2J\u202etxt"
SHOWN = r"\x1b]0;mine\x07\x1b[2J\u202etxt"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The recorded run's folder."""
    folder = shutil.copytree(replay.RECORDED, tmp_path / "demo")
    OmegaConf.save(OmegaConf.create(replay.CONFIG), folder / "resolved.yaml")
    return folder


@pytest.fixture
def open_terminal(tmp_path: Path) -> Iterator[Starts]:
    opened: list[Terminal] = []

    def start(*words: str, seconds: float = 2.0, **options: Any) -> Terminal:
        command = [sys.executable, replay.__file__, str(tmp_path / "run"), str(seconds), *words]
        opened.append(Terminal(command, **options))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


class TestOnATerminal:
    def test_it_is_one_picture_that_ends_with_all_events(self, open_terminal: Starts, tmp_path: Path) -> None:
        terminal = open_terminal("--shout", HOSTILE, "--hold", seconds=0.1)
        terminal.read_until(lambda: re.search(r"^demo: step 2 of 4, update for \d+:", terminal.display))
        assert terminal.screen.cursor.hidden
        (tmp_path / "run" / "go").touch()
        assert terminal.read_to_end() == 0
        shown = terminal.scrolled
        # Every line once: no older picture is left above.
        for line in ("demo: ended", "reward ", "solver right", "trainer    checkpoint of step 2", "host "):
            assert shown.count(line) == 1, shown
        assert re.search(r"reward +0\.469 █▁▃▂ .*some, not all +0\.125", shown)
        assert re.search(r"\$0\.00 so far|since its start", shown) and "0/5 20  1/5 4" in shown
        assert SHOWN in shown and HOSTILE.encode() not in terminal.written
        assert not terminal.screen.cursor.hidden and terminal.screen.title == ""

    def test_a_narrowed_window_has_one_picture_of_its_width(self, open_terminal: Starts) -> None:
        terminal = open_terminal("--wait")
        terminal.read_until(lambda: "some, not all" in terminal.display)
        terminal.resize(44, 30)
        pair = re.compile(r"reward .* some")
        terminal.read_until(lambda: "reward" in terminal.display and not pair.search(terminal.display))
        assert terminal.display.count("demo: ") == 1 and terminal.display.count("reward") == 1
        terminal.press(b"\x03")
        assert terminal.read_to_end() == 130
        assert terminal.display.endswith("drzero replay: interrupted; rerun to resume")
        conditions = re.findall(r"^(trainer|solver|retrieval) +(\w+)", terminal.scrolled, re.MULTILINE)
        assert dict(conditions) == {"trainer": "ended", "solver": "stopped", "retrieval": "stopped"}
        assert not terminal.screen.cursor.hidden

    def test_a_failure_ends_below_the_picture_with_its_cause_and_the_log(
        self, open_terminal: Starts, tmp_path: Path
    ) -> None:
        terminal = open_terminal("--fail", seconds=0.1, columns=120, lines=60)
        assert terminal.read_to_end() == 1
        picture, message = terminal.display.split("drzero replay: ")
        assert "reward" in picture and r"trainer    ValueError: no such thing\x1b[2J" in picture
        assert message.splitlines() == failure(tmp_path / "run")
        assert not terminal.screen.cursor.hidden and b"\x1b[2J" not in terminal.written

    def test_a_terminal_that_cannot_draw_gets_the_lines_of_a_pipe(self, open_terminal: Starts) -> None:
        terminal = open_terminal(seconds=0.1, TERM="dumb", columns=200)
        assert terminal.read_to_end() == 0
        assert b"\x1b" not in terminal.written and "[trainer] step 4/4: reward 0.47" in terminal.display

    def test_it_works_without_colours_and_a_stopped_run_leaves_the_picture(
        self, open_terminal: Starts
    ) -> None:
        terminal = open_terminal("--wait", seconds=0.1, NO_COLOR="1")
        terminal.read_until(lambda: "reward" in terminal.display)
        terminal.process.terminate()
        assert terminal.read_to_end() == 128 + signal.SIGTERM
        assert "reward" in terminal.display and not terminal.screen.cursor.hidden
        assert not re.search(rb"\x1b\[3\dm", terminal.written)


def failure(folder: Path) -> list[str]:
    """The command's report on a failed trainer."""
    return [
        "'trainer' failed: exit code 3",
        r"first error: ValueError: no such thing\x1b[2J",
        "last lines:",
        "  Traceback (most recent call last):",
        "    File 'a.py', line 1, in <module>",
        r"  ValueError: no such thing\x1b[2J",
        f"log: {folder / 'logs' / 'trainer.log'}",
    ]


def test_in_a_pipe_it_is_a_line_a_step_and_the_events(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, replay.__file__, str(tmp_path), "0.5", "--shout", HOSTILE, "--fail"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and len(lines) <= 20 and "\x1b" not in done.stdout + done.stderr
    assert done.stderr.removeprefix("drzero replay: ").splitlines() == failure(tmp_path)
    assert r"[trainer] ValueError: no such thing\x1b[2J" in lines
    steps = [line for line in lines if re.match(r"\[trainer\] step [1-4]/4: reward 0\.\d\d, valid", line)]
    assert len(steps) == 4
    saved = [f"[trainer] checkpoint of step {step}: global_step_{step}" for step in (2, 4)]
    assert [line for line in lines if "checkpoint of" in line] == saved
    assert f"[solver] {SHOWN}" in lines and "[retrieval] ready after 21.7 s" in lines


def test_a_pipe_that_is_closed_ends_nothing(tmp_path: Path) -> None:
    replayed = subprocess.Popen(
        [sys.executable, replay.__file__, str(tmp_path), "0.5"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert replayed.stdout and replayed.stdout.readline()
    replayed.stdout.close()  # as `head -1` does
    _, errors = replayed.communicate()
    assert (replayed.returncode, errors) == (0, b"")
    assert read_metrics(tmp_path) == read_metrics(replay.RECORDED)


def test_a_stopped_terminal_blocks_nobody_and_later_shows_the_rest() -> None:
    with stopped_terminal() as (seen, terminal):
        view = LiveView(RunState(FACTS)).__enter__()
        for number in range(1000):
            view.draw()
            view.line(f"line {number}")
            say("solver", f"notice {number}")
        termios.tcflow(terminal, termios.TCOON)
        leaving = threading.Thread(target=view.__exit__)  # draws more than a terminal takes at once
        leaving.start()
        shown = b""
        while leaving.is_alive() or select.select([seen], [], [], 0)[0]:
            if select.select([seen], [], [], 0.1)[0]:
                shown += os.read(seen, 1 << 16)
    for kind in ("line", "notice"):
        assert [int(number) for number in re.findall(rf"{kind} (\d+)".encode(), shown)] == [*range(1000)]


class TestTop:
    def test_a_run_that_has_ended_is_printed_once(self, run: Path, capsys: Printed) -> None:
        assert main(["top", str(run)]) == 0
        printed = capsys.readouterr().out
        assert "demo: ended\n" in printed and re.search(r"reward +0\.469", printed)
        assert "checkpoint of step 4" in printed and "\x1b" not in printed
        assert re.search(r"retrieval +stopped", printed) and "$0.98 so far" in printed

    def test_of_a_loop_it_shows_the_stage_begun_last(self, run: Path, capsys: Printed) -> None:
        loop = run.parent / "evolve"
        loop.mkdir()
        assert main(["top", str(loop)]) == 2 and "holds no run" in capsys.readouterr().err
        begun = {"evaluate_iter0": {"state": "complete"}, "demo": {"state": "running"}}
        (loop / "manifest.json").write_text(json.dumps({"stages": begun | {"merge": {"state": "pending"}}}))
        assert main(["top", str(loop)]) == 0
        assert "demo: ended\n" in capsys.readouterr().out

    def test_a_run_that_was_killed_is_shown_where_it_ended(self, run: Path, capsys: Printed) -> None:
        events = (run / "logs" / "events.jsonl").read_text().splitlines()
        (run / "logs" / "events.jsonl").write_text("\n".join(events[:5]) + "\n")
        beats = (run / "heartbeats.jsonl").read_text().splitlines()
        (run / "heartbeats.jsonl").write_text("\n".join(beats[:9]) + "\n")
        assert main(["top", str(run)]) == 0
        printed = capsys.readouterr().out
        assert "demo: ended in step 2 of 4, advantage\n" in printed and re.search(r"retrieval +gone", printed)

    def test_a_run_that_was_killed_and_started_again_is_timed_from_its_last_start(
        self, run: Path, capsys: Printed
    ) -> None:
        path = run / "logs" / "events.jsonl"
        killed = read_json_lines(path)[:6]
        again = [event | {"time": event["time"] + 100_000, "pid": 3} for event in killed[:3]]
        write_jsonl(path, [*killed, *again])
        assert main(["top", str(run)]) == 0
        printed = capsys.readouterr().out
        assert "demo: ended in start-up" in printed and "0:19 since its start" in printed

    def test_a_running_one_is_drawn_until_it_ends(self, run: Path) -> None:
        command = [sys.executable, "-m", "drzero.cli", "top", str(run)]
        with HeldLock(run / "lock"):
            terminal = Terminal(command, lines=40)
            terminal.read_until(lambda: "reward" in terminal.display)
            event = {"time": time.time(), "kind": "alarm", "component": "trainer", "text": HOSTILE}
            append_json_lines(run / "logs" / "events.jsonl", event)
            terminal.read_until(lambda: SHOWN in terminal.display)
        assert terminal.read_to_end() == 0 and "demo: ended" in terminal.display
        terminal.close()


def test_the_docs_picture_is_of_one_moment_and_loads_nothing(run: Path, tmp_path: Path) -> None:
    events = run / "logs" / "events.jsonl"
    events.write_text(events.read_text().replace('"log": "logs/', '"log": "/home/me/demo/logs/'))
    config = replay.CONFIG | {"run": {"dir": "/home/me/demo", "name": "demo"}}
    OmegaConf.save(OmegaConf.create(config), run / "resolved.yaml")
    draw(run, tmp_path / "view.svg", 0.75)
    picture = re.sub(r"<[^>]*>|&#160;", " ", (tmp_path / "view.svg").read_text())
    assert "step 3 of 4" in picture and "0.385" in picture and "ended" not in picture
    assert "log: logs/trainer.log" in " ".join(picture.split()) and "/home/me" not in picture
    assert not re.findall(r"(?:url\(|href=|src=)[\"']?http\S*", (tmp_path / "view.svg").read_text())


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [3, 6, 24])
def test_a_picture_never_leaves_its_terminal(run: Path, width: int, height: int) -> None:
    files = RunFiles(run, FACTS)
    files.poll()
    long = Notice(0.0, "solver", "日本語のとても長い一行 " * 40, "error")
    lines = screen(files.state, [long] * 5, 1795413000.0, width, height).split()
    assert len(lines) <= height and max(line.cell_len for line in lines) <= width


def test_with_room_for_all_no_notice_is_shortened(run: Path) -> None:
    files = RunFiles(run, FACTS)
    files.poll()
    text = "/a/long/path" * 30
    shown = screen(files.state, [Notice(0.0, "solver", text)], 1795413000.0, 40, None).plain
    assert text in "".join(line.strip() for line in shown.splitlines())


def test_the_picture_of_an_environments_run_has_the_parts_of_its_reward() -> None:
    step = {"training/global_step": 1, "drzero/reward/score": 0.5, "drzero/reward/part/greens": 0.25}
    state = RunState(RunFacts("words", "environment", steps=2), metrics={1: step})
    assert re.search(r"greens +0.25", screen(state, [], 0.0, 80, 24).plain)


def test_the_picture_of_a_run_that_has_not_begun_says_so(tmp_path: Path) -> None:
    files = RunFiles(tmp_path, FACTS)
    assert files.poll() == ([], [])
    shown = screen(files.state, [], 0.0, 80, 24).plain
    assert shown.startswith("demo: start-up\nwaiting for its first sign")


def test_files_read_in_pieces_give_what_they_give_at_once(run: Path, tmp_path: Path) -> None:
    whole, grown = RunFiles(run, FACTS), RunFiles(tmp_path / "grown", FACTS)
    whole.poll()
    steps = []
    # Samples, metrics, events: none waits for another.
    for path in sorted(run.rglob("*.jsonl"), reverse=True):
        target = tmp_path / "grown" / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        for piece in re.findall(rb"(?s).{1,3000}", path.read_bytes()):
            with target.open("ab") as file:
                file.write(piece)
            if "events" in path.name or "metrics" in str(path):
                steps += grown.poll()[0]
    grown.poll()
    assert grown.state.metrics == whole.state.metrics == read_metrics(run) and steps == [1, 2, 3, 4]
    assert grown.state.began == whole.state.began and grown.state.ended == whole.state.ended


def test_a_line_that_is_cut_off_is_read_once_it_is_whole_and_a_bad_one_costs_itself(tmp_path: Path) -> None:
    records = [{"a": 1}, {"a": "é\n"}, {"a": "two\u2028lines"}, {"a": [1, 2]}]
    whole = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    data = b'no json\n[1]\n{"b": 1}\n' + whole.encode()
    path, read = tmp_path / "tail.jsonl", []
    tail = JsonTail(path, shape({"a": Any}))
    assert tail.read() == []
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        read += tail.read()
    assert read == records == read_json_lines(path)[1:] and tail.unreadable == 3
    path.write_bytes(b'{"a": "again"}\n{"a": "cut')
    assert tail.read() == [{"a": "again"}] and tail.read() == []
    assert tail.read(to_end=True) == [] and tail.unreadable == 4
    path.write_bytes(b'{"a": "whole"}')
    assert tail.read() == [] and tail.read(to_end=True) == [{"a": "whole"}]


def test_a_stages_journal_of_conversations_is_no_unreadable_sample(tmp_path: Path, capsys: Printed) -> None:
    start = {"time": 1.0, "kind": "start", "component": "challenger", "text": ""}
    append_json_lines(tmp_path / "logs" / "events.jsonl", start)
    for journal in ("rejects.jsonl", "samples.jsonl"):
        (tmp_path / journal).write_text('{"key": "a prompt", "turns": []}\n')
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "unreadable" not in capsys.readouterr().out


def test_the_diagnosis_counts_unreadable_lines(run: Path, capsys: Printed) -> None:
    for name in ("heartbeats.jsonl", "logs/events.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"time": 1.0}\n{"time":')
    assert main(["diagnose", str(run)]) == 0
    told = capsys.readouterr().out
    assert "finished" in told and "heartbeats.jsonl: 2 lines" in told and "logs/events.jsonl: 2 lines" in told


def test_what_was_up_when_its_block_was_left_is_stopped() -> None:
    """A Ctrl-C leaves no word of the trainer's end."""
    state = RunState(FACTS, components={"trainer": "running", "solver": "healthy", "retrieval": "dead"})
    state.close()
    assert state.components == {"trainer": "stopped", "solver": "stopped", "retrieval": "dead"}
    assert state.ended is not None and "trainer    stopped" in screen(state, [], 0.0, 80, 40).plain


def test_the_expected_end_comes_from_the_steps_of_this_start() -> None:
    state = RunState(FACTS)
    assert state.left_s(100.0) is None
    state.beats = [{"time": 10.0, "step": 1, "phase": "rollout"}]
    assert state.left_s(20.0) is None
    state.metrics = {1: {"timing_s/step": 8.0}}
    assert state.left_s(19.0) == pytest.approx(24.0)
    state.beats = [{"time": float(10 * step), "step": step, "phase": "rollout"} for step in (1, 2, 3)]
    # Two steps of ten seconds are left, four seconds of the third have passed.
    assert state.left_s(34.0) == pytest.approx(16.0)
    # A third step that takes longer leaves the time of the fourth.
    assert state.left_s(1000.0) == pytest.approx(10.0)
    state.beats.append({"time": 60.0, "step": 5, "phase": "done"})
    assert state.left_s(61.0) is None


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_a_duration_is_written_as_a_clock_shows_it(seconds: float, shown: str) -> None:
    assert shown_s(seconds) == shown


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([2, 2], "▄▄"), ([0, 7], "▁█"), ([3, 1, 2], "█▁▅"), ([*range(99)], "▁▂▂▃▄▄▅▅▆▇▇█")],
)
def test_a_trend_goes_from_its_lowest_to_its_highest_value(values: list[float], bars: str) -> None:
    assert trend(values) == bars


def test_groups_that_scored_alike_are_in_the_headline_while_a_batch_is_waited_for(run: Path) -> None:
    files = RunFiles(run, FACTS)
    files.poll()
    began, files.state.ended = files.state.began, None
    assert began is not None
    waiting = {"point": "buffer", "have": 1, "want": 8, "since_s": 60.0, "filtered": 24}
    for seen, said in ((waiting, "1 of 8 groups there, 24 scored alike"), (None, "")):
        whole = {"points": {}, "samples": None, "warmup": False, "symptoms": []}
        append_json_lines(run / "flow.jsonl", whole | {"time": began + 999, "waiting": seen})
        files.poll()
        files.state.ended = None
        headline = screen(files.state, [], began + 1000, 200, 40).plain.splitlines()[0]
        assert said in headline and ("scored alike" in headline) == bool(said)
