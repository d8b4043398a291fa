"""Teeing a child's output."""

import io
import os
import termios
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from terminal import stopped_terminal

from drzero.ops import console as ops_console
from drzero.ops.console import say
from drzero.ops.process.logs import LogTee, looks_like_error
from drzero.ops.records import read_json_lines


@pytest.fixture(autouse=True)
def console(monkeypatch):
    monkeypatch.setattr(ops_console, "_console", ops_console._Console())


def tee(folder: Path, content: bytes, keep: int = 30, *, relays: bool = True, **more) -> LogTee:
    reader, writer = os.pipe()
    source = io.BufferedReader(io.FileIO(reader))
    result = LogTee("main", source, folder / "logs" / "main.log", keep, relays=relays, **more)
    with open(writer, "wb") as pipe:
        pipe.write(content)
    result.join()
    return result


def test_the_log_file_holds_every_byte_of_every_run(tmp_path):
    content = b"one\n\xff\xfe\r\n 10%\r 20%\rdone\nno end" + b"x" * 1_000_000
    tee(tmp_path, content)
    tee(tmp_path, b"\ntwo\n")
    assert (tmp_path / "logs" / "main.log").read_bytes() == content + b"\ntwo\n"


def test_what_a_start_is_doing_is_told_once_from_its_lines_and_bars(tmp_path, capsys):
    lines = [
        b"(Worker pid=1) Loading weights:   0%|   | 0/272 [00:00<?]\rLoading weights: 100%|###| 272/272\n",
        b"(Server pid=2) Load weight begin. avail mem=70.1 GB\n(Server pid=3) Load weight begin.\n",
        b"(Server pid=2) Loading safetensors checkpoint shards:  50% Completed | 1/2",
    ]
    signs = {"Loading weights:": "loads the model", "never": "is done"}
    signs |= dict.fromkeys(("Load weight begin", "checkpoint shards"), "loads the engine")
    tee(tmp_path, b"".join(lines), relays=False, signs=signs)
    assert capsys.readouterr().out == "[main] loads the model\n[main] loads the engine\n"
    events = read_json_lines(tmp_path / "logs" / "events.jsonl")
    assert [(event["kind"], event["component"], event["text"]) for event in events] == [
        ("startup", "main", "loads the model"),
        ("startup", "main", "loads the engine"),
    ]


def test_without_being_asked_for_no_line_is_printed(tmp_path, capsys):
    tee(tmp_path, b"one\ntwo\n", relays=False)
    assert capsys.readouterr().out == ""
    ops_console.set_verbose(True)
    tee(tmp_path, b"three\n", relays=False)
    assert capsys.readouterr().out == "[main] three\n"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["{'loss': 0.5}", "next"], ["{'loss': 0.5}", "next"]),
        (
            ["{'actor': {'lr': 1,", "           'n': {}},", " 'trainer': {'gpus': 4}}", " indented", "next"],
            ["{'actor': {'lr': 1, … (the rest is in LOG)", " indented", "next"],
        ),
        (
            ["(Task pid=1) {'a': 1,", "(Other pid=2) one", "(Task pid=1)  'b': 2}", "(Task pid=1) two"],
            ["(Task pid=1) {'a': 1, … (the rest is in LOG)", "(Other pid=2) one", "(Task pid=1) two"],
        ),
    ],
)
def test_of_a_printed_config_the_first_line_is_shown_and_the_log_has_all(tmp_path, capsys, lines, shown):
    tee(tmp_path, "".join(f"{line}\n" for line in lines).encode())
    log = tmp_path / "logs" / "main.log"
    assert capsys.readouterr().out.replace(str(log), "LOG").splitlines() == [f"[main] {one}" for one in shown]
    assert log.read_text().splitlines() == lines


def test_the_first_errors_are_printed_and_the_log_is_named_for_the_rest(tmp_path, capsys):
    errors = b"".join(b"ValueError: %d\nfine\n" % number for number in range(9))
    tee(tmp_path, errors, relays=False)
    assert capsys.readouterr().out.splitlines() == [
        *(f"[main] ValueError: {number}" for number in range(3)),
        f"[main] more errors: {tmp_path / 'logs' / 'main.log'}",
    ]


def test_what_a_line_would_make_a_terminal_do_is_shown_instead(tmp_path, capsys):
    result = tee(tmp_path, b"\x1b[36m(Task pid=1)\x1b[0m ValueError: \x1b]0;mine\x07\n")
    shown = r"(Task pid=1) ValueError: \x1b]0;mine\x07"
    assert capsys.readouterr().out == f"[main] {shown}\n"
    assert (result.first_error, list(result.tail)) == (shown, [shown])


@pytest.mark.parametrize(("size", "left_out"), [(500, ""), (501, "… (1 more"), (3000, "… (2,500 more")])
def test_only_the_log_has_the_end_of_a_long_line(tmp_path, capsys, size, left_out):
    line = "OutOfMemoryError: 1 worker(s) were killed".ljust(size, ".")
    result = tee(tmp_path, f"{line}\n".encode(), relays=False)
    shown = line[:500] + (f"{left_out} characters in the log)" if left_out else "")
    assert (capsys.readouterr().out, result.first_error) == (f"[main] {shown}\n", shown)
    assert list(result.tail) == [line] and (tmp_path / "logs" / "main.log").read_text() == f"{line}\n"


def test_lines_are_printed_behind_the_name_and_progress_bars_in_their_last_state(tmp_path, capsys):
    last = tee(tmp_path, b"one\ntwo\r\n 10%\r 20%\r100%\nno end", keep=2).tail
    assert capsys.readouterr().out == "[main] one\n[main] two\n[main] 100%\n[main] no end\n"
    assert list(last) == ["100%", "no end"]


def test_a_stopped_terminal_does_not_stop_the_log(tmp_path):
    content = b"a line of it\n" * 50_000
    with stopped_terminal():
        assert tee(tmp_path, content).tail[-1] == "a line of it"
    assert (tmp_path / "logs" / "main.log").read_bytes() == content


def test_a_terminal_that_is_unblocked_shows_how_much_it_has_missed():
    with stopped_terminal() as (seen, terminal):
        for number in range(3):
            say("main", f"line {number}")
        termios.tcflow(terminal, termios.TCOON)
        say("main", "line 3")
        shown = b""
        while not shown.endswith(b"line 3\n"):  # a terminal may hand the two writes over one by one
            shown += os.read(seen, 1000)
    assert shown == b"[drzero] 3 lines could not be printed; the logs have them\n[main] line 3\n"


def test_a_pipe_that_nobody_reads_does_not_stop_the_log(tmp_path):
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as stdout, redirect_stdout(stdout):
        content = b"x" * 500 + b"y" * 500_000 + b"\nlast\n"
        assert tee(tmp_path, content).tail[-1] == "last"


def test_a_closed_terminal_does_not_stop_the_log(tmp_path, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stdout", closed)
    assert list(tee(tmp_path, b"one\ntwo\n").tail) == ["one", "two"]


def test_the_first_error_is_the_end_of_the_first_traceback(tmp_path):
    log = b"""INFO start
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    raise KeyError("Error: not this line")
torch.cuda.OutOfMemoryError: CUDA out of memory

During handling of the above exception, another exception occurred:

RuntimeError: worker died
"""
    assert tee(tmp_path, log).first_error == "torch.cuda.OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("ValueError: bad", True),
        ("(TaskRunner pid=12) ray.exceptions.RayTaskError: x", True),
        ("KeyError", True),
        ("2026-01-01 12:00:00 ERROR [server] cannot bind", True),
        ("Fatal Python error: Aborted", True),
        ("Segmentation fault (core dumped)", True),
        ("(raylet) *** SIGBUS received at time=1795740443 on cpu 1 ***", True),
        ("Error: cannot start 'x'", True),
        ("", False),
        ("step 1 errors: 0", False),
        ('    raise ValueError("Error: x")', False),
        ('(TaskRunner pid=12)     raise ValueError("Error: x")', False),
        ("WARNING ImportError: optional part missing", False),
        ("a.py:3: UserWarning: ImportError: optional part missing", False),
        ("error_rate 0.0", False),
    ],
)
def test_error_lines_are_told_from_harmless_ones(line, is_error):
    assert looks_like_error(line) is is_error
