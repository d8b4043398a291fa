"""Tables and lines show text as it is."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_run import challenger_run, event, lines
from rich.text import Text

from drzero.cli import main
from drzero.loop.manifest import Manifest, StageEntry
from drzero.loop.report import print_loop
from drzero.ops.notices import one_line
from drzero.recipe.tables import console, new_table, print_wide

AS_IT_IS = {
    "[file,tensorboard] is no backend": None,
    "[/data/x] and [bold]b[/bold]": None,
    "[link=http://a]x :smile: {{ 1 }}": None,
    "\x1b[2J\x1b]0;mine\x07": r"\x1b]0;mine\x07",
    "a\u202egnp\u2066.exe": r"a\u202egnp\u2066.exe",
    "a\u200bb\u3164c\U000e0041": r"a\u200bb\u3164c\U000e0041",
    "two\nrows": "two rows",
    "\udc80": r"\udc80",
}


@pytest.mark.parametrize(("text", "shown"), AS_IT_IS.items())
def test_a_table_and_a_line_show_text_as_text(text, shown, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    manifest = Manifest(tmp_path / "m.json")
    manifest.entries[text] = StageEntry(state="failed", error=text)
    print_loop(manifest, [text], title=text, running=False)
    print_wide(console(), text, ["a", f">{text}"], [[text, text]])
    console().print(text, soft_wrap=True)
    printed = capsys.readouterr().out
    assert printed.count(shown or text) >= 6 and not re.search(
        "[\x00-\x09\x0b-\x1f\u202e\u2066\u200b]", printed
    )


@given(st.text())
def test_no_text_breaks_a_row(text):
    out = console()
    out.file = io.StringIO()
    table = new_table(text, text or "column")
    table.add_row(text)
    out.print(table, text)
    assert isinstance(table.columns[0]._cells[-1], Text) and "\n" not in one_line(text)


def test_what_reads_a_run_obeys_no_name_in_it(tmp_path, capsys):
    folder = challenger_run(tmp_path / "run", steps=1)
    hostile = "tr\x1b[2J\x1b]0;mine\x07[/x]\u202e\nculprit: none"
    events = [event(0, "start", hostile, hostile, offset=0), event(9, "exit", hostile, hostile, code=1)]
    lines(folder / "logs" / "events.jsonl", events)
    beats = (folder / "heartbeats.jsonl").read_text().replace('"update"', '"up\\u001b[2J\\ndate"')
    (folder / "heartbeats.jsonl").write_text(beats)
    with (folder / "resolved.yaml").open("a") as config:
        config.write('run: {name: "x\\e[2J\\u202e", dir: "."}\n')
        config.write(
            "compute: {provider: modal, type: H100, count: 1, cpu: 8, memory: 65536, region: null}\n"
        )
        config.write("machine: {device: cpu, gpus: 1, nodes: 1, gpu: null}\n")
    for command in ("diagnose", "top"):
        assert main([command, str(folder)]) == 0
        printed = capsys.readouterr().out
        assert r"\x1b]0;mine\x07" in printed and "\nculprit" not in printed
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", printed)
