"""The table of what a run needs of SGLang, against the published wheels: one test per name and version.

make compat      # DRZERO_COMPAT=1; fetches what is not in the cache yet
"""

import os

import pytest

if not os.environ.get("DRZERO_COMPAT"):
    pytest.skip("fetches SGLang's wheels: make compat", allow_module_level=True)

from sglang_wheels import VERSIONS, source

from verl_ext.sglang_compat import HELPFUL, NEEDS, Need, missing


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("need", (*NEEDS, *HELPFUL), ids=lambda need: f"{need.kind} {need.name}")
def test_it_is_there_in_just_the_versions_that_the_table_says(need: Need, version: str) -> None:
    assert need.found_in(source(version)) == need.there.contains(version, prereleases=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_refused_when_something_asked_for_is_not_in_its_wheel(version: str) -> None:
    asked = [need for need in NEEDS if need.asked.contains(version, prereleases=True)]
    assert missing(version) == [str(need) for need in asked if not need.found_in(source(version))]
