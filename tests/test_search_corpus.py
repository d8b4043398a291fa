"""Folders of texts as a corpus; the other kinds of source are tested where they are indexed."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.indexing.corpus import Corpus, CorpusError, Document


def read(folder: Path) -> list[Document]:
    return [document for _, document in Corpus(folder).read()]


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_text_and_markdown_files_at_any_depth_are_documents_with_their_paths_as_ids(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "B", "a/deep/c.md": "C", "a/d.markdown": "D", "A.MD": "E"})
    assert [document.id for document in read(tmp_path)] == ["A.MD", "a/d.markdown", "a/deep/c.md", "b.txt"]


def test_other_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "A", "b.pdf": b"\xff", ".git/x.txt": "X", ".hidden.md": "Y"})
    assert [document.id for document in read(tmp_path)] == ["a.txt"]


@pytest.mark.parametrize(
    ("name", "content", "title", "text"),
    [
        ("orrin.txt", "# Not a heading\nin text", "orrin", "# Not a heading\nin text"),
        ("x.md", "# Orrin\n\nA town.\n", "Orrin", "A town.\n"),
        ("x.md", "\n## Orrin ##\r\nA town.", "Orrin", "A town."),
        ("x.md", "A preface.\n# Orrin\nA town.", "Orrin", "A preface.\n# Orrin\nA town."),
        (
            "x.md",
            "```\n# a comment\n```\n# Orrin\nA town.",
            "Orrin",
            "```\n# a comment\n```\n# Orrin\nA town.",
        ),
        ("orrin.md", "#hashtag and no heading", "orrin", "#hashtag and no heading"),
        ("x.md", "# Orrin\n", "Orrin", "# Orrin\n"),
        ("x.md", b"\xef\xbb\xbf# Orrin\nA town.", "Orrin", "A town."),
    ],
)
def test_the_title_is_the_first_heading_or_the_files_name(
    tmp_path: Path, name: str, content: str | bytes, title: str, text: str
) -> None:
    assert read(write(tmp_path, {name: content})) == [Document(name, title, text)]


def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "A", "sub/b.txt": "Zürich".encode("latin-1")})
    with pytest.raises(CorpusError, match=r"sub/b\.txt is not UTF-8 \(byte 0xfc at 1\): convert it"):
        read(tmp_path)


@pytest.mark.parametrize("goal", ["gone", ".", "/proc/self/mem"])  # a dangling link, a folder, a bad disk
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, goal: str) -> None:
    write(tmp_path, {"notes/a.txt": "A"})
    (tmp_path / "notes" / "b.txt").symlink_to(goal)
    with pytest.raises(CorpusError, match=r"notes/b\.txt cannot be read \(.+\): make it readable"):
        read(tmp_path / "notes")


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"sub/b\.md: no text"):
        read(write(tmp_path, {"a.txt": "A", "sub/b.md": " \n"}))


def test_a_folder_without_texts_is_refused_with_what_a_corpus_is(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"holds no documents \(\.txt, \.md, \.markdown\): a corpus is"):
        read(write(tmp_path, {"a.jsonl": "{}"}))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("made", [a_pipe, endless])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "notes/a.md"])
def test_what_would_never_end_is_refused_by_name(
    tmp_path: Path, name: str, made: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    made(path)
    with pytest.raises(CorpusError, match=rf"{name} cannot be read \(not a regular file\)"):
        read(path if path.parent == tmp_path else path.parent)


def test_json_nested_deeper_than_it_can_be_parsed_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "A"}\n' + "[" * 100_000)
    with pytest.raises(CorpusError, match=r"a\.jsonl line 2 is not JSON"):
        read(tmp_path / "a.jsonl")


def test_folders_may_be_deeper_than_calls(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Path("x.txt").write_text("deep")
    try:
        assert [document.text for document in read(tmp_path)] == ["deep"]
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)  # pytest's own way recurses


def test_parquet_whose_text_is_not_utf8_is_named_with_its_rows(tmp_path: Path) -> None:
    offsets = np.array([0, 2, 4], dtype=np.int32)
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"ok\xff\xfe"))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet is .*damaged \(rows 1 to 2\).*UTF8"):
        read(tmp_path / "a.parquet")


@given(st.text("#\t a", max_size=12))
def test_a_heading_is_what_commonmark_calls_one(line: str) -> None:
    heading = re.match(r"^ {0,3}#{1,6}[ \t]+(?![ \t])(.+?)(?:[ \t]+#+)?[ \t]*$", line)
    with TemporaryDirectory() as folder:
        (document,) = read(write(Path(folder), {"x.md": f"{line}\nA town."}))
    assert document.title == (heading[1] if heading else "x")


def test_a_line_of_a_million_blanks_takes_no_longer_than_to_read(tmp_path: Path) -> None:
    line = "# a" + " " * 1_000_000 + "b"
    assert read(write(tmp_path, {"x.md": line}))[0].title == line[2:]
