"""Which files a repeated download fetches."""

import os
from pathlib import Path

from modal.types import FileEntry, FileEntryType

from launch.client import _is_fetched


def fetched(folder: Path, content: str, second: int) -> Path:
    path = folder / "latest_checkpointed_iteration.txt"
    path.write_text(content)
    os.utime(path, (second, second))
    return path


def entry(size: int, second: int) -> FileEntry:
    return FileEntry("latest_checkpointed_iteration.txt", FileEntryType.FILE, second, size)


def test_a_file_of_the_same_size_and_second_is_there(tmp_path):
    assert _is_fetched(fetched(tmp_path, "10", 100), entry(2, 100))


def test_a_file_that_has_changed_without_changing_its_size_is_fetched(tmp_path):
    assert not _is_fetched(fetched(tmp_path, "10", 100), entry(2, 160))


def test_an_incomplete_file_is_fetched(tmp_path):
    assert not _is_fetched(fetched(tmp_path, "1", 100), entry(2, 100))


def test_what_is_not_here_is_fetched(tmp_path):
    assert not _is_fetched(tmp_path / "nothing", entry(2, 100))
