"""A real corpus that every installation has: what the installed Python packages say about themselves.

    python -m examples.package_corpus                                      # into outputs/packages
    drzero prepare-data source=outputs/packages/corpus.jsonl hold_out=[outputs/packages/chains.jsonl]

Writes `corpus.jsonl`, a short document a package: its summary, a paragraph of its description, and facts from
its metadata as sentences. A fact that the metadata state in two ways is left out. Writes `chains.jsonl`,
questions of one and two hops about a part of the packages, which shares no link with the rest. So `hold_out=`
keeps all that they ask about out of training. Equal packages give equal files.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from email.utils import getaddresses
from importlib.metadata import Distribution, PackageMetadata, distributions
from itertools import islice, pairwise, takewhile
from pathlib import Path

from bs4 import BeautifulSoup
from markdown_it import MarkdownIt
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from data.benchmarks import CHAINS
from data.demo_world import Chain
from data.leaks import given_away
from data.prose import prose_share
from data.spread import spread
from drzero.ops.files import write_jsonl
from examples.package_language import FACTS, REQUIRES, ask, say
from search.indexing.boundaries import SENTENCE_END
from search.sources.rst import rst_to_html
from verl_ext.method.answers import contains_answer

OUTPUTS = Path(__file__).resolve().parents[1] / "outputs" / "packages"
# Two passages fill a response of 1,024 characters (config/model/demo-policy.yaml).
PASSAGE_CHARS = 490
HELD_OUT = 0.4
_READ = 20_000  # characters of a description
_LICENCES = {
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "MIT License": "MIT",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""What packages write in place of an SPDX identifier. "BSD" and "Apache" say too little."""
_CLASSIFIER = "License :: OSI Approved :: "
_REPOSITORY = re.compile(r"https?://(?:www\.)?github\.com/([\w-]+)/[\w.-]+")
_WORD = r"(?:[^\W\d_]+(?:[.'’-][^\W\d_]+)*\.?|&)"
_NAME = re.compile(rf"{_WORD}(?: {_WORD}){{,5}}")
_SEVERAL = re.compile(r"\s*[,;/]\s*|\s+and\s+|\s+et al\b")
_LEFT_OUT = re.compile(
    r"\blicen[sc]|\bauthor|\bversion|\breleases?\b|\bpython\s*\d|\bgithub|https?:|www\."
    r"|\bdocumentation\b|\binstall|\bcheck\b|\bsee\b|\bnote\b|\bbelow\b|\.\.\.|[|`<>{}]"
    r"|(?-i:\bby [A-Z])|\bwelcome|\bcontribut|\bcode of conduct\b|\bpull request",
    re.IGNORECASE,
)
"""In sentences that may contradict the metadata, send readers elsewhere, or keep some markup."""
_ENGLISH = re.compile(r"\b(?:the|and|of|to|is|for|with|that|in|an?|it|are|you|from|on|as)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Package:
    """A package: sentences from its README, and facts by name, as in `package_language.FACTS`."""

    id: str
    title: str
    prose: tuple[str, ...]
    facts: Mapping[str, str]

    def text(self) -> str:
        """As much prose as a passage has room for, then the facts."""
        rng = random.Random(self.id)
        facts = " ".join(say(name, self.title, value, rng) for name, value in self.facts.items())
        room = PASSAGE_CHARS - len(f"{self.title}: {facts}")
        shown = ""
        for sentence in self.prose:
            if len(shown) + len(sentence) >= room:
                break
            shown += f"{sentence} "
        return shown + facts


def read_packages(found: Iterable[Distribution]) -> dict[str, Package]:
    """Return the packages by normalized name. Of two with one name, the first is the one Python imports."""
    installed: dict[str, Distribution] = {}
    for distribution in found:
        if name := distribution.metadata["Name"]:
            installed.setdefault(canonicalize_name(name), distribution)
    titles = {key: str(installed[key].metadata["Name"]) for key in sorted(installed)}
    return {key: _package(key, titles, installed[key]) for key in titles}


def _package(key: str, titles: Mapping[str, str], distribution: Distribution) -> Package:
    metadata = distribution.metadata
    values = {
        "author": _author(metadata["Author"], metadata["Author-email"]),
        "licence": _licence(metadata),
        "python": _oldest_python(metadata["Requires-Python"]),
        "release": _release(distribution.version),
        "account": _account([metadata["Home-page"], *metadata.get_all("Project-URL", [])]),
        REQUIRES: _first_requirement(key, titles, distribution.requires or []),
    }
    facts = {
        name: value
        for name, value in values.items()
        if value and (name == REQUIRES or not given_away(titles[key], value))
    }
    return Package(key, titles[key], tuple(_prose(metadata)), facts)


def _author(author: str | None, emails: str | None) -> str | None:
    """The only author, if both headers name no other."""
    named = [*_SEVERAL.split(_known(author)), *(name for name, _ in getaddresses([_known(emails)]))]
    names = {" ".join(name.split()) for name in named} - {""}
    name = names.pop() if len(names) == 1 else ""
    # The name ends where a sentence may.
    fits = _NAME.fullmatch(name) and name[0].isupper() and name[-1].isalpha() and name[-2].isalpha()
    return name if fits else None


def _licence(metadata: PackageMetadata) -> str | None:
    """Its only SPDX identifier."""
    if expression := _known(metadata["License-Expression"]):
        return _spdx(expression)
    classifiers = [
        line.removeprefix(_CLASSIFIER)
        for line in metadata.get_all("Classifier", [])
        if line.startswith(_CLASSIFIER)
    ]
    stated = {_spdx(line) for line in (_known(metadata["License"]), *classifiers)} - {None}
    return stated.pop() if len(stated) == 1 and len(classifiers) <= 1 else None


def _spdx(text: str) -> str | None:
    with suppress(InvalidLicenseExpression):
        licence = str(canonicalize_license_expression(_LICENCES.get(text.strip(), text)))
        return None if " " in licence or licence.startswith("LicenseRef") else licence
    return None


def _oldest_python(text: str | None) -> str | None:
    with suppress(InvalidSpecifier):
        least = [spec.version for spec in SpecifierSet(_known(text)) if spec.operator in (">=", "~=")]
        return ".".join(map(str, (*Version(least[0]).release, 0)[:2])) if len(least) == 1 else None
    return None


def _release(text: str) -> str | None:
    with suppress(InvalidVersion):
        return Version(text).public
    return None


def _account(addresses: Iterable[str | None]) -> str | None:
    found = {match[1] for address in addresses for match in _REPOSITORY.finditer(_known(address))}
    accounts = {account.lower(): account for account in sorted(found)}
    accounts.pop("sponsors", None)
    return accounts.popitem()[1] if len(accounts) == 1 else None


def _first_requirement(key: str, titles: Mapping[str, str], lines: Iterable[str]) -> str | None:
    for line in lines:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        is_met = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_met and name in titles and name != key:
            return titles[name]
    return None


def _known(text: str | None) -> str:
    """A header's text, or "" for the words that tools write in place of none."""
    return "" if text is None or text.strip().upper() in ("UNKNOWN", "NONE") else text


def _prose(metadata: PackageMetadata) -> Iterator[str]:
    """The summary, and the beginning of the first paragraph in English."""
    summary = _known(metadata["Summary"]).strip().rstrip(".!?")
    if len(summary.split()) >= 3 and summary.isascii() and not _LEFT_OUT.search(summary):
        yield f"{summary}."
    kind = metadata["Description-Content-Type"] or "text/x-rst"
    english = filter(None, map(_beginning, _paragraphs(metadata["Description"] or "", kind)))
    yield from (sentence for sentence in next(english, ()) if sentence.rstrip(".") != summary)


def _paragraphs(text: str, kind: str) -> Iterator[str]:
    beginning = text[:_READ]
    html = rst_to_html(beginning) if kind.startswith("text/x-rst") else MarkdownIt().render(beginning)
    for paragraph in BeautifulSoup(html, "html.parser").find_all("p"):
        if paragraph.find_parent(["li", "table", "blockquote", "aside", "dl"]) is None:
            yield " ".join(paragraph.get_text().split())


def _beginning(paragraph: str) -> list[str]:
    """The paragraph's sentences before one that is left out, if they are ten or more English words."""
    ends = [match.end() for match in SENTENCE_END.finditer(paragraph)]
    lines = [paragraph[start:end].strip() for start, end in pairwise([0, *ends, len(paragraph)])]
    whole = (line for line in lines if line.endswith((".", "!")) and line[0].isalnum())
    sentences = list(takewhile(lambda line: not _LEFT_OUT.search(line), whole))
    text = " ".join(sentences)
    words = len(text.split())
    fits = words >= 10 and len(_ENGLISH.findall(text)) >= words / 8 and prose_share(text) >= 0.8
    return sentences if fits else []


def hold_out(packages: Mapping[str, Package]) -> list[Package]:
    """Choose packages to hold out, each with its first requirement and with all that need it first."""
    by_title = {package.title: package for package in packages.values()}
    group = {key: {key} for key in packages}
    for package in packages.values():
        if REQUIRES in package.facts:
            joined = group[package.id] | group[by_title[package.facts[REQUIRES]].id]
            group.update(dict.fromkeys(joined, joined))
    groups = sorted({min(some): sorted(some) for some in group.values()}.values())
    random.Random(0).shuffle(groups)
    chosen = set[str]()
    for some in groups:
        if len(chosen) + len(some) <= HELD_OUT * len(packages):
            chosen.update(some)
    return [package for package in packages.values() if package.id in chosen]


def questions(packages: Sequence[Package], hop: int, count: int) -> list[Chain]:
    """Return at most `count` questions, of all facts in turn. The answer is in the last document alone."""
    by_title = {package.title: package for package in packages}
    rng = random.Random(hop)
    chains = []
    for package in packages:
        path = [package]
        while (
            len(path) < hop and (name := path[-1].facts.get(REQUIRES)) and not given_away(package.title, name)
        ):
            path.append(by_title[name])
        if len(path) == hop:
            chains += [chain for name in FACTS if (chain := _chain(path, name, rng))]
    rng.shuffle(chains)
    by_package = spread(chains, lambda chain: chain.doc_ids[0])
    by_fact = spread(by_package, lambda chain: chain.relations[-1])
    return [replace(chain, id=f"packages-{hop}-{i:04d}") for i, chain in enumerate(islice(by_fact, count))]


def _chain(path: Sequence[Package], name: str, rng: random.Random) -> Chain | None:
    answer = path[-1].facts.get(name)
    relations = (*[REQUIRES] * (len(path) - 1), name)
    question = ask(path[0].title, relations, rng)
    early = [f"{package.title}\n{package.text()}" for package in path[:-1]]
    if answer is None or given_away(question, answer) or any(contains_answer(text, answer) for text in early):
        return None
    ids, titles = zip(*((package.id, package.title) for package in path), strict=True)
    return Chain("", len(path), question, answer, ids, (*titles, answer), relations)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the corpus and its questions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--outputs", type=Path, default=OUTPUTS, help="a folder for both files")
    parser.add_argument("--questions", type=int, default=100, help="at most, of each hop count")
    given = parser.parse_args(arguments)
    packages = {key: package for key, package in read_packages(distributions()).items() if package.facts}
    held_out = hold_out(packages)
    chains = [chain for hop in (1, 2) for chain in questions(held_out, hop, given.questions)]
    documents = [{"id": p.id, "title": p.title, "text": p.text()} for p in packages.values()]
    write_jsonl(given.outputs / "corpus.jsonl", documents)
    write_jsonl(given.outputs / CHAINS, map(asdict, chains))
    print(f"{len(documents)} documents in {given.outputs}, {len(chains)} questions about {len(held_out)}")


if __name__ == "__main__":
    main()
