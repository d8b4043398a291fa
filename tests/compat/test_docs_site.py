"""The docs' site in headless Chromium: its search finds what a newcomer types, and no page is cut off.

make compat      # DRZERO_COMPAT=1; needs `chromium` on the path (Debian: apt-get install chromium)
"""

import subprocess
from pathlib import Path

import pytest
from other_environment import PLAYWRIGHT, driven, environment, only_by_make_compat

only_by_make_compat("needs Chromium and an environment with playwright", browser=True)

ROOT = Path(__file__).parents[2]
# What a newcomer types. One of these pages or sections must come first.
FIRST = {
    "my own documents": ("tutorial",),
    "my own data": ("tutorial",),
    "pdf files": ("tutorial", "corpus"),
    "out of memory": ("failures.html#out-of-memory", "preflight.html#the-memory-ledger"),
    "CUDA out of memory": ("failures.html#out-of-memory",),
    "OOM": ("failures.html#out-of-memory",),
    "how much does it cost": ("faq.html#how-much", "preflight.html#cost"),
    "price": ("preflight.html#cost", "faq.html#how-much"),
    "how long does it take": ("faq.html#how-much",),
    "resume": ("stopping", "loop.html#kill-it"),
    "continue after crash": ("loop.html#kill-it", "failures", "stopping"),
    "cancel a run": ("stopping",),
    "ask my agent": ("ask",),
    "no GPU": ("faq.html#no-gpu", "start"),
    "laptop": ("corpus.html#from-a-laptop", "start", "faq.html#no-gpu"),
    "why is my run slow": ("failures.html#it-crawls",),
    "stuck": ("faq.html#nothing-happens", "failures"),
    "is it learning": ("report.html#is-it-learning", "faq.html#the-reward-rises", "learning"),
    "use my own model": ("models",),
    "rent a gpu": ("modal", "machines"),
    "install": ("start",),
    "do I need labels": ("faq.html#do-i-need",),
    "chinese": ("languages",),
    "resme": ("stopping", "loop"),  # a slip of the fingers
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    python = environment(tmp_path_factory, PLAYWRIGHT)
    return driven(python, "drive_docs.py", str(ROOT / "build" / "site"), *FIRST, "zzqx", "")


@pytest.mark.parametrize("phrase", FIRST)
def test_the_search_ranks_a_fitting_page_first(seen, phrase):
    first = seen["found"][phrase][0]
    assert first.removeprefix("/docs/").startswith(FIRST[phrase]), seen["found"][phrase][:5]


def test_the_search_finds_nothing_for_what_no_page_has(seen):
    assert seen["found"]["zzqx"] == [] and seen["found"][""] == []


def test_no_page_is_cut_off_and_code_wraps_on_a_desk(seen):
    assert seen["pages"] > 40
    assert seen["cut off"] == [] and seen["scrolling code"] == []


def test_the_site_says_nothing_on_the_console_and_asks_nobody_else(seen):
    assert seen["messages"] == [] and seen["outside"] == []
