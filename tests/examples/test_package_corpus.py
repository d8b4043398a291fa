"""The corpus of installed packages, from made-up metadata with every fault that real ones have."""

import json
import random
from importlib.metadata import distributions

import pytest

from data.benchmarks import load_benchmark
from examples.package_corpus import hold_out, main, questions, read_packages
from examples.package_language import FACTS, REQUIRES, ask, facts_in, read_question, say
from verl_ext.method.answers import contains_answer
from verl_ext.method.passages import format_passages

PROSE = "Galmir reads the gauges of a river and warns the towns that lie on it."


def installed(folder, name, *headers, body="", version="1.2.3", place=None):
    """Write a package's metadata, as pip leaves them."""
    home = folder / (place or "site") / f"{name.replace('-', '_')}-{version}.dist-info"
    home.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *headers]
    (home / "METADATA").write_text("\n".join(lines) + f"\n\n{body}\n", encoding="utf-8")


def read(folder, *places):
    return read_packages(distributions(path=[str(folder / place) for place in places or ("site",)]))


def fact(folder, name, *headers):
    installed(folder, "galmir", *headers)
    return read(folder)["galmir"].facts.get(name)


NAMES = ["Kim Davies", "Sebastián Ramírez", "Weights & Biases", "Guido van Rossum", "Galmir Developers"]
NO_NAMES = ["UNKNOWN", "kim@example.org", "sysid", "Kim Davies, Ada Quill", "Kim Davies and contributors"]
NO_NAMES += ["Travis E. Oliphant et al.", "Seed - MLSys", "Shay Palachy (and others)", "Kim D.", "Galmir"]
NO_NAMES += ["The Hugging Face team (https://example.org)"]
AUTHORS = [([f"Author: {name}"], name) for name in NAMES] + [([f"Author: {name}"], None) for name in NO_NAMES]
KIM = "Author-email: Kim Davies <kim@example.org>"
AUTHORS += [([KIM], "Kim Davies"), (["Author: Kim Davies", KIM.replace(" Davies", "  Davies")], "Kim Davies")]
AUTHORS += [([f"{KIM}, Ada Quill <ada@example.org>"], None), (["Author: Ada Quill", KIM], None)]
AUTHORS += [(['Author-email: "Jason R. Coombs" <jaraco@example.org>'], "Jason R. Coombs"), ([], None)]
AUTHORS += [(["Author-email: kim@example.org"], None)]


@pytest.mark.parametrize(("headers", "author"), AUTHORS)
def test_an_author_is_stated_if_the_metadata_name_one(tmp_path, headers, author):
    assert fact(tmp_path, "author", *headers) == author


def approved(*licences):
    return [f"Classifier: License :: OSI Approved :: {licence}" for licence in licences]


LICENCES = [
    (["License-Expression: MIT"], "MIT"),
    (["License: Apache License, Version 2.0"], "Apache-2.0"),
    (["License: apache-2.0"], "Apache-2.0"),
    (["License: MIT License", *approved("MIT License")], "MIT"),
    (approved("ISC License (ISCL)"), "ISC"),
    (["License: BSD-3-Clause", *approved("BSD License")], "BSD-3-Clause"),
    ([], None),
    (["License: UNKNOWN"], None),
    (["License: BSD"], None),
    (["License: Apache"], None),
    (["License-Expression: Apache-2.0 AND MIT"], None),
    (["License-Expression: LicenseRef-Proprietary"], None),
    (["License: MIT", *approved("ISC License (ISCL)")], None),
    (approved("MIT License", "Apache Software License"), None),
    (["License: Permission is hereby granted, free of charge, to any person,", "        to use it."], None),
]


@pytest.mark.parametrize(("headers", "licence"), LICENCES)
def test_a_licence_is_stated_if_the_metadata_give_one_identifier(tmp_path, headers, licence):
    assert fact(tmp_path, "licence", *headers) == licence


HUB = "https://github.com"


@pytest.mark.parametrize(
    ("name", "headers", "value"),
    [
        ("python", ["Requires-Python: >=3.10"], "3.10"),
        ("python", ["Requires-Python: <3.15,>=3.11.2,!=3.12.0"], "3.11"),
        ("python", ["Requires-Python: >=3"], "3.0"),
        ("python", ["Requires-Python: ==3.12.*"], None),
        ("python", ["Requires-Python: three"], None),
        ("python", [], None),
        ("account", [f"Home-page: {HUB}/kim/galmir"], "kim"),
        ("account", [f"Project-URL: Code, {HUB}/Kim/a", f"Home-page: {HUB}/kim/a"], "kim"),
        ("account", [f"Project-URL: Pay, {HUB}/sponsors/ada"], None),
        ("account", [f"Project-URL: A, {HUB}/a/x", f"Project-URL: B, {HUB}/b/x"], None),
        ("account", [f"Home-page: {HUB}/galmir/galmir"], None),
        ("account", ["Home-page: https://example.org/kim/galmir"], None),
    ],
)
def test_other_facts_are_stated_if_they_are_clear(tmp_path, name, headers, value):
    found = fact(tmp_path, name, *headers)
    assert (found or "").lower() == (value or "")


def test_the_first_requirement_is_one_that_is_installed_and_needed_here(tmp_path):
    wanted = [
        "absent>=1",
        'extra-one; extra == "all"',
        'old-one; python_version < "3"',
        "Sendra-X (>=2)",
        "ulvit",
    ]
    installed(tmp_path, "galmir", *(f"Requires-Dist: {line}" for line in wanted))
    for name in ("sendra_x", "ulvit", "extra-one", "old-one"):
        installed(tmp_path, name)
    assert read(tmp_path)["galmir"].facts[REQUIRES] == "sendra_x"


def test_of_two_installations_the_one_that_python_imports_is_described(tmp_path):
    installed(tmp_path, "galmir", "Author: Kim Davies", place="first")
    installed(tmp_path, "Galmir", "Author: Ada Quill", place="second", version="9")
    packages = read(tmp_path, "first", "second")
    assert list(packages) == ["galmir"] and packages["galmir"].facts["author"] == "Kim Davies"


@pytest.mark.parametrize(
    ("body", "prose"),
    [
        (f"# Galmir\n\n[![ok](a.svg)](b)\n\n> Quoted.\n\n- {PROSE}\n\n{PROSE}", [PROSE]),
        (PROSE.replace("river", "[river](https://example.org)"), [PROSE]),
        (f"Galmir\n======\n\n.. image:: a.svg\n\n{PROSE.replace('river', '*river*')}\n", [PROSE]),
        (f"The first of its kind was made by Kim Davies in the year 2001.\n\n{PROSE}", [PROSE]),
        (f"{PROSE} It is the best there is. See https://example.org for the rest.", 2),
        ("# Galmir\n\n[![ok](a.svg)](b)\n\n```\npip install galmir\n```\n\n| a | b |\n|--|--|\n", []),
        ("Galmir liest die Pegel eines Flusses und warnt die Orte, die daran liegen.", []),
        ("图书馆读取河流的水位并警告沿岸的城镇，让人们有时间离开。", []),
        (f"It needs Python 3.6 or newer and is under the MIT license.\n\n{PROSE}", [PROSE]),
    ],
)
def test_prose_is_the_first_english_paragraph_without_markup_or_other_facts(tmp_path, body, prose):
    kind = "text/x-rst" if "=====" in body else "text/markdown"
    installed(tmp_path, "galmir", f"Description-Content-Type: {kind}", body=body)
    found = list(read(tmp_path)["galmir"].prose)
    assert found == prose or len(found) == prose


@pytest.mark.parametrize(
    ("summary", "prose"),
    [
        ("Reads river gauges.", ("Reads river gauges.",)),
        ("UNKNOWN", ()),
        ("Galmir", ()),
        ("Reads gauges, see https://example.org", ()),
        ("读取 河流 水位", ()),
    ],
)
def test_a_summary_that_says_something_opens_the_text(tmp_path, summary, prose):
    installed(tmp_path, "galmir", f"Summary: {summary}")
    assert read(tmp_path)["galmir"].prose == prose


@pytest.fixture
def chain_of_packages(tmp_path):
    """Thirty pairs of packages: the first needs the second."""
    for number in range(30):
        other = [
            f"Author: {chr(65 + number % 26)}da Quill",
            "License-Expression: MIT",
            f"Summary: {PROSE * 9}",
        ]
        needs = [f"Requires-Dist: {'base'}-{number}", "Author: Kim Davies", "License-Expression: MIT"]
        installed(tmp_path, f"base-{number}", *other, version=f"3.{number}")
        installed(tmp_path, f"top-{number}", *needs, version="1.0", body=PROSE)
    return read(tmp_path)


def test_two_documents_fit_a_search_response_and_state_their_facts(chain_of_packages):
    passages = [{"title": package.title, "text": package.text()} for package in chain_of_packages.values()]
    for package, one, other in zip(chain_of_packages.values(), passages, passages[1:], strict=False):
        shown = format_passages(["a"], [[one, other]], 1024)
        assert one["text"] in shown and other["text"] in shown
        assert facts_in(one["text"]) == package.facts


def test_questions_have_one_answer_in_the_last_document_alone(chain_of_packages):
    held_out = hold_out(chain_of_packages)
    titles = {package.title for package in held_out}
    for package in chain_of_packages.values():
        assert (package.title in titles) == (package.facts.get(REQUIRES, package.title) in titles)
    assert len(held_out) == 24
    for hop, count in ((1, 40), (2, 20)):
        chains = questions(held_out, hop, count)
        assert chains == questions(hold_out(chain_of_packages), hop, count)
        assert len({chain.question for chain in chains}) == len(chains) == count
        for chain in chains:
            texts = [chain_of_packages[doc].text() for doc in chain.doc_ids]
            assert contains_answer(texts[-1], chain.answer) and not contains_answer(
                chain.question, chain.answer
            )
            assert not any(contains_answer(text, chain.answer) for text in texts[:-1])
            assert (chain.entities[0], chain.relations) == read_question(chain.question)
    # The licences are equal, so two hops never ask for them.
    assert {chain.relations[-1] for chain in questions(held_out, 2, 99)} == {"author", "release"}


def test_no_question_of_two_hops_begins_at_a_package_that_gives_the_next_one_away(tmp_path):
    installed(tmp_path, "galmir", "Author: Kim Davies")
    installed(tmp_path, "galmir-extra", "Requires-Dist: galmir")
    installed(tmp_path, "sendra", "Requires-Dist: galmir")
    chains = questions(list(read(tmp_path).values()), 2, 10)
    assert {chain.entities[:2] for chain in chains} == {("sendra", "galmir")}


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("value", ["Jason R. Coombs", "Apache-2.0", "3.11", "0.66b2", "ruamel.yaml"])
def test_every_wording_of_a_fact_and_of_a_question_can_be_read_back(name, value):
    rng = random.Random(1)
    for _ in range(20):
        text = f"It reads. {say(name, 'base.x-1', value, rng)} It warns."
        assert facts_in(text) == {name: value}
        for walk in ((name,), (REQUIRES, name), (REQUIRES, REQUIRES, name)):
            assert read_question(ask("base.x-1", walk, rng)) == ("base.x-1", walk)
    assert read_question("Who are you?") is None


def test_the_packages_installed_here_make_a_corpus_and_its_held_out_questions(tmp_path, capsys):
    main(["--outputs", str(tmp_path), "--questions", "60"])
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["chains.jsonl", "corpus.jsonl"]
    documents = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert len(documents) > 150 and all(len(d["title"] + d["text"]) <= 490 for d in documents)
    benchmark = load_benchmark(tmp_path / "chains.jsonl")
    assert {question.hop for question in benchmark} == {1, 2}
    assert {doc for question in benchmark for doc in question.doc_ids} < {d["id"] for d in documents}
    assert f"{len(documents)} documents" in capsys.readouterr().out
