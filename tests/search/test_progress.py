import io
import sys

import pytest

from search.indexing import progress as module
from search.indexing.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("total", "steps", "said"),
    [
        (2000, [1, 999], "[index] splitting: 1,000 of 2,000 documents [00:00<00:00]\n"),
        (None, [1234], "[index] splitting: 1,234 documents [00:00]\n"),
        (2000, [], ""),
    ],
)
def test_off_a_terminal_progress_is_lines(monkeypatch, capsys, total, steps, said):
    monkeypatch.setattr(module, "LINE_S", 0.0)
    with progress("splitting", "documents", total) as bar:
        for step in steps:
            bar.update(step)
    output = capsys.readouterr()
    assert output.err == "" and output.out.endswith(said)


def test_work_of_less_than_a_minute_prints_nothing(capsys):
    assert list(progress("reading", "documents", done=range(5000))) == list(range(5000))
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_progress_is_a_bar_that_goes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("writing", "chunks", 40) as bar:
        bar.delay = 0
        bar.update(10)
        bar.refresh()
    drawn = sys.stderr.getvalue()
    assert "writing:  25%|" in drawn and "| 10 of 40 chunks [00:00<00:0" in drawn
    assert drawn.rpartition("\r")[0].rpartition("\r")[2].strip() == "" and capsys.readouterr().out == ""
