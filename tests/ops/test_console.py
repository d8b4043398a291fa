"""Notices and output on the console."""

import json
import os
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drzero.ops.console import detail, has_live_terminal, relay, say, set_verbose, shown_by
from drzero.ops.notices import Notice, notice_of, plain
from drzero.ops.process.logs import EventLog


@pytest.fixture(autouse=True)
def quiet():
    yield
    set_verbose(False)


class Drawn:
    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.lines: list[str] = []

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def line(self, text: str) -> None:
        self.lines.append(text)


def test_a_detail_is_printed_only_when_it_is_asked_for(capsys):
    detail("flow", "produced 1/s")
    set_verbose(True)
    detail("flow", "produced 2/s")
    assert capsys.readouterr().out == "[flow] produced 2/s\n"


def test_a_view_gets_everything_while_it_draws_and_is_left_even_by_an_error(capsys):
    drawn = Drawn()
    with pytest.raises(ValueError), shown_by(drawn):
        say("solver", "one", "warning")
        relay("challenger_iter1", "two")
        raise ValueError
    say("solver", "three")
    [notice] = drawn.notices
    assert (notice.component, notice.text, notice.level) == ("solver", "one", "warning")
    assert drawn.lines == ["[challenger_iter1] two"]
    assert capsys.readouterr().out == "[solver] three\n"


def test_once_stdout_is_closed_nothing_that_prints_fails(monkeypatch):
    seen, stdout = os.pipe()
    os.close(seen)  # as `head` does
    with open(stdout, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        say("solver", "one")
        print("two", flush=True)


APART = """
import os, subprocess, sys
from drzero.ops.console import say, stdout_apart
print("before")
try:
    with stdout_apart() as own:
        say("a", "notice"); print("printed"); os.write(1, b"library\\n"); subprocess.run(["echo", "child"])
        print("own é \\udcff", file=own)
        raise ValueError
except ValueError:
    print("after")
"""


def test_stdout_apart_belongs_to_the_caller_whatever_else_prints():
    ran = subprocess.run(
        [sys.executable, "-c", APART], capture_output=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert ran.stdout.decode() == "before\nown é ?\nafter\n"
    assert sorted(ran.stderr.decode().split()) == ["[a]", "child", "library", "notice", "printed"]


def test_an_event_is_printed_and_written_with_who_saw_it(tmp_path, capsys):
    log = EventLog(tmp_path / "events.jsonl")
    log.add("start", "trainer", "starting", log="logs/trainer.log")
    log.add("cost", "supervision", "2.56 CPU seconds")
    assert capsys.readouterr().out == "[trainer] starting, log: logs/trainer.log\n"
    records = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(record["kind"], record["pid"]) for record in records] == [
        ("start", os.getpid()),
        ("cost", os.getpid()),
    ]


STALL = {"kind": "stall", "component": "solver", "text": "it hangs", "silent_s": 61.2, "phase": "rollout"}
STALL |= {"step": 3, "report": "logs/stall_001.md"}


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        ({"kind": "restart", "text": "restart 1 of at most 2 in 1 s"}, "warning", "restart 1 of at most 2"),
        ({"kind": "crash", "text": "died: exit code 1", "first_error": "OSError: x"}, "error", "OSError: x"),
        ({"kind": "exit", "code": 0, "text": "ended without an error"}, "info", "ended without an error"),
        ({"kind": "exit", "code": 1, "text": "'trainer' failed"}, "error", "'trainer' failed"),
        ({"kind": "end", "text": "ended from outside: Ctrl-C", "from_outside": True}, "error", "Ctrl-C"),
        ({"kind": "alarm", "text": "collapse alarm [entropy]"}, "warning", "collapse alarm [entropy]"),
        ({"kind": "checkpoint", "text": "step 2 is saved"}, "info", "step 2 is saved"),
        (STALL, "error", "61 s in rollout of step 3: it hangs. Culprit: solver. Report: logs"),
        ({"kind": "of a later version", "text": "something"}, "info", "something"),
        ({"kind": "cost"}, None, ""),
        ({"kind": "end", "text": "service 'solver' died"}, None, ""),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_an_event_is_a_notice_unless_it_only_explains_a_run_afterwards(event, level, text):
    notice = notice_of(event)
    assert (notice and notice.level) == level and (notice is None or text in notice.text)


def test_colours_are_removed_and_what_a_terminal_obeys_is_shown():
    assert plain("\x1b[36m(TaskRunner pid=1)\x1b[0m ok") == "(TaskRunner pid=1) ok"
    assert plain("\x1b]0;title\x07 \x9b2J a\rb\t|") == r"\x1b]0;title\x07 \x9b2J a\rb |"
    assert plain("gnp.\u202etxt é 𝄞 日本") == r"gnp.\u202etxt é 𝄞 日本"


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_no_text_leaves_anything_for_a_terminal_to_obey(text):
    shown = plain(text)
    assert not {unicodedata.category(character) for character in shown.replace("\n", "")} & {"Cc", "Cs"}
    assert not set(shown) & {"\u202e", "\u2066", "\u200f", "\ufeff"} and plain(shown) == shown


@pytest.mark.parametrize(
    ("encoding", "variables", "is_live"),
    [
        ("utf-8", {}, True),
        ("ascii", {}, False),
        *(("utf-8", wrong, False) for wrong in ({"TERM": "dumb"}, {"TERM": ""}, {"CI": "true"})),
    ],
)
def test_a_terminal_that_cannot_redraw_or_show_the_characters_is_none(
    monkeypatch, encoding, variables, is_live
):
    monkeypatch.delenv("CI", raising=False)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    with open(os.openpty()[1], "w", encoding=encoding) as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert has_live_terminal() == is_live
