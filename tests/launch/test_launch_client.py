"""Which files a repeated download fetches."""

import os
from typing import IO, Any

import pytest
from modal.types import FileEntry, FileEntryType

from drzero.launch.client import download
from drzero.launch.errors import LaunchError

NAME = "latest_checkpointed_iteration.txt"


class OneFile:
    """A volume with one file of two bytes, written at second 100."""

    def __init__(self, listed: str = f"run/{NAME}") -> None:
        self._listed = listed

    def listdir(self, path: str, *, recursive: bool) -> list[FileEntry]:
        return [FileEntry(self._listed, FileEntryType.FILE, 100, 2)]

    def read_file_into_fileobj(self, path: str, file: IO[bytes]) -> None:
        file.write(b"10")


@pytest.mark.parametrize(
    ("content", "second", "fetched"),
    [("10", 100, 0), ("12", 40, 1), ("1", 100, 1), (None, 0, 1)],
    ids=["the same size and second", "changed without changing its size", "incomplete", "not here"],
)
def test_a_file_is_fetched_unless_it_is_here(tmp_path, content, second, fetched):
    path = tmp_path / NAME
    if content is not None:
        path.write_text(content)
        os.utime(path, (second, second))
    volume: Any = OneFile()
    assert download(volume, "run", tmp_path) == (fetched, 1 - fetched)
    assert (path.read_text(), int(path.stat().st_mtime)) == ("10", 100)


@pytest.mark.parametrize("listed", ["run/../../escaped", "../escaped", "/etc/escaped", "elsewhere/escaped"])
def test_a_listed_path_outside_of_the_folder_is_refused_and_nothing_written(tmp_path, listed):
    volume: Any = OneFile(listed)
    with pytest.raises(LaunchError, match="nothing fetched"):
        download(volume, "run", tmp_path / "a" / "b")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
