"""MCP by the official SDK: an assistant or an IDE searches the index, or asks the agent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from itertools import count
from typing import Annotated, Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.routing import Route

from drzero.agent.answer import Source, State, progress_lines, sources_of
from drzero.agent.server.desk import Desk
from drzero.agent.server.events import Tell, at_work
from drzero.agent.server.faults import logged
from drzero.ops.disconnect import unless_gone
from drzero.ops.notices import plain
from search.client import SearchClient
from verl_ext.method.search_calls import MAX_QUERY_CHARS

PATIENCE_S = 55  # Clients give up on a call after 60 s
_MARGIN_S = 5  # For a question to end by its own deadline
_IDLE_S = 2 * 3600  # An editor keeps its session over lunch, and few clients end theirs
_MOST_PASSAGES = 20
_SHOWN_SOURCES = 10
_TOO_LATE = "no answer in time. If the agent has just been started, ask again in a minute"

Served = tuple[Desk, SearchClient]
Await = Callable[[Tell], Awaitable[Served]]
"""Waits until there is a desk, and tells of it."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)


class _Search(_Arguments):
    query: Annotated[
        str, Field(max_length=MAX_QUERY_CHARS, min_length=1, description="A short question or phrase.")
    ]
    limit: Annotated[int, Field(ge=1, le=_MOST_PASSAGES, description="Most passages to return.")] = 5


class _Ask(_Arguments):
    question: Annotated[
        str, Field(max_length=8192, min_length=1, description="One question that stands on its own.")
    ]


class _Passage(BaseModel):
    id: str
    title: str
    text: str


class _Evidence(_Passage):
    evidence: Annotated[str | None, Field(description="The sentence or title with the answer.")]


class _Found(BaseModel):
    query: str
    passages: list[_Passage]
    index: Annotated[str, Field(description="Identity of the index that was searched.")]


class _Answered(BaseModel):
    answer: str | None
    state: Annotated[
        State,
        Field(description="supported: a passage has the answer. unsupported: none does. none: no answer."),
    ]
    note: str | None
    sources: list[_Evidence]
    searches: Annotated[list[str], Field(description="The agent's own queries.")]
    model: str
    iteration: Annotated[int | None, Field(description="Of training; 0 is the model before it.")]
    index: Annotated[str, Field(description="Identity of the index that was searched.")]


def _tool(name: str, title: str, description: str, takes: type[BaseModel], gives: type[BaseModel]) -> Tool:
    return Tool(
        name=name,
        title=title,
        description=description,
        input_schema=takes.model_json_schema(),
        output_schema=gives.model_json_schema(mode="serialization"),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    )


_TOOLS = [
    _tool(
        "search",
        "Search the documents",
        "Passages of the documents that fit one query, in under a second. Use it to read for yourself.",
        _Search,
        _Found,
    ),
    _tool(
        "ask",
        "Ask the agent",
        "An agent searches the documents several times and answers, with the sentences it rests on; takes up "
        "to a minute. Use it for a question whose answer lies in several documents.",
        _Ask,
        _Answered,
    ),
]


def agent_server(served: Await) -> Server[Any]:
    """An MCP server with both tools. Calls wait until the desk is served."""

    async def tools(_: ServerRequestContext[Any], __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=_TOOLS)

    async def call(context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        answered = _told(context, lambda tell: _result(served, params, tell))
        if context.request is None:
            return await answered
        return await unless_gone(context.request.receive, answered) or _failed("the client left")

    return Server(
        "drzero-agent",
        version=version("drzero-recipes"),
        title="Dr. Zero's search agent",
        instructions="Answers from one collection of documents. `ask` for an answer, `search` for passages.",
        on_list_tools=tools,
        on_call_tool=call,
    )


async def _told(
    context: ServerRequestContext[Any], work: Callable[[Tell], Awaitable[CallToolResult]]
) -> CallToolResult:
    """The work's result. The client hears each search, and that the work goes on."""
    number = count(1)
    async with at_work(work, "still at it") as (messages, working):
        async for message in messages:
            await context.session.report_progress(next(number), message=message)
        return await working


async def _result(served: Await, params: CallToolRequestParams, tell: Tell) -> CallToolResult:
    """A call's result. An error is a result too, for the model that called to act on."""
    if params.name not in _CALLS:
        return _failed(f"there is no tool {params.name!r}: use {' or '.join(_CALLS)}")
    takes, run = _CALLS[params.name]
    try:
        arguments = takes.model_validate(params.arguments or {})
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout_at(began + PATIENCE_S) as limit:
            desk, search = await served(tell)
            limit.reschedule(began + max(PATIENCE_S, desk.askers[0].solver.deadline_s + _MARGIN_S))
            return await run(arguments, desk, search, tell)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        return _failed("; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in faults))
    except TimeoutError:
        return _failed(_TOO_LATE)
    except Exception as error:  # A call's failure must not end the others' session.
        return _failed(str(logged(error, f"a call of {params.name}")))


async def _search(asked: _Search, desk: Desk, search: SearchClient, tell: Tell) -> CallToolResult:
    tell(f"searching: {plain(asked.query)}")
    results = await search.retrieve([asked.query], asked.limit)
    found = list(sources_of([asked.query], results))
    passages = [_Passage(id=one.id, title=one.title, text=one.text) for one in found]
    shown = [f"{_headed(number, one)}\n{one.text}" for number, one in enumerate(found, 1)]
    return _done(
        shown or ["Nothing was found."], _Found(query=asked.query, passages=passages, index=desk.index)
    )


async def _ask(asked: _Ask, desk: Desk, _: SearchClient, tell: Tell) -> CallToolResult:
    def progress(queries: Sequence[str], found: Sequence[Source] | None) -> None:
        tell("; ".join(progress_lines(queries, found, plain)))

    answer = await desk.ask(asked.question, progress=progress)
    if answer.state == "failed":
        return _failed(f"the question failed: {answer.attempt.failure}. Ask again, or use search")
    asker = desk.askers[0]
    answered = _Answered(
        answer=answer.text,
        state=answer.state,
        note=answer.note,
        sources=[_Evidence(**vars(source)) for source in answer.sources[:_SHOWN_SOURCES]],
        searches=answer.searches,
        model=asker.name,
        iteration=asker.iteration,
        index=desk.index,
    )
    iteration = "" if asker.iteration is None else f", iteration {asker.iteration}"
    sources = "\n".join(_evidence(number, one) for number, one in enumerate(answered.sources, 1))
    identity = f"(model {asker.name}{iteration}; index {desk.index})"
    return _done([answer.text, answer.note, sources and f"Sources:\n{sources}", identity], answered)


_CALLS: dict[str, tuple[type[_Arguments], Callable[..., Awaitable[CallToolResult]]]] = {
    "search": (_Search, _search),
    "ask": (_Ask, _ask),
}


def _headed(number: int, passage: Source | _Passage) -> str:
    place = f" ({passage.id})" if passage.id else ""
    return f"[{number}] {passage.title or 'untitled'}{place}"


def _evidence(number: int, source: _Evidence) -> str:
    return _headed(number, source) + (f": {source.evidence}" if source.evidence else "")


def _done(parts: Sequence[str | None], content: BaseModel) -> CallToolResult:
    text = plain("\n\n".join(filter(None, parts)))
    return CallToolResult(content=[TextContent(text=text)], structured_content=content.model_dump())


def _failed(words: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=plain(words))], is_error=True)


class Mcp:
    """The server over streamable HTTP. Whoever mounts it checks tokens, hosts and origins."""

    def __init__(self, desk: Desk, search: SearchClient) -> None:
        async def served(_: Tell) -> Served:
            return desk, search

        self._sessions = StreamableHTTPSessionManager(agent_server(served), session_idle_timeout=_IDLE_S)
        self.routes = [Route("/mcp", self._sessions.asgi_app)]

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Sessions live as long as the application."""
        async with self._sessions.run():
            yield
