"""JSON lines: one way to read them, whatever text is in them."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.ops.files import write_jsonl
from drzero.ops.process.isolated import Ended
from drzero.ops.records import (
    BeatLine,
    EventLine,
    FlowLine,
    SampleLine,
    parse_line,
    read_json_lines,
    read_object,
)

ROOT = Path(__file__).parents[2]
ODD = "\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029\ufeff\x00"
TEXTS = {"__doc__", "error"}
"""What may be split at any line end: texts that are not read back."""
OTHERS = {"search/sources/files.py", "verl_ext/method/passages.py", "examples/one_question.py"}
"""Documents as they come, and texts for the model."""


@given(st.lists(st.dictionaries(st.text() | st.sampled_from(ODD), st.text() | st.sampled_from(ODD))))
def test_every_record_is_read_as_it_was_written(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    write_jsonl(path, records)
    assert read_json_lines(path) == records
    printed = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    assert Ended(None, printed).records() == records


def test_a_line_of_100_megabytes_is_one_record(tmp_path):
    write_jsonl(tmp_path / "a", [{"text": "x" * 100_000_000}, {"text": "y"}])
    assert [len(record["text"]) for record in read_json_lines(tmp_path / "a")] == [100_000_000, 1]


def splits_lines(tree: ast.AST) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("splitlines", "readlines")
    ]


def test_what_we_read_back_is_split_at_line_feeds_alone():
    rooms = ("data", "drzero", "environments", "examples", "search", "verl_ext")
    files = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in files
        for call in splits_lines(ast.parse(path.read_bytes()))
        if not TEXTS & {name.id for name in ast.walk(call.func) if isinstance(name, ast.Name)}
    }
    assert len(files) > 300 and {place.partition(":")[0] for place in found} <= OTHERS


@pytest.mark.parametrize(
    ("number", "read"),
    [
        *((text, None) for text in ("NaN", "Infinity", "-Infinity", "1e999", "1e308", "9" * 400)),
        ("-2.5e99", -2.5e99),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_number_that_nothing_can_add_is_null(number, read):
    assert parse_line(f'{{"a": [{number}]}}'.encode()) == {"a": [read]}


LINES: dict[Any, dict[str, Any]] = {
    EventLine: {"time": 1.5, "kind": "start", "component": "a", "text": "b"},
    BeatLine: {"time": 1, "step": 2, "phase": "update"},
    SampleLine: {"time": 1, "component": "host", "gpus": [{"used_mb": 1, "busy_percent": None}]},
    FlowLine: {"time": 1, "points": {"a": {"depth": 1.0}}, "samples": None, "waiting": None}
    | {"warmup": True, "symptoms": []},
}


@pytest.mark.parametrize("of", LINES)
@pytest.mark.parametrize("value", ["true", '"1"', "-1e200", "null", "[]", "[" * 100_000])
def test_a_line_with_a_time_that_is_none_is_no_record(of, value):
    whole = json.dumps(LINES[of])
    assert parse_line(whole.encode(), of) == LINES[of]
    assert parse_line(b"\xef\xbb\xbf" + whole.encode() + b"\r", of) == LINES[of]
    assert parse_line(json.dumps(LINES[of] | {"time": 0}).replace(": 0", f": {value}").encode(), of) is None
    assert parse_line(whole.encode().replace(b'"time"', b'"time\xff"'), of) is None


@pytest.mark.parametrize("step", [-1, "3", True, 1.5, None, 1 << 60])
def test_a_step_is_a_whole_number_from_nought(step):
    assert parse_line(json.dumps({"time": 1.0, "step": step, "phase": "x"}).encode(), BeatLine) is None


def test_a_place_without_a_regular_file_has_no_lines(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "fifo", tmp_path / "loop", tmp_path, Path("/dev/zero"), tmp_path / "none"):
        assert read_json_lines(path) == [] and read_object(path) == {}
