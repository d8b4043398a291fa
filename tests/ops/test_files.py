"""Atomic writes."""

import os
import stat

import pytest

from drzero.ops.files import atomic_write


def test_text_and_bytes_are_written_and_replace_what_was_there(tmp_path):
    path = tmp_path / "manifest.json"
    atomic_write(path, "né")
    assert path.read_bytes() == "né".encode()
    atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert [each.name for each in tmp_path.iterdir()] == ["manifest.json"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a"
    atomic_write(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a": "old"}


def test_the_file_has_the_permissions_of_an_ordinary_one(tmp_path):
    (tmp_path / "ordinary").touch()
    atomic_write(tmp_path / "a", "x")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1
