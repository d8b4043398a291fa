"""The journal keeps finished records, and only those."""

import errno
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import DataError
from data.journal import Journal, read_records

WORK = {"model": "a", "prompts": "b"}
records = st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none(), max_size=3), max_size=5)


def test_half_of_a_surrogate_pair_is_kept_as_a_question_mark(tmp_path):
    with Journal(tmp_path / "journal", WORK) as journal:
        journal.append({"said": "\ud83d", "\ude00": ["\ud83d\ude00"]})
    assert read_records(tmp_path / "journal") == [{"said": "?", "?": ["??"]}]


@given(written=records, cut=st.integers(min_value=0))
def test_a_file_cut_anywhere_gives_back_a_beginning_of_its_records(tmp_path_factory, written, cut):
    path = tmp_path_factory.mktemp("journal") / "journal"
    with Journal(path, WORK) as journal:
        for record in written:
            journal.append(record)
    content = path.read_bytes()
    path.write_bytes(content[: cut % (len(content) + 1)])
    with Journal(path, WORK) as journal:
        kept = list(journal.records)
        journal.append({"after": "the cut"})
    assert kept == written[: len(kept)]
    with Journal(path, WORK) as journal:
        assert journal.records == [*kept, {"after": "the cut"}]


def test_a_journal_of_other_work_is_refused_with_what_differs(tmp_path):
    with Journal(tmp_path / "journal", WORK) as journal:
        journal.append({"n": 1})
    with pytest.raises(DataError, match="model was 'a' and is 'other'"):
        Journal(tmp_path / "journal", WORK | {"model": "other"})
    assert len((tmp_path / "journal").read_text().splitlines()) == 2


@pytest.mark.parametrize("line", ["not json", "[1]", '{"a": 1}'])
def test_a_file_that_is_no_journal_is_refused(tmp_path, line):
    (tmp_path / "journal").write_text(line + "\n")
    with pytest.raises(DataError, match="start over"):
        Journal(tmp_path / "journal", WORK)


@pytest.mark.parametrize("line", [b"{torn", b'{"n": "\xff"}', b"[1]", b"[" * 9000, b"\0\0"])
def test_a_damaged_line_in_the_middle_costs_itself_and_is_counted(tmp_path, line, capsys):
    path = tmp_path / "journal"
    with Journal(path, WORK) as journal:
        journal.append({"n": "a\x85b\u2028c"})
    path.write_bytes(path.read_bytes() + line + b'\n{"n": 2}\n')
    with Journal(path, WORK) as journal:
        assert journal.records == read_records(path) == [{"n": "a\x85b\u2028c"}, {"n": 2}]
    assert capsys.readouterr().out.count(f"1 damaged lines of {path} are left out") == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine refuses to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_reported_with_the_file_and_costs_no_finished_record(small_disk):
    path, written = small_disk / "journal", 0
    with Journal(path, WORK) as journal, pytest.raises(OSError, match="No space left") as caught:
        while True:
            journal.append({"n": written, "text": "x" * 1000})
            written += 1
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    shutil.move(path, small_disk.parent)  # to where there is room
    with Journal(small_disk.parent / "journal", WORK) as journal:
        assert [record["n"] for record in journal.records] == list(range(written))
        journal.append({"n": written})
