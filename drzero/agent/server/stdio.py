"""MCP over stdin and stdout, for an assistant that starts the server itself: `serve-agent --stdio`.

It answers at once, and the services start behind it: the first call waits for them. All end with stdin.
"""

import asyncio
import signal
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import TextIO

import anyio
from mcp.server.stdio import stdio_server

from drzero.agent.compose import compose_agent
from drzero.agent.running import Agents, running
from drzero.agent.server.desk import opened_desk
from drzero.agent.server.events import Tell
from drzero.agent.server.mcp import Served, agent_server
from drzero.ops.console import say, set_verbose
from drzero.ops.errors import RunFailed, UserError
from drzero.ops.process.child import ChildError

_CHECK_EVERY_S = 0.5
_NAME = "run.name=serve_agent_stdio"  # It has no port to be named after


def serve_stdio(overrides: Sequence[str], out: TextIO) -> None:
    """Serve until stdin closes. A fault is told to whoever calls, and raised at the end."""
    front = _Front(out)
    front.start()
    try:
        config = compose_agent("serve_agent", [_NAME, *overrides])
        set_verbose(config.verbose)
        with running(config, stage="serve_agent") as agents:
            front.offer(agents)
            while not front.has_ended.wait(_CHECK_EVERY_S):
                try:
                    agents.services.check()
                except RunFailed as fault:  # before the other services stop, which takes seconds
                    front.fail(fault)
                    raise
    except (UserError, RunFailed) as fault:
        say("serve-agent", f"no question can be answered: {fault}", "error")
        front.fail(fault)
        front.has_ended.wait()
        raise


class _Front(threading.Thread):
    """The protocol, in a thread: the services' signals and checks need the main one."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(name="mcp", daemon=True)
        self._out = out
        self._loop = asyncio.new_event_loop()
        self._agents: asyncio.Future[Agents] = self._loop.create_future()
        self._fault: UserError | RunFailed | None = None
        self.has_ended = threading.Event()

    def offer(self, agents: Agents) -> None:
        """Calls get their answers from now on."""
        self._loop.call_soon_threadsafe(self._agents.set_result, agents)

    def fail(self, fault: UserError | RunFailed) -> None:
        """Calls get this fault from now on."""
        if isinstance(fault, ChildError):  # without its log's last lines
            fault = RunFailed(f"{fault.summary}. Its log is {fault.log_path}")
        self._fault = fault
        if not self._agents.done():
            self._loop.call_soon_threadsafe(self._agents.set_exception, self._fault)

    def run(self) -> None:
        """Serve until stdin closes."""
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self.has_ended.set()
            if not self._agents.done():  # Nothing else interrupts the start of the services.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    async def _serve(self) -> None:
        async with AsyncExitStack() as stack:
            opening = asyncio.ensure_future(self._opened(stack))
            stack.callback(opening.cancel)

            async def served(tell: Tell) -> Served:
                if self._fault:
                    raise self._fault
                if not opening.done():
                    tell("the agent is loading")
                return await asyncio.shield(opening)

            server = agent_server(served)
            streams = stdio_server(stdout=anyio.wrap_file(self._out))
            read, write = await stack.enter_async_context(streams)
            await server.run(read, write, server.create_initialization_options())

    async def _opened(self, stack: AsyncExitStack) -> Served:
        return await stack.enter_async_context(opened_desk(await asyncio.shield(self._agents)))
