"""The published SGLang wheels: fetched without installing, unpacked, and read name by name.

    python tests/compat/sglang_wheels.py docs/modal-image.md    # looks at every version, rewrites the table

They go to a cache outside of the repository: `DRZERO_COMPAT_CACHE`, or ~/.cache/drzero/sglang. The versions
are those at which something that a run needs comes or goes, with the last one before, and the newest.
"""

import functools
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from ops.atomic import atomic_write
from verl_ext.sglang_compat import FITS, HELPFUL, NEEDS, Need, missing
from verl_ext.sglang_source import Source

VERSIONS = (
    *(
        "0.4.6.post5",
        "0.4.9",
        "0.4.10",
        "0.5.1",
        "0.5.2",
        "0.5.3",
        "0.5.5",
        "0.5.6",
        "0.5.7",
        "0.5.9",
        "0.5.10",
    ),
    *("0.5.12", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.21", "0.5.23"),
)
BEGIN, END = "<!-- sglang table: make compat -->", "<!-- end of sglang table -->"


def cache() -> Path:
    """Where wheels are kept, unpacked."""
    return Path(os.environ.get("DRZERO_COMPAT_CACHE") or Path.home() / ".cache" / "drzero" / "sglang")


@functools.cache
def source(version: str) -> Source:
    """The wheel's source; fetched where it is not yet in the cache."""
    folder = cache() / version
    if not folder.exists():
        _fetch(version, folder)
    return Source(folder / "sglang")


def _fetch(version: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"),
            *("--python-version", "3.12", "--platform", "manylinux_2_34_x86_64", "--platform", "any"),
            *("--dest", scratch, f"sglang=={version}"),
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(".py")])
        unpacked.rename(target)


def table(versions: Iterable[str] = VERSIONS) -> str:
    """What of each need is in each version, as Markdown; needs of one fate share a row."""
    versions = sorted(versions, key=Version)
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for need in (*NEEDS, *HELPFUL):
        marks = tuple(_mark(need, version) for version in versions)
        rows.setdefault((need.by, need.kind, marks), []).append(_short(need))
    lines = [
        f"| what | {' | '.join(versions)} |",
        f"|---|{'---|' * len(versions)}",
        *(
            f"| {by}: {_told(kind, names)} | {' | '.join(marks)} |"
            for (by, kind, marks), names in rows.items()
        ),
        f"| **a run fits** | {' | '.join('no' if missing(version) else '**yes**' for version in versions)} |",
    ]
    return "\n".join(lines)


def _mark(need: Need, version: str) -> str:
    if not need.asked.contains(version, prereleases=True):
        return " "
    return "✓" if need.found_in(source(version)) else "–"


def _short(need: Need) -> str:
    """The name without the modules that lead to it."""
    return need.why.partition(":")[0] if need.why else f"`{need.name.rpartition(':')[2] or need.name}`"


def _told(kind: str, names: list[str]) -> str:
    if len(names) > 8:
        return f"all {len(names)} {kind}s"
    return f"{'argument ' if kind == 'argument' else ''}{', '.join(names)}"


def rewrite(page: Path) -> None:
    """Put the table between its markers; raises ValueError for a page without them."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no place for the table: {BEGIN} … {END}")
    atomic_write(page, f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
    print(f"{sys.argv[1]}: {len(VERSIONS)} versions of SGLang; a run uses {FITS}")
