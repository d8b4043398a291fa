"""Are the demands that packages make on each other met by a set of versions?

    verdict = judge(packages, {"torch": "2.11.0", …}, brought=frozenset({"numpy"}), python="3.12")
    verdict.errors

A resolver answers this by choosing versions; here they are given, and every demand is looked at, so that one
that is knowingly not met (`launch.pins.OVERRIDES`) can be told from one that nobody has thought of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from launch.pins import ADDED, DATA_ONLY, OVERRIDES, SGLANG_IMAGE, normalised

_BASE = frozenset(SGLANG_IMAGE.packages)


@dataclass(frozen=True)
class Package:
    """What a package declares."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    """Its demands, as it writes them."""
    requires_python: str = ""


@dataclass(frozen=True)
class Finding:
    """A demand that the image does not meet."""

    package: str
    wants: str
    has: str
    stated: str = ""
    """Why it may be so; empty for an error."""


@dataclass(frozen=True)
class Verdict:
    """What came of judging an image."""

    findings: tuple[Finding, ...]
    demands: int
    unknown: int
    """Demands on packages whose version is not known here."""

    @property
    def errors(self) -> list[Finding]:
        """What may not be so."""
        return [finding for finding in self.findings if not finding.stated]


def judge(
    packages: Iterable[Package], versions: Mapping[str, str], brought: frozenset[str], python: str
) -> Verdict:
    """Judge every demand of the packages.

    `versions` is what the image has by name, `brought` are names that it has in versions not known here, and
    `python` is its Python, major and minor.
    """
    declared = {normalised(package.name): package for package in packages}
    asked = _asked(declared, python)
    findings: list[Finding] = []
    demands = unknown = 0
    for package in declared.values():
        # Any patch release of a series will do for us; this is a late one.
        if not SpecifierSet(package.requires_python).contains(f"{python}.12"):
            findings.append(Finding(package.name, f"Python {package.requires_python}", python))
        for demand in asked[normalised(package.name)]:
            demands += 1
            name = normalised(demand.name)
            if name not in versions and name in brought:
                unknown += 1
                continue
            finding = _finding(package, demand, versions.get(name))
            if finding is not None:
                findings.append(finding)
    return Verdict(tuple(findings), demands, unknown)


def _asked(declared: Mapping[str, Package], python: str) -> dict[str, list[Requirement]]:
    """The demands of each package that hold on the image's Python, with the extras that others ask of it."""
    extras: dict[str, frozenset[str]] = dict.fromkeys(declared, frozenset())
    while True:
        asked = {name: list(_demands(package, extras[name], python)) for name, package in declared.items()}
        wanted = dict(extras)
        for demand in (each for demands in asked.values() for each in demands):
            name = normalised(demand.name)
            if name in wanted:
                wanted[name] |= demand.extras
        if wanted == extras:
            return asked
        extras = wanted


def _demands(package: Package, extras: frozenset[str], python: str) -> Iterator[Requirement]:
    environment: dict[str, str] = {
        **{key: str(value) for key, value in default_environment().items()},
        "python_version": python,
        "python_full_version": f"{python}.12",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    for line in package.requires:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate(environment | {"extra": each}) for each in ("", *extras)):
            yield requirement


def _finding(package: Package, demand: Requirement, has: str | None) -> Finding | None:
    if has is None:
        # What SGLang needs for itself is in its image or not needed; a file is used without its library.
        if package.name in (*_BASE, *DATA_ONLY):
            return None
        return Finding(package.name, str(demand), "nothing")
    if demand.specifier.contains(Version(has), prereleases=True):
        return None
    wants = f"{normalised(demand.name)}{demand.specifier}"
    for override in OVERRIDES:
        stated = (override.by, f"{override.package}{override.instead_of}", override.version)
        if (package.name, wants, has) == stated:
            return Finding(package.name, wants, has, stated=override.why)
    if package.name in _BASE and normalised(demand.name) not in ADDED:
        return Finding(package.name, wants, has, stated="so in SGLang's own image")
    return Finding(package.name, wants, has)


def extra_findings(package: Package, extra: str, versions: Mapping[str, str], python: str) -> list[Finding]:
    """What an extra of the package wants otherwise than `versions` has it.

    What is not in `versions` is left out: an extra is for more uses than ours.
    """
    asked = (
        each for each in _demands(package, frozenset({extra}), python) if normalised(each.name) in versions
    )
    found = (_finding(package, each, versions[normalised(each.name)]) for each in asked)
    return [finding for finding in found if finding is not None]
