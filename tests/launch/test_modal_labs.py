"""What you try on Modal besides a run: a model at a public address."""

import httpx
import pytest
from conftest import unused_port
from modal_checkout import PLANTED, make_checkout, run_action, stage_plane, start_action

from drzero.launch.container import MARGIN_S

SERVED_S = 45
TINY = ["--gpu-count", "0", "--model", "demo-policy", "base_model=${paths.corpus}/models/tiny"]


@pytest.fixture(scope="module")
def plane(tmp_path_factory, checkout, speaking_model):
    with stage_plane(tmp_path_factory.mktemp("plane")) as plane:
        done = run_action(plane, checkout, "upload", str(speaking_model), "models/tiny")
        assert done.code == 0, done.stdout + done.stderr
        yield plane


def asked(port, token):
    try:
        url = f"http://127.0.0.1:{port}/v1/models"
        return httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
    except httpx.TransportError:
        return None


@pytest.mark.slow("a model's server, which waits for its end")
@pytest.mark.timeout(400)
def test_a_model_answers_at_a_tunnel_who_has_the_token_until_its_time_is_up(plane, checkout):
    port, timeout = unused_port(), f"compute.timeout={MARGIN_S + SERVED_S:.0f}"
    client = start_action(plane, checkout, "serve-model", *TINY, f"port={port}", timeout)
    plane.wait_for(lambda: asked(port, "other") is not None or client.has_ended, "an answer", 300)
    assert asked(port, "other").status_code == 401, client.stdout
    assert asked(port, PLANTED["OPENAI_API_KEY"]).json()["data"][0]["id"] == "tiny"
    done = client.wait(300)
    assert done.code == 0, done.stdout + done.stderr
    assert f"export OPENAI_BASE_URL=https://port-{port}.modal.invalid/v1" in done.stdout
    assert "usd_at_most: 0.04" in done.stdout and "serve_model is finished; it cost $0.0" in done.stdout
    assert not [value for value in PLANTED.values() if value in done.stdout + done.stderr]


@pytest.mark.parametrize(
    ("has_token", "words", "why"),
    [
        (False, [], "OPENAI_API_KEY is not in .env, and the model's address is public"),
        (True, ["--open"], "--open: requests need OPENAI_API_KEY once it is in .env"),
    ],
)
def test_an_address_that_anyone_could_ask_has_to_be_wanted(has_token, words, why, plane, tmp_path):
    before = len(plane.requests)
    done = run_action(plane, make_checkout(tmp_path, dotenv=has_token), "serve-model", *words)
    assert done.code == 2 and why in done.stderr and len(done.stderr.splitlines()) == 1
    assert len(plane.requests) == before
