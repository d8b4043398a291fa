"""The agent's page in headless Chromium, over a scripted model and search.

make compat      # DRZERO_COMPAT=1; needs `chromium` on the path (Debian: apt-get install chromium)
"""

import time

import pytest
from agent_service import HOSTILE, SENTENCE, Later, agent_service, passages, script
from other_environment import PLAYWRIGHT, driven, environment, only_by_make_compat
from scripted_search import serving

only_by_make_compat("needs Chromium and an environment with playwright", browser=True)

SUPPORTED = "Found in a passage it read."
UNSUPPORTED = "No passage it read contains this answer."
QUESTION = "Where does Velmar lie?"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A Python with playwright."""
    return environment(tmp_path_factory, PLAYWRIGHT)


@pytest.fixture
def visit(python, tmp_path):
    """Drive the page through one of the script's visits."""
    return lambda url, name: driven(python, "drive_agent_page.py", str(tmp_path), url, name, seconds=120)


@pytest.fixture
def model(start_peer):
    return start_peer("/v1/chat/completions", script)


@pytest.fixture
def service(start_peer, model):
    with agent_service(model.url, start_peer("/retrieve", passages).url, sides=2) as running:
        yield running


def test_searches_come_before_the_answer_and_a_follow_up_after_it(visit, start_peer):
    model = start_peer("/v1/chat/completions", lambda body: Later(script(body)))
    with agent_service(model.url, start_peer("/retrieve", passages).url) as service:
        seen = visit(service.url, "by_keyboard")
    text, answers = seen["early"]
    assert text.startswith(f"Searched for {QUESTION}") and "Velmar" in text and answers == 0
    assert seen["first"] == {
        "answers": [["the river Sendra"]],
        "states": [[SUPPORTED]],
        "marks": [[SENTENCE]],
    }
    assert seen["told"] == f"the river Sendra: {SUPPORTED}"
    assert seen["second"] == {"answers": [["Nobody"]], "states": [[UNSUPPORTED]], "marks": [[]]}
    assert seen["second in view"]
    assert seen["opened"].startswith("Title <img") and seen["outline"] == "solid"
    assert seen["left"] == 0 and seen["third"]["answers"] == [[]]
    prompts = [body["messages"][1]["content"] for body in model.requests[1::2]]
    assert ["Asked before" in prompt for prompt in prompts] == [False, True, False]
    assert seen["messages"] == [] and seen["requests"] == ["/", "/ask", "/ask", "/ask"]


def test_hostile_text_stays_text(visit, service):
    seen = visit(service.url, "hostile")
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")
    assert seen["answers"] == [[f"It is {shown}"]] and f"Title {shown}" in seen["text"]
    assert seen["elements"] == 0 and seen["messages"] == []


def test_two_sides_fit_a_desk_and_a_phone_in_the_dark(visit, service):
    seen = visit(service.url, "two_sides")
    assert seen["names"] == ["side-0", "side-1"] and seen["states"] == [[SUPPORTED]] * 2
    assert seen["next to each other"] and seen["below each other"]
    assert seen["width on a phone"] == 390 and seen["background"] == "rgb(21, 24, 29)"


def test_a_stopped_question_frees_its_place_and_can_be_asked_again(visit, model):
    with serving((0, "")) as search, agent_service(model.url, search.url, places=1) as service:
        seen = visit(service.url, "stop")
        until = time.monotonic() + 10
        while service.desk.figures.left._value.get() < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert service.desk.figures.left._value.get() == 2
    assert seen["key"] == seen["button"] == ["Stopped.", QUESTION]


def test_a_token_is_asked_for_once(visit, start_peer, model):
    search = start_peer("/retrieve", passages)
    with agent_service(model.url, search.url, token="planted-token") as service:
        seen = visit(service.url, "token")
    assert seen["left"] == ["Stopped.", QUESTION]
    assert seen["refused"] == "The server did not accept this token."
    assert seen["entered"]["answers"] == [["the river Sendra"]] and seen["kept"] == [0, 1]


def test_a_server_that_fails_is_shown_as_what_it_is(visit, service):
    seen = visit(service.url, "faults")
    assert seen["gone"] == ["The server cannot be reached."]
    assert seen["early"] == ["The server ended the connection before the answer."]
    assert seen["busy"] == ["ask again in a moment"]
