"""The endpoints match their OpenAPI description for any request (schemathesis)."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from search_parts import build_collection, serving

QUIET = settings(max_examples=30, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    with serving(build_collection(tmp_path_factory.mktemp("fuzz"))) as server:
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_path_is_described(described):
    others = {"/index", "/passages/{key}", "/health", "/metrics"}
    assert set(described.raw_schema["paths"]) == {"/retrieve", *others}


# schemathesis' own pytest plugin does not work under pytest 9; its strategies and checks do.
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(("POST", "/retrieve", mode) for mode in GenerationMode),
        ("GET", "/passages/{key}", GenerationMode.POSITIVE),  # every id fits
    ],
)
def test_requests_that_fit_the_description_are_answered_and_others_refused(described, method, path, mode):
    """Status, content type and body are as described, and no answer is a 5xx."""

    @QUIET
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(described[path][method].as_strategy(generation_mode=mode))
        case.call_and_validate(timeout=60)

    check()


@pytest.mark.parametrize("path", ["/health", "/index", "/metrics"])
def test_the_other_paths_answer_as_described(described, path):
    described[path]["GET"].Case().call_and_validate(timeout=60)
