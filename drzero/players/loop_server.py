"""A server on 127.0.0.1 for the clients of one event loop's episodes.

server = await Gateway.running()     # started on first use, closed with the loop's generators
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

from aiohttp import web

_LARGEST_REQUEST = 64 << 20  # bytes. A million ids take about 7 MB


class LoopServer:
    """One server of its class in each event loop. A subclass has the routes."""

    cancels: ClassVar[bool] = False  # a request's work when its client leaves

    def __init__(self) -> None:
        self.url = ""

    def routes(self) -> Iterable[web.RouteDef]:
        """The paths it answers."""
        raise NotImplementedError

    @classmethod
    async def running(cls) -> Self:
        """The running loop's server."""
        loop = asyncio.get_running_loop()
        async with _STARTING.setdefault(loop, asyncio.Lock()):
            servers = _SERVERS.setdefault(loop, {})
            if cls not in servers:
                server = cls()
                serving = server._serving()
                await anext(serving)
                servers[cls] = (server, serving)
        found = servers[cls][0]
        assert isinstance(found, cls)
        return found

    async def _serving(self) -> AsyncGenerator[None]:
        app = web.Application(client_max_size=_LARGEST_REQUEST)
        app.router.add_routes(self.routes())
        runner = web.AppRunner(app, access_log=None, handler_cancellation=self.cancels)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            yield
        finally:
            # The generator holds the loop, and so both would stay.
            _SERVERS.get(asyncio.get_running_loop(), {}).pop(type(self), None)
            await runner.cleanup()


_SERVERS: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[type[LoopServer], tuple[LoopServer, AsyncGenerator[None]]]
] = WeakKeyDictionary()
_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
