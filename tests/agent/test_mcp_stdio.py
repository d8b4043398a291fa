"""MCP over stdio: the command in a child process, spoken to line by line and by the SDK's own client."""

import asyncio
import json
import os
import subprocess
import sys

import psutil
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from scripted_endpoint import KEY, agent_words, scripted_endpoint
from search_parts import lives, wait_for

from drzero.agent.serve import run_serve_agent
from drzero.ops.errors import UserError

QUESTION = {"question": "On which river does the town of Velmar lie?"}
WHO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
LOUD = """
import os, subprocess, sys
from drzero.agent import running
from drzero.cli import main
ask = running.ask_index
def loud(url):
    print("a library prints", flush=True)
    os.write(1, b"a C library prints\\n")
    subprocess.run(["sh", "-c", "echo a child prints; cat"])
    return ask(url)
running.ask_index = loud
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def endpoint():
    with scripted_endpoint() as running:
        yield running


@pytest.fixture
def words(towns_index, endpoint, tmp_path):
    return ["serve-agent", "--stdio", f"chroma.path={towns_index}", *agent_words(endpoint.url, tmp_path)]


class Conversation:
    """The protocol by hand. A line that is no message of it ends the test."""

    def __init__(self, words, errors):
        self._errors = errors.open("w+")
        environ = {**os.environ, "OPENAI_API_KEY": KEY}
        command, pipe = [sys.executable, "-c", LOUD, *words], subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=environ
        )
        self._sent = 0

    def ask(self, method, **params):
        self._sent += 1
        self._send({"id": self._sent, "method": method, "params": params})
        notified = []
        for line in self.process.stdout:
            message = json.loads(line)
            assert message["jsonrpc"] == "2.0"
            if "id" in message:
                assert message["id"] == self._sent
                return message["result"], notified
            notified.append(message)
        pytest.fail(self.errors())

    def greet(self):
        greeted, _ = self.ask("initialize", **WHO)
        self._send({"method": "notifications/initialized"})
        return greeted

    def call(self, name, arguments):
        token = {"progressToken": f"t{self._sent}"}
        return self.ask("tools/call", name=name, arguments=arguments, _meta=token)

    def end(self):
        """Close stdin, and return the exit code; nothing else may come."""
        self.process.stdin.close()
        assert self.process.stdout.read() == ""
        return self.process.wait(30)

    def errors(self):
        self._errors.seek(0)
        return self._errors.read()

    def _send(self, message):
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.process.stdin.flush()


@pytest.fixture
def converse(tmp_path):
    started = []

    def start(words):
        started.append(Conversation(words, tmp_path / "errors"))
        return started[-1]

    yield start
    for conversation in started:
        conversation.process.kill()
        conversation.process.wait()


def text_of(result):
    [content] = result["content"]
    return content["text"]


def test_it_answers_at_once_loads_behind_and_tells_of_a_service_that_dies(converse, words):
    conversation = converse([*words, "retrieval.restarts=0"])
    assert conversation.greet()["serverInfo"]["name"] == "drzero-agent"
    assert "ready" not in conversation.errors()
    answered, notified = conversation.call("ask", QUESTION)
    assert answered["structuredContent"]["answer"] == "Sendra" and text_of(answered).startswith("Sendra\n\n")
    told = [one["params"]["message"] for one in notified]
    assert told[0] == "the agent is loading" and told[-2:][0] == "searching: Velmar"
    assert {one["params"]["progressToken"] for one in notified} == {"t1"}

    errors = conversation.errors()
    assert all(f"{what} prints" in errors for what in ("a library", "a C library", "a child"))
    [keeper] = psutil.Process(conversation.process.pid).children()
    [server], children = keeper.children(), keeper.children(recursive=True)
    assert os.readlink(f"/proc/{server.pid}/fd/0") == "/dev/null"
    assert os.readlink(f"/proc/{conversation.process.pid}/fd/0") == "/dev/null"
    ours = (conversation.process.stdin, conversation.process.stdout)
    pipes = {os.readlink(f"/proc/self/fd/{pipe.fileno()}") for pipe in ours}
    held = {os.readlink(f"/proc/{server.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{server.pid}/fd")}
    assert not pipes & held

    server.kill()
    wait_for(lambda: "died" in conversation.errors(), 20)
    result, _ = conversation.call("search", {"query": "Velmar"})
    assert result["isError"] and "service 'retrieval' died: killed by SIGKILL" in text_of(result)
    assert "Its log is" in text_of(result) and "\n" not in text_of(result)
    assert conversation.end() == 1
    assert not any(map(lives, children))


def test_a_wrong_setting_is_told_to_who_calls_and_is_the_exit_code(converse, words):
    conversation = converse([*words, "chroma.collection=nowhere"])
    conversation.greet()
    result, _ = conversation.call("ask", QUESTION)
    assert result["isError"] and "nowhere" in text_of(result)
    assert conversation.end() == 2
    assert "no question can be answered" in conversation.errors()


def test_it_ends_with_stdin_while_it_loads(converse, words):
    conversation = converse(words)
    conversation.greet()
    wait_for(lambda: "[retrieval] starting" in conversation.errors(), 120)
    children = psutil.Process(conversation.process.pid).children(recursive=True)
    conversation.end()
    wait_for(lambda: not any(map(lives, children)), 20)


@pytest.mark.parametrize(
    "mode", [pytest.param("legacy", marks=pytest.mark.slow("test_mcp.py has each mode over HTTP")), "auto"]
)
def test_the_sdk_s_client_asks_and_leaves_nothing_behind(words, mode, tmp_path):
    environ = {"OPENAI_API_KEY": KEY, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    server = StdioServerParameters(command=sys.executable, args=["-m", "drzero.cli", *words], env=environ)
    told = []

    async def note(progress, total, message):
        told.append(message)

    async def ask():
        with (tmp_path / "errors").open("w") as errors:
            async with Client(stdio_client(server, errlog=errors), mode=mode) as client:
                assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "ask"]
                return await client.call_tool("ask", QUESTION, progress_callback=note)

    result = asyncio.run(ask())
    assert result.structured_content["answer"] == "Sendra", (tmp_path / "errors").read_text()
    assert told[0] == "the agent is loading" and "searching: Velmar" in told
    commands = [str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in command for command in commands)


def test_an_agent_to_compare_with_is_refused():
    with pytest.raises(UserError, match="--compare has no use with --stdio"):
        run_serve_agent(["--stdio", "--compare", "iteration=0"])
