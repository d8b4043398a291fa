"""Handlers of apps: their life cycle, with and without their client, their environment and their logs.

An app that is not detached ends with its client: when the client reports that it is done, or when its log
stream breaks. A detached one lives as long as a call is running. In both, the calls that the client itself
waits for (`.remote()` in a local entry point) end with the client, while a spawned call continues, as does
everything that a container calls. The client prints that a detached app keeps "the last triggered function"
alive, but users of Modal report that a call is cancelled when no client polls its output, and the client
spawns, not calls, for `modal run --detach app.py::function`: what works here works in both readings.
"""

import asyncio
from collections.abc import AsyncIterator

from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.calls import Calls
from modal_plane.containers import Containers
from modal_plane.objects import BUILDER_VERSION
from modal_plane.servicer import CALLER, Reply
from modal_plane.state import ENVIRONMENT, App, State, content_id, new_id


class AppHandlers:
    def __init__(self, state: State, calls: Calls, containers: Containers) -> None:
        self._state = state
        self._calls = calls
        self._containers = containers
        self._tasks: set[asyncio.Task[None]] = set()

    async def EnvironmentGetOrCreate(self, request: api_pb2.EnvironmentGetOrCreateRequest) -> Reply:
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER_VERSION)
        return dict(
            environment_id=content_id("en", ENVIRONMENT.encode()),
            metadata=api_pb2.EnvironmentMetadata(name=ENVIRONMENT, settings=settings),
        )

    async def AppCreate(self, request: api_pb2.AppCreateRequest) -> Reply:
        detached = request.app_state == api_pb2.APP_STATE_DETACHED
        app = App(new_id("ap"), request.description, detached, CALLER.get().peer)
        self._state.apps[app.id] = app
        return dict(app_id=app.id, app_page_url=f"http://127.0.0.1/apps/{app.id}")

    async def AppPublish(self, request: api_pb2.AppPublishRequest) -> Reply:
        app = self._app(request.app_id)
        app.functions = {tag: self._state.functions[fid] for tag, fid in request.function_ids.items()}
        app.state = "running"
        return {}

    async def AppClientDisconnect(self, request: api_pb2.AppClientDisconnectRequest) -> Reply:
        self._leave(self._app(request.app_id))
        return {}

    async def AppStop(self, request: api_pb2.AppStopRequest) -> Reply:
        await self.stop(self._app(request.app_id))
        return {}

    async def AppGetLogs(self, request: api_pb2.AppGetLogsRequest) -> AsyncIterator[api_pb2.TaskLogsBatch]:
        app = self._app(request.app_id)
        position = int(request.last_entry_id or 0)
        deadline = asyncio.get_running_loop().time() + request.timeout
        try:
            while True:
                while position < len(app.log.batches):
                    position += 1
                    yield app.log.batches[position - 1]
                remaining = deadline - asyncio.get_running_loop().time()
                # The client of a detached app need not wait for the calls that continue.
                left = app.state == "disconnected" and CALLER.get().peer == app.creator
                if app.log.closed or left:
                    yield api_pb2.TaskLogsBatch(app_done=True)
                    return
                if remaining <= 0:
                    return
                await app.log.bell.wait(remaining)
        except (asyncio.CancelledError, GeneratorExit):
            if CALLER.get().peer == app.creator:
                self._leave(app)
            raise

    async def stop(self, app: App) -> None:
        """End the app: its calls, its containers, then its log."""
        if app.state in ("stopping", "stopped"):
            return
        app.state = "stopping"
        await self._calls.end(self._calls.running(app))
        await self._containers.all_gone(app)
        app.state = "stopped"
        app.log.close()

    def _leave(self, app: App) -> None:
        if app.is_left:
            return
        app.is_left = True
        task = asyncio.create_task(self._outlive(app) if app.detached else self.stop(app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _outlive(self, app: App) -> None:
        """A detached app without its client: it ends with its last call."""
        app.state = "disconnected"
        app.log.bell.ring()
        await self._calls.end(self._calls.running(app, of_client=True))
        while self._calls.running(app):
            await self._calls.bell.wait(60)
        await self.stop(app)

    def _app(self, app_id: str) -> App:
        if app_id not in self._state.apps:
            raise GRPCError(Status.NOT_FOUND, f"App {app_id} not found")
        return self._state.apps[app_id]
