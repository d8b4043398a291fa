"""Names of the volumes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.launch.errors import LaunchError
from drzero.launch.volumes import volume_names

WORD = st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True)


@pytest.mark.parametrize(("own", "end"), [({}, ""), ({"EXPERIMENTER": "alice"}, "-alice-default")])
def test_the_names_are_the_guides(own, end):
    assert volume_names(own) == {
        "corpus": f"dr-zero-corpus{end}",
        "checkpoints": f"dr-zero-checkpoints{end}",
        "cache": f"dr-zero-cache{end}",
    }


@given(WORD, WORD)
def test_an_experimenter_has_volumes_of_her_own(who, what):
    names = volume_names({"EXPERIMENTER": who, "EXPERIMENT_NAME": what})
    assert names["checkpoints"] == f"dr-zero-checkpoints-{who}-{what}"


@pytest.mark.parametrize(
    "environment",
    [
        {"EXPERIMENT_NAME": "x"},
        {"EXPERIMENTER": "a/b"},
        {"EXPERIMENTER": "x" * 65},
        {"EXPERIMENTER": "x" * 30, "EXPERIMENT_NAME": "y" * 30},
    ],
)
def test_names_that_modal_would_refuse_are_refused_here(environment):
    with pytest.raises(LaunchError, match="EXPERIMENT"):
        volume_names(environment)
