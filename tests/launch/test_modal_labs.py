"""What you try on Modal besides a run: a model at a public address, and your own agent with its model."""

import json

import httpx
import pytest
from conftest import unused_port
from modal_checkout import PLANTED, make_checkout, run_action, stage_plane, start_action

from drzero.launch.container import MARGIN_S
from drzero.launch.errors import LaunchError
from drzero.launch.image.own_files import carried

SERVED_S = 45
TINY = ["--gpu-count", "0", "--model", "demo-policy", "base_model=${paths.corpus}/models/tiny"]


@pytest.fixture(scope="module")
def plane(tmp_path_factory, checkout, speaking_model):
    with stage_plane(tmp_path_factory.mktemp("plane")) as plane:
        run_action(plane, checkout, "upload", str(speaking_model), "models/tiny").succeeded()
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
    done = client.wait(300).succeeded()
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


AGENT = """
from openai import AsyncOpenAI


class Asking:
    async def run(self, data, base_url, api_key, **more):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            said = [{"role": "user", "content": data["question"]}]
            answer = await client.chat.completions.create(model="tiny", messages=said, max_tokens=4)
        return float(answer.usage.completion_tokens)
"""


@pytest.mark.slow("two containers, and a model's server")
@pytest.mark.timeout(400)
def test_an_agent_and_its_items_are_carried_to_the_model_and_reach_no_image(plane, checkout, tmp_path):
    (tmp_path / "asking_agent.py").write_text(AGENT)
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(3)))
    words = [f"{tmp_path}/asking_agent.py:Asking", f"tasks={tmp_path}/asked.jsonl", "mode=sample", "n=3"]
    done = run_action(plane, checkout, "agent-bench", *words, *TINY).succeeded()
    assert "finished       3 of 3" in done.stdout and "no fault was seen" in done.stdout
    request = plane.calls[-1].args[0]
    assert {"agent=../extra/asking_agent.py:Asking", "serve=true"} <= set(request.command)
    assert {"/root/extra/asking_agent.py", "/root/extra/asked.jsonl"} <= set(plane.mounted_files)
    assert not [line for image in plane.images_built for line in image.commands if "asking_agent" in line]
    assert not [value for value in PLANTED.values() if value in done.stdout + done.stderr]


def test_an_agent_that_does_not_load_costs_no_machine(plane, checkout, tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    done = run_action(plane, checkout, "agent-bench", f"{tmp_path}/broken.py:Asking")
    assert done.code == 1 and "No module named 'nowhere_to_be_found'" in done.stdout
    assert "preflight found errors (see above); no machine was requested" in done.stderr
    call = plane.calls[-1]
    assert call.function == "ask" and "openai" in "\n".join(call.spec.image.commands)


def test_files_that_overrides_name_are_found_in_the_container(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "asked.jsonl"):
        (tmp_path / name).write_text("")
    given = ["agent=mine.py:Asking", "tasks='asked.jsonl'", "compare.data=/corpus/a.parquet", "a.b=mine.py"]
    words, files = carried(given)
    assert words == ["agent=../extra/mine.py:Asking", "tasks='../extra/asked.jsonl'", *given[2:]]
    assert files == (f"{tmp_path}/mine.py", f"{tmp_path}/asked.jsonl")
    monkeypatch.setattr("drzero.launch.image.own_files.ROOT", tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "own.py").write_text("")
    assert carried(["agent=examples/own.py:answer"]) == (["agent=examples/own.py:answer"], ())
    modules = [
        "agent=package.module:answer",
        "compare.data=${paths.corpus}/a.jsonl",
        "tasks=/corpus/no.jsonl",
    ]
    assert carried(modules) == (modules, ())
    for missing in ("agent=mnie.py:Asking", "tasks=asked.json"):
        with pytest.raises(LaunchError, match="there is no file"):
            carried([missing])
