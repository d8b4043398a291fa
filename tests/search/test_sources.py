"""Sources as they are: formats, fields, encodings, folders and globs, and all that is wrong in one list."""

import contextlib
import csv
import gzip
import io
import json
import math
import os
import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from index_builds import survey
from loopback_hub import NO_HUB, LoopbackHub

from drzero.ops.hub import hub_fault
from search.chroma.location import ChromaPlace, connect
from search.embedders import EmbedderSpec
from search.errors import StoreError
from search.indexing.adopt import measured_distance
from search.indexing.shards import build_index, chroma_target
from search.sources.corpus import Corpus, Reading
from search.sources.document import CorpusError, Document, Fields


def read(source: Path | str, **settings: Any) -> list[Document]:
    """The documents. Raises CorpusError for faults, as an index build does."""
    corpus, reading = Corpus(source, **settings), Reading()
    documents = [document for _, document in corpus.read(reading)]
    corpus.check(reading)
    return documents


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


WHOLE = ""
"""A document's text where it is the file's."""


def test_text_and_markdown_files_at_any_depth_are_documents_with_their_paths_as_ids(tmp_path):
    write(tmp_path, {"b.txt": "B", "a/deep/c.md": "C", "a/d.markdown": "D", "A.MD": "E"})
    assert [document.id for document in read(tmp_path)] == ["A.MD", "a/d.markdown", "a/deep/c.md", "b.txt"]


@pytest.mark.parametrize(
    ("name", "content", "title", "text"),
    [
        ("orrin.txt", "# Not a heading\nin text", "orrin", WHOLE),
        ("x.md", "# Orrin\n\nA town.\n", "Orrin", "A town.\n"),
        ("x.md", "\n## Orrin ##\r\nA town.", "Orrin", "A town."),
        ("x.md", "A preface.\n# Orrin\nA town.", "Orrin", WHOLE),
        ("x.md", "```\n# a comment\n```\n# Orrin\nA town.", "Orrin", WHOLE),
        # A fence ends with as many of the signs that it began with.
        ("x.md", "````\n```\n# a comment\n````\n# Orrin\n", "Orrin", WHOLE),
        ("x.md", "```\n~~~\n# a comment\n```\n# Orrin\n", "Orrin", WHOLE),
        ("x.md", "---\ntitle: Orrin\ntags: [x]\n---\nA town.\n", "Orrin", "A town.\n"),
        ("x.md", "Orrin\n=====\nA town.", "Orrin", "A town."),
        ("x.md", "A preface.\n---\n# Orrin\nA town.", "Orrin", WHOLE),
        ("orrin.md", "- # In a list\n", "orrin", WHOLE),
        ("orrin.md", "#hashtag and no heading", "orrin", WHOLE),
        ("x.md", "# Orrin\n", "Orrin", WHOLE),
        ("x.md", b"\xef\xbb\xbf# Orrin\nA town.", "Orrin", "A town."),
        ("x.md", "## Orrin\nA town.\n### Harbour\nOld.", "Orrin", "A town.\n### Harbour\nOld."),
        ("x.md", "# Orrin\nA town.\n# Sarn\nAnother.", "Orrin", "A town.\n# Sarn\nAnother."),
        # The first part's heading, not the whole's.
        ("x.md", "## Harbour\nOld.\n## Market\nNew.", "x", WHOLE),
        ("x.md", "### Note\nOld.\n## Market\nNew.", "x", WHOLE),
    ],
)
def test_the_title_is_the_heading_of_the_whole_or_the_files_name(tmp_path, name, content, title, text):
    markdown = name.endswith(".md")
    assert read(write(tmp_path, {name: content})) == [Document(name, title, text or content, markdown)]


@pytest.mark.parametrize("goal", ["gone", ".", "/proc/self/mem"])  # a dangling link, a folder, a bad disk
def test_a_file_that_cannot_be_read_is_named(tmp_path, goal):
    write(tmp_path, {"notes/a.txt": "A"})
    (tmp_path / "notes" / "b.txt").symlink_to(goal)
    with pytest.raises(CorpusError, match=r"notes/b\.txt: cannot be read \(.+\): make it readable"):
        read(tmp_path / "notes")


@pytest.mark.parametrize(
    "made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["a pipe", "endless"]
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "notes/a.md"])
def test_what_would_never_end_is_refused_by_name(tmp_path, name, made):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    made(path)
    with pytest.raises(CorpusError, match=rf"{name}: cannot be read \(not a regular file\)"):
        read(path if path.parent == tmp_path else path.parent)


def test_folders_may_be_deeper_than_calls(tmp_path):
    with contextlib.chdir(tmp_path):
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Path("x.txt").write_text("deep")
    try:
        assert [document.text for document in read(tmp_path)] == ["deep"]
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)  # pytest's own way recurses


def test_parquet_whose_text_is_not_utf8_is_named_with_its_rows(tmp_path):
    offsets = np.array([0, 2, 4], dtype=np.int32)
    texts = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"ok\xff\xfe"))
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"a\.parquet: .*damaged \(rows 1 to 2\).*UTF8"):
        read(tmp_path / "a.parquet")


# --- formats -----------------------------------------------------------------------------------------------

RECORDS = [
    {"headword": "bit", "definition": "A binary digit, 0 or 1.", "n": "a1"},
    {"headword": "byte", "definition": 'Eight bits; a "word"\nmay have several.', "n": "a2"},
]
MAPPED = Fields(text="definition", title="headword", id="n")


def table(delimiter: str) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(RECORDS[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(RECORDS)
    return stream.getvalue().encode()


def lines() -> bytes:
    return "\n".join(map(json.dumps, RECORDS)).encode()


def parquet() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS), stream)
    return stream.getvalue()


def packed(data: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


TABLES = {
    "a.jsonl": lines(),
    "a.json": json.dumps(RECORDS).encode(),
    "of-an-object.json": json.dumps({"version": 2, "data": RECORDS}).encode(),
    "of-lines.json": lines(),
    "a.csv": table(","),
    "semicolons.csv": table(";"),
    "a.tsv": table("\t"),
    "a.parquet": parquet(),
    "a.jsonl.gz": gzip.compress(lines()),
    "two-parts.csv.gz": gzip.compress(table(",")[:40]) + gzip.compress(table(",")[40:]),
    "a.jsonl.zst": packed(lines(), "zstd"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_each_format_gives_the_mapped_fields(tmp_path, name):
    write(tmp_path, {name: TABLES[name]})
    assert read(tmp_path / name, fields=MAPPED) == [
        Document("a1", "bit", "A binary digit, 0 or 1."),
        Document("a2", "byte", 'Eight bits; a "word"\nmay have several.'),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_without_a_mapping_the_error_names_the_fields_there_are_and_the_setting(tmp_path, name):
    write(tmp_path, {name: TABLES[name]})
    with pytest.raises(CorpusError, match=r"its fields are headword, definition, n: .*fields\.text=NAME"):
        read(tmp_path / name)


def test_a_mapped_field_that_is_not_there_is_named_with_its_setting(tmp_path):
    write(tmp_path, {"a.jsonl": lines()})
    with pytest.raises(CorpusError, match=r"lines 1 and 2: no field 'titel', which fields\.title names; its"):
        read(tmp_path / "a.jsonl", fields=Fields(text="definition", title="titel"))


PAGE = """<html><head><title>Sorting - Manual 3</title><style>p {}</style></head><body>
<nav><a href="/">Home</a></nav><main><h1>Sorting<a class="headerlink" href="#x">¶</a></h1>
<p>Lists have a <code>sort()</code> method.</p><h2>Keys</h2>
<pre>&gt;&gt;&gt; sorted([2, 1])
[1, 2]</pre></main><script>track()</script><footer>Imprint</footer></body></html>"""
RST = """Sorting
=======

.. index:: sort

Lists have a :meth:`~list.sort` method, see :ref:`the keys <keys>`.

.. _keys:

Keys
----

.. versionadded:: 2.4
   The key.

::

   >>> sorted([2, 1])
   [1, 2]
"""


FENCE = "```\n>>> sorted([2, 1])\n[1, 2]\n```\n"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.html", PAGE, f"Lists have a `sort()` method.\n\n## Keys\n\n{FENCE}"),
        # What only Sphinx knows shows its text.
        ("a.rst", RST, f"Lists have a sort method, see the keys.\n\n## Keys\n\n2.4\nThe key.\n\n{FENCE}"),
    ],
)
def test_a_page_gives_its_main_part_as_markdown(tmp_path, name, content, text):
    assert read(write(tmp_path, {name: content})) == [Document(name, "Sorting", text, True)]


TEXT, LAST = "<p>Lists have a sort method, which is stable.</p>", "<p>Keys are cached.</p>"
PAGES = {
    "docusaurus": f"""<title>Sorting | Site</title><nav class="navbar"><a>Site</a></nav><main><article>
<nav class="theme-doc-breadcrumbs" aria-label="Breadcrumbs"><ul><li>Basics</ul></nav>
<span class="theme-doc-version-badge badge">Version: 3</span>
<div class="tocCollapsible theme-doc-toc-mobile"><button>On this page</button></div>
<div class="markdown"><header><h1>Sorting</h1></header>{TEXT}
<h2>Keys<a class="hash-link" href="#keys">\u200b</a></h2>{LAST}</div><footer>Edit this page</footer></article>
<nav class="pagination-nav"><a>Download the ebook</a></nav></main><footer>Imprint</footer>""",
    "hugo": f"""<title>Sorting | Blog</title><header><h1>Blog</h1></header><main><ol class="breadcrumb">
<li>Docs</ol>
<div class="td-content"><header class="post-header"><h1>Sorting</h1>
<div class="post-meta">4 min</div></header>
<div class="toc"><summary>Table of Contents</summary><ul><li><a href="#k">Keys</a></ul></div>{TEXT}
<h2>Keys<a class="anchor" href="#k">#</a></h2>{LAST}
<div class="td-page-meta__lastmod">fix</div></div></main>""",
    "mkdocs": f"""<title>Sorting - Docs</title><header class="md-header">Docs</header><main class="md-main">
<div class="md-sidebar"><nav>Home</nav></div><article class="md-content__inner">
<h1>Sorting<a class="headerlink">¶</a></h1>{TEXT}<h2>Keys</h2>{LAST}
<div class="md-source-file">Last update: 2024</div><form>Helpful?</form></article></main>""",
    "sphinx": f"""<title>Sorting — Manual</title>
<div class="related" role="navigation"><h3>Navigation</h3></div>
<div class="document"><div class="body" role="main"><h1>Sorting</h1>{TEXT}
<div class="toctree-wrapper"><ul><li><a href="x">X</a></ul></div><h2>Keys</h2>{LAST}</div></div>
<div class="sphinxsidebar">Quick search</div>""",
    "docbook": f"""<title>Sorting</title><ul class="docnav"><li>Prev</ul><div class="section">
<h2 class="title">Sorting</h2><div class="toc"><p><b>Table of Contents</b></p><a href="#k">Keys</a></div>
{TEXT}<h3>Keys</h3><div class="sidebar">{LAST}</div></div><div class="navfooter">Next</div>""",
    "a header of its own": f"""<title>Sorting in Python</title><body><header><h1>Sorting</h1><p>by Vell</p>
</header>
<h2>Contents</h2><ul><li><a href="#k">Keys</a><li><a href="#o">Other keys</a></ul>{TEXT}
<h2>Keys</h2>{LAST}</body>""",
    "a site's header": f"""<title>Sorting – The Site</title><body><header><h1>The Site</h1></header>
<h2>Sorting</h2>
{TEXT}<h3>Keys</h3>{LAST}</body>""",
    "above the main part": f"<title>Sorting</title><h1>Sorting</h1><main>{TEXT}<h2>Keys</h2>{LAST}</main>",
}


@pytest.mark.parametrize("generator", PAGES)
def test_a_page_has_its_own_name_and_its_text_without_what_is_around_it(tmp_path, generator):
    (page,) = read(write(tmp_path, {"a.html": PAGES[generator]}))
    level = "###" if generator in ("docbook", "a site's header") else "##"
    text = f"Lists have a sort method, which is stable.\n\n{level} Keys\n\nKeys are cached.\n"
    assert (page.title, page.text) == ("Sorting", text)


LINKS = "".join(f'<dt><a href="{n}.html">Managing a machine as a whole</a>' for n in range(9))


@pytest.mark.parametrize(
    ("page", "text"),
    [
        (f'<h1>Menus</h1><div class="menu">{TEXT}{LAST}</div>', "Lists have a sort method, which is stable."),
        (f'<title>Book</title><h1>Book</h1><div class="toc"><dl>{LINKS}</dl></div>', "# Book"),
    ],
    ids=["most of a page is its text", "links are not"],
)
def test_furniture_goes_unless_it_holds_the_text(tmp_path, page, text):
    assert read(write(tmp_path, {"a.html": page}))[0].text.partition("\n")[0] == text


def test_a_page_in_two_formats_is_told(tmp_path):
    files = {
        "html/a.html": PAGE,
        "_sources/a.rst.txt": "Sorting",
        "md/a.md": "# Sorting\nLists.",
        "b.md": "B",
    }
    list(Corpus(write(tmp_path, files)).read(reading := Reading()))
    assert [line.partition(": ")[2] for line in reading.lines()] == [
        "is here in another format too: leave one out, else its questions come twice"
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.txt.gz", "a.json.gz"])
def test_a_giant_record_is_refused_before_it_fills_the_memory(tmp_path, name, monkeypatch):
    for module in ("files", "records"):
        monkeypatch.setattr(f"search.sources.{module}.LONGEST_LINE", 4000)
    giant = "a " * 4000
    content = {"a.jsonl.gz": f'{{"text": "A"}}\n{{"text": "{giant}"}}\n', "a.csv.gz": f"text\nA\n{giant}\n"}
    data = content.get(name, f'[{{"text": "{giant}"}}]').encode()
    with pytest.raises(CorpusError, match="longer than 256 MiB: split it"):
        read(write(tmp_path, {name: gzip.compress(data)}) / name)


def test_the_label_of_a_note_is_no_sentence_of_it(tmp_path):
    note = '<div class="admonition note"><p class="admonition-title">Note</p><p>Keys are cached.</p></div>'
    files = {"a.html": f"<main><h1>A</h1>{note}</main>", "b.rst": "B\n=\n\n.. note:: Keys are cached.\n"}
    assert {page.text for page in read(write(tmp_path, files))} == {"Note:\n\nKeys are cached.\n"}


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "Zürich"),
        ("cp1252", "The café – “nice” place was naïve."),
        ("cp1251", "Москва — столица России, большой город."),
        ("shift_jis", "東京は日本の首都である。人口は多い。"),
        ("utf-16", "Orrin, a town"),
        ("utf-8-sig", "Orrin, a town"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_an_encoding_is_found_and_one_without_a_mark_is_told(tmp_path, name, encoding, text):
    forms = {"a.txt": text, "a.csv": f'text\n"{text}"\n', "a.jsonl": f'{{"text": "{text}"}}\n'}
    write(tmp_path, {name: forms[name].encode(encoding)})
    reading = Reading()
    ((_, document),) = Corpus(tmp_path / name).read(reading)
    assert document.text == text
    assert bool(reading.notes) == (encoding not in ("utf-8-sig", "utf-16"))


@pytest.mark.parametrize(
    ("declaration", "encoding", "text"),
    [
        ('<meta charset="windows-1250">', "cp1250", "Řeka"),
        ("<meta http-equiv=Content-Type content='text/html; charset=iso-8859-2'>", "iso8859-2", "Žďár"),
        ('<?xml version="1.0" encoding="windows-1254"?>', "cp1254", "Iğdır"),
        ("<meta charset=iso-8859-1>", "cp1252", "“Zürich” costs 5 €"),  # as browsers read it
        ("<meta charset=x-sjis>", "cp932", "東京①"),
        ("<meta charset=iso-2022-jp>", "iso2022_jp", "東京"),  # of ASCII bytes
        ("<meta charset=iso-8859-1>", "utf-8", "Žďár"),  # a declaration that the bytes contradict
        ("<meta charset=utf-8>", "cp1251", "Москва — столица России, большой город."),
        ("<meta charset=hex>", "cp1251", "Москва — столица России, большой город."),
        (".. -*- coding: cp1250 -*-", "cp1250", "Řeka"),
    ],
)
def test_a_declared_encoding_comes_before_a_guess(tmp_path, declaration, encoding, text):
    page = f"{declaration}\n<h1>A</h1><p>{text}</p>"
    assert read(write(tmp_path, {"a.html": page.encode(encoding)}))[0].text.strip().endswith(text)


CZECH = "Město Brno leží na soutoku Svratky a Svitavy. Řeka teče přes žulové břehy.\n"
POLISH = "Gdańsk leży nad Zatoką Gdańską i jest dużym miastem portowym. Żeglarze śpią.\n"
TURKISH = "İstanbul Türkiye'nin en kalabalık şehridir, boğazın iki yakasında kurulmuştur.\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (CZECH, "cp1250"),
        (CZECH, "iso8859-2"),
        (POLISH, "iso8859-2"),
        (POLISH, "cp1250"),
        (TURKISH, "cp1254"),
        ("Η Αθήνα είναι η πρωτεύουσα της Ελλάδας και η μεγαλύτερη πόλη της.", "cp1253"),
        ("Вода в реке холодная, а город стоит на высоком берегу.", "koi8-r"),
        ("The façade of the Café Müller in Zürich.", "cp1252"),
        ("A town without a mark.", "utf-16-le"),
    ],
)
def test_a_guess_is_told_with_its_confidence_and_a_key_overrules_it(tmp_path, text, encoding):
    path = write(tmp_path, {"a.txt": text.encode(encoding)}) / "a.txt"
    reading = Reading()
    assert [document.text for _, document in Corpus(path).read(reading)] == [text]
    told = r"read as .+(a guess with confidence 0\.\d: set encoding=NAME|no byte order mark)"
    assert re.search(told, next(reading.lines()))
    other = "cp1251" if encoding != "utf-16-le" else "utf-16-be"
    assert read(path, encoding=other)[0].text == text.encode(encoding).decode(other)


# --- dialects of csv ---------------------------------------------------------------------------------------

OPEN, HAMLET = '"To be or not', '"Hamlet" is a play, and long'


@pytest.mark.parametrize(
    ("name", "table", "texts"),
    [
        # Without quoting, as data sets are. One record of another reading would take in two of these.
        ("a.tsv", f'id\ttext\n1\t{OPEN}\n2\tto be"\n3\t{HAMLET}\n', [OPEN, 'to be"', HAMLET]),
        ("a.tsv", f'id\ttext\n1\t{OPEN}\n2\tto be"\n', [OPEN, 'to be"']),
        ("a.csv", f"id|text\n1|{OPEN}\n2|{HAMLET}\n", [OPEN, HAMLET]),
        ("a.csv", 'id,text\n1,"Orrin" is old\n2,a "hall"\n', ['"Orrin" is old', 'a "hall"']),
        # With quoting.
        ("a.tsv", 'id\ttext\n1\t"a\tb ""c"""\n2\t"d\ne"\n', ['a\tb "c"', "d\ne"]),
        ("a.csv", 'id,text\n1,"a, b\nc"\n2,"d\n\ne, f"\n', ["a, b\nc", "d\n\ne, f"]),
        ("a.csv", 'id, text\n1, "One, two"\n2, "Three"\n', ["One, two", "Three"]),
        ("a.csv", 'id,text\n1,"say \\"a, b\\""\n2,"c"\n', ['say "a, b"', "c"]),
        # Delimiters that the header alone would not tell.
        ("a.csv", "id;text;as, it, is\n1;Orrin, a town;x\n", ["Orrin, a town"]),
        ("a.csv", "text\nA town, old\nWith, more, commas\n", ["A town, old", "With, more, commas"]),
        ("a.csv", "sep=;\r\nid;text\r\n1;a, b\r\n", ["a, b"]),
        ("a.csv", "\ufeffsep=^\nid^text\n1^a;b\n", ["a;b"]),
        ("a.csv", 'id,text\r1,Orrin\r2,"a, b"\r', ["Orrin", "a, b"]),
        ("a.csv", "id,text,,\n1,Orrin,,\n2,Sarn,,,,\n", ["Orrin", "Sarn"]),
    ],
)
def test_the_dialect_of_a_table_is_that_of_most_of_its_lines(tmp_path, name, table, texts):
    assert [document.text for document in read(write(tmp_path, {name: table}) / name)] == texts


def test_a_late_quotation_mark_decides_too(tmp_path):
    rows = [f"{n}\tRow {n}" for n in range(70_000)] + [f"a\t{OPEN}", 'b\tto be"', "c\tend"]
    write(tmp_path, {"a.tsv": "\n".join(["id\ttext", *rows])})
    assert [document.text for document in read(tmp_path / "a.tsv")][-3:] == [OPEN, 'to be"', "end"]


def test_one_faulty_row_costs_itself_and_is_named(tmp_path):
    rows = [f'{n},"Row ""{n}"", of many"' for n in range(50)]
    write(tmp_path, {"a.csv": "\n".join(["id,text", *rows, 'x,"bad "quote" here"', "y,end"])})
    reading = Reading()
    documents = [document for _, document in Corpus(tmp_path / "a.csv").read(reading)]
    assert (len(documents), documents[0].text) == (51, 'Row "0", of many')
    (told,) = reading.faults.lines()
    assert "a.csv row 51: not csv on line 52 (" in told


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('id,text\n1,"To be\n2,or not"\n3,"a, b"\n', ["row 1 takes in lines 3 to 3, which read as rows"]),
        ('id,text\n1,"To be,\nor not,\nto be"\n3,"a, b"\n', []),
    ],
)
def test_a_record_that_takes_in_what_reads_as_rows_is_named(tmp_path, table, told):
    list(Corpus(write(tmp_path, {"a.csv": table}) / "a.csv").read(reading := Reading()))
    assert [one for one in told if one in " ".join(reading.lines())] == told
    assert bool(reading.notes) == bool(told)


# --- values and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, math.nan, "", "  "])
def test_a_missing_title_or_id_is_none(tmp_path, missing):
    write(tmp_path, {"a.jsonl": json.dumps({"id": missing, "title": missing, "text": "A town."})})
    (document,) = read(tmp_path / "a.jsonl")
    assert (document.title, len(document.id)) == ("", 32)


def test_missing_values_of_parquet_are_none_and_whole_numbers_stay_whole(tmp_path):
    titles = pa.array([None, datetime(1914, 7, 28)], pa.timestamp("ns"))
    table = {"id": pa.array([1914.0, math.nan]), "title": titles, "text": ["A.", "B."]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet")
    assert (first.id, first.title, second.title, len(second.id)) == ("1914", "", "1914-07-28 00:00:00", 32)


def test_a_file_name_that_is_not_utf8_is_read_and_shown_with_its_bytes(tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    for name, content in ((b"/na\xefve.md", b"A town."), (b"/bad\xff.md", b""), (b"/x\xfe.pdf", b"")):
        Path(os.fsdecode(folder + name)).write_bytes(content)
    found = survey(Corpus(os.fsdecode(folder), on_bad="skip"))
    told = "\n".join(found.reading.lines())
    assert found.documents == 1 and r"caf\xe9/bad\xff.md: no text" in told and r"x\xfe.pdf" in told
    assert read(os.fsdecode(folder + b"/na\xefve.md"))[0].id == r"na\xefve.md"
    json.dumps(found.reading.to_json()).encode()
    with pytest.raises(CorpusError, match=r"bad\\xff\.md: no text"):
        survey(Corpus(os.fsdecode(folder)))


def test_a_glob_chooses_files_and_their_ids_are_paths_below_its_fixed_part(tmp_path):
    write(tmp_path, {"docs (old)/a.md": "A", "docs (old)/sub/b.md": "B", "docs (old)/package.json": "{}"})
    found = read(str(tmp_path / "docs (old)" / "**" / "*.md"))
    assert [document.id for document in found] == ["a.md", "sub/b.md"]


def test_texts_that_differ_in_white_space_alone_are_indexed_once_and_told_with_both_places(tmp_path):
    texts = ["A town on\n   the river.", "A town on the river.", "Another town."]
    write(tmp_path, {"a.jsonl": "\n".join(json.dumps({"text": text}) for text in texts)})
    found = survey(Corpus(tmp_path / "a.jsonl"))
    assert (found.documents, found.duplicates) == (2, 1)
    ((one, other),) = found.examples
    assert (one, other) == (f"{tmp_path}/a.jsonl line 2", f"{tmp_path}/a.jsonl line 1")


@pytest.mark.parametrize("name", ["a", "a b", "-abc", "a..b", "1.2.3.4", "x" * 513, "übung"])
def test_a_name_that_chroma_refuses_is_refused_before_anything_is_read(tmp_path, name):
    with pytest.raises(StoreError, match="is no name for Chroma: write 3 to 512 of"):
        chroma_target([tmp_path / "chroma"], name)


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x", "{}/a.jsonl/x", "{}/" + "x" * 300])
def test_a_place_that_cannot_be_written_is_one_error(tmp_path, place):
    write(tmp_path, {"a.jsonl": '{"text": "A town."}'})
    with pytest.raises(StoreError, match=r"cannot be written \(.+\): choose another place"):
        build_index(tmp_path / "a.jsonl", place.format(tmp_path), "corpus", EmbedderSpec("packaged-minilm"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("space", ["cosine", "ip", "l2"])
@pytest.mark.parametrize("old", [True, False])
def test_the_distance_of_another_tools_collection_is_measured(tmp_path, space, old):
    new = {"configuration": {"hnsw": {"space": space}}}
    where: dict[str, Any] = {"metadata": {"hnsw:space": space}} if old else new
    with connect(ChromaPlace.parse(tmp_path / "chroma"), create=True) as client:
        handle = client.create_collection("papers", embedding_function=None, **where)
        handle.add(ids=["a", "b"], embeddings=[[2.0, 0.0], [0.0, 3.0]], documents=["a", "b"])
        assert measured_distance(handle) == space


# --- all that is wrong, in one list ------------------------------------------------------------------------

GOOD = b'{"id": "1", "text": "Orrin is a town."}\n'
MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty.md": (b"", "no text"),
    "blank.txt": (b" \n\t\n", "no text"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xfe\x9c" * 9, "a binary file?"),
    "one-bad-line.md": ("Köln\nGröße\n".encode() + b"caf\xe9", "byte 0xe9 is in another encoding than the"),
    "no-json.jsonl": (GOOD + b"{text: 1}\n", "line 2: not JSON"),
    "deep.jsonl": (b"[" * 100_000, "line 1: not JSON: nested too deep"),
    "no-record.jsonl": (b'"Orrin"\n', "line 1: not a record with fields, but text"),
    "no-text.jsonl": (b'{"body": "x"}\n', "line 1: no text: no field 'text' or 'contents'; its fields are"),
    "null.jsonl": (b'{"text": null}\n', "line 1: no text: 'text' is empty"),
    "nan.jsonl": (b'{"text": NaN}\n', "line 1: no text: 'text' is empty"),
    "blank.jsonl": (b'{"text": "  "}\n', "line 1: no text: 'text' is empty"),
    "number.jsonl": (b'{"text": 7}\n', "line 1: the text ('text') is a number"),
    "title.jsonl": (b'{"title": ["a"], "text": "b"}\n', "line 1: the title ('title') is a list"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "line 1: half a character"),
    "same-id.jsonl": (b'{"id": "x", "text": "a"}\n{"id": "x", "text": "b"}\n', "line 2: has the id 'x' of"),
    "cut.json": (b'[{"text": "Orrin"', "not JSON"),
    "scalar.json": (b"3", "neither a list of records nor one record"),
    "ragged.csv": (b"title,text\nOrrin\n", "row 1: 1 fields, and the header has 2"),
    "twice.csv": (b"text,text\na,b\n", "the header has 'text' more than once"),
    "quote.csv": (b'title,text\nOrrin,"A town\n', "row 1: not csv on line 2"),
    "cut.jsonl.gz": (gzip.compress(GOOD * 99)[:30], "cannot be read (Truncated"),
    "no-gzip.csv.gz": (b"title,text\n", "cannot be read (zlib"),
    "no.parquet": (b"PAR1", "not a parquet file"),
    "no-columns.parquet": (parquet(), "its fields are headword, definition, n"),
}


def test_more_than_twenty_malformed_sources_are_one_list_and_nothing_is_half_built(tmp_path):
    source = write(tmp_path / "source", {name: content for name, (content, _) in MALFORMED.items()})
    (source / "no-pipe.txt").symlink_to("gone")
    write(source, {"good.md": "# Orrin\nA town."})
    with pytest.raises(CorpusError) as refused:
        build_index(source, tmp_path / "chroma", "corpus", EmbedderSpec("no-such-model"))
    message = str(refused.value)
    assert message.splitlines()[0] == f"{source} has {len(MALFORMED) + 2} faults:"
    for name, (_, says) in MALFORMED.items():
        (line,) = [line for line in message.splitlines() if f"/{name}:" in line or f"/{name} " in line]
        assert says in line
    assert "no-pipe.txt: cannot be read (No such file or directory)" in message
    assert message.splitlines()[-1].startswith("Nothing was indexed. Correct them, or")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_with_skip_the_rest_is_indexed_and_what_was_left_out_is_told(tmp_path):
    source = write(tmp_path, {name: content for name, (content, _) in MALFORMED.items()})
    write(source, {"b.pdf": "x", "c/d.pdf": "x", "LICENSE": "x", ".git/x.txt": "X", ".hidden.md": "Y"})
    found = survey(Corpus(source, on_bad="skip"))
    assert found.documents == 2  # of no-json.jsonl and same-id.jsonl
    counts = {suffix: some.count for suffix, some in found.reading.left_out.items()}
    assert counts == {".pdf": 2, "files without a suffix": 1}
    told = "\n".join(found.reading.lines())
    assert f"{len(MALFORMED) + 1} faulty records or files skipped:" in told
    assert "empty.md: no text" in told and "2 .pdf left out" in told


@pytest.mark.parametrize(
    ("files", "settings", "says"),
    [
        ({"a.jsonl": "{}\n{}\n"}, {"on_bad": "skip"}, "holds no documents: all 2 were faulty"),
        ({"a.pdf": "x"}, {}, "no documents: a corpus is a file, a folder or"),
        ({"a.jsonl": ""}, {}, "holds no documents"),
        ({"a.txt": "A"}, {"encoding": "cp125"}, "encoding=cp125 is no encoding"),
    ],
)
def test_what_gives_no_corpus_is_refused(tmp_path, files, settings, says):
    with pytest.raises(CorpusError, match=says):
        survey(Corpus(write(tmp_path, files), **settings))


def test_alike_faults_are_one_line_that_counts_them(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": ""}\n' * 9})
    told = r"a\.jsonl lines 1, 2, 3, 4, 5 and 4 more: no text: 'text' is empty"
    with pytest.raises(CorpusError, match=told):
        read(tmp_path / "a.jsonl")


# --- data sets of the hub ----------------------------------------------------------------------------------


@pytest.fixture
def data_sets(monkeypatch, tmp_path):
    """A hub with one data set of tables and one of texts, and an empty cache."""
    words = {"README.md": b"# Words\n", "data/train-0.jsonl": lines(), "data/test-0.csv": table(",")}
    sets = {"org/words": words, "org/notes": {"a.md": b"# Orrin\nA town.", "b.bin": b"\0"}}
    hub_fault.cache_clear()
    with LoopbackHub(sets, port=NO_HUB):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        yield
    hub_fault.cache_clear()


@pytest.mark.parametrize(
    ("source", "titles"),
    [
        ("org/words", ["bit", "byte", "bit", "byte"]),
        ("hf://datasets/org/words/data/train-0.jsonl", ["bit", "byte"]),
        ("hf://datasets/org/words@main/data/test*.csv", ["bit", "byte"]),
        ("org/notes", ["Orrin"]),
    ],
)
def test_a_data_set_of_the_hub_is_read_by_name_its_tables_or_else_its_texts(data_sets, source, titles):
    assert [document.title for document in read(source, fields=MAPPED)] == titles


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("org/none", "there is no file or folder 'org/none', and the data set org/none cannot be fetched"),
        ("hf://datasets/org/words/none.csv", "the data set org/words has no file none.csv"),
        ("hf://org/words", "names no data set: write hf://datasets/OWNER/NAME"),
    ],
)
def test_a_data_set_that_is_not_there_is_refused(data_sets, source, says):
    with pytest.raises(CorpusError, match=re.escape(says)):
        read(source)
