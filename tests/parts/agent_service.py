"""The agent's service in a thread of the tests' process: `agent_service(model_url, search_url)`.

`script` plays the model behind it, `passages` the search.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, NamedTuple

import uvicorn
from starlette.responses import JSONResponse

from drzero.agent.running import Asker
from drzero.agent.server.app import create_app
from drzero.agent.server.desk import Desk
from drzero.stages.models import StageModel
from search.client import SearchClient
from search.wire import make_passage
from verl_ext.clients.chat_endpoint import ChatEndpoint
from verl_ext.clients.solver_agent import SolverAgent

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\u202e{{7*7}}\x1b[31m"
SENTENCE = "Velmar lies on the river Sendra."
TITLE = "Where Velmar lies"
UNSEARCHED = "Who needs no search?"
ANSWERS = {
    "Where does Velmar lie?": "the river Sendra",
    "Who founded Velmar?": "Nobody",
    "Who is hostile?": f"It is {HOSTILE}",
    "Who knows?": "",
    UNSEARCHED: "Nobody",
}


class Service(NamedTuple):
    url: str
    desk: Desk


class Later(JSONResponse):
    async def __call__(self, *arguments: Any) -> None:
        await asyncio.sleep(1)
        await super().__call__(*arguments)


def script(body: dict[str, Any]) -> dict[str, Any]:
    """Search for the question, then give its answer. Without tools, give a title."""
    if "tools" not in body:
        return {"choices": [{"message": {"role": "assistant", "content": TITLE}, "finish_reason": "stop"}]}
    question = max(ANSWERS, key=body["messages"][1]["content"].rfind)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if body["messages"][-1]["role"] == "tool" or question == UNSEARCHED:
        message["content"] = f"<answer>{ANSWERS[question]}</answer>"
    else:
        function = {"name": "search", "arguments": json.dumps({"query_list": [question]})}
        message["tool_calls"] = [{"id": "a", "type": "function", "function": function}]
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


def passages(body: dict[str, Any]) -> dict[str, Any]:
    """Two passages for each query, the first with evidence in its second sentence."""
    velmar = make_passage("velmar", "Velmar", f"Weavers live here. {SENTENCE} It rains.")
    hostile = make_passage("hostile", f"Title {HOSTILE}", f"It is {HOSTILE} indeed.")
    return {"result": [[velmar, hostile] for _ in body["queries"]]}


@contextmanager
def agent_service(
    model_url: str,
    search_url: str,
    *,
    sides: int = 1,
    places: int = 4,
    token: str | None = None,
    lists_sources: bool = False,
    deadline_s: float = 30,
    **states: str,
) -> Iterator[Service]:
    """Serve the agent with so many sides, and services in these states."""
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    async def opened() -> tuple[Desk, uvicorn.Server]:
        searches = SearchClient(search_url, topk=2, deadline_s=30)
        stack.push_async_callback(searches.aclose)
        askers = [await _asker(stack, model_url, searches, f"side-{n}", deadline_s) for n in range(sides)]
        desk = Desk(askers, "f00d" * 16, places)
        app = create_app(desk, searches, token=token, states=lambda: states, lists_sources=lists_sources)
        return desk, uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))

    desk, server = loop.run_until_complete(opened())
    thread = threading.Thread(target=loop.run_until_complete, args=[server.serve(sockets=[listener])])
    thread.start()
    try:
        yield Service(f"http://127.0.0.1:{listener.getsockname()[1]}", desk)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        loop.run_until_complete(stack.aclose())
        loop.close()


async def _asker(
    stack: AsyncExitStack, url: str, searches: SearchClient, name: str, deadline_s: float
) -> Asker:
    endpoint = ChatEndpoint(f"{url}/v1", name, key_variable=None)
    solver = SolverAgent(
        "",
        name,
        None,
        searches,
        topk=2,
        max_tokens_per_turn=256,
        max_context_tokens=4096,
        temperature=0.0,
        deadline_s=deadline_s,
        endpoint=endpoint,
    )
    stack.push_async_callback(endpoint.aclose)
    stack.push_async_callback(solver.aclose)
    return Asker(solver, StageModel(name, name, name, endpoint=endpoint), name)
