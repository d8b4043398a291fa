"""Passes each request of Modal's protocol to the handler with its name.

A handler is an async method such as `async def VolumeCommit(self, request, caller)` that returns the reply,
or an async generator of replies. Requests without a handler are refused by name, and not retried.
"""

import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import grpclib.const
import grpclib.server
from grpclib import GRPCError, Status
from modal_proto.api_grpc import ModalClientBase

TASK_HEADER = "x-plane-task"
"""Header in which a container sends its id. Modal knows it from the socket of each."""

Handler = Callable[[Any, "Caller"], Any]


@dataclass(frozen=True)
class Caller:
    """Who sent a request: the connection's address, and the container's id if it is one."""

    peer: tuple[str, int]
    task_id: str | None


class _Names:
    """Stands in for a servicer, so that the protocol's own table can be read: each method is its name."""

    def __getattr__(self, name: str) -> str:
        return name


class Servicer:
    """All requests of the protocol, by the handlers' methods with a capital first letter.

    `requests` gets the name of each request, `failures` the traceback of each handler that broke.
    """

    def __init__(self, handlers: Iterable[object], requests: list[str], failures: list[str]) -> None:
        self._requests = requests
        self._failures = failures
        self._handlers: dict[str, Handler] = {}
        for handler in handlers:
            for name, method in inspect.getmembers(handler, inspect.ismethod):
                if name[0].isupper():
                    assert name not in self._handlers, f"two handlers of {name}"
                    self._handlers[name] = method

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """What grpclib asks a servicer for: the protocol's table with our function in each row."""
        protocol = ModalClientBase.__mapping__(cast(ModalClientBase, _Names()))
        return {path: row._replace(func=self._method(str(row.func))) for path, row in protocol.items()}

    def _method(self, name: str) -> Callable[[grpclib.server.Stream[Any, Any]], Any]:
        async def serve(stream: grpclib.server.Stream[Any, Any]) -> None:
            request = await stream.recv_message()
            self._requests.append(name)
            handler = self._handlers.get(name)
            if handler is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the loopback control plane has no handler of {name}")
            task_id = stream.metadata.get(TASK_HEADER) if stream.metadata else None
            address = stream.peer.addr() or ("", 0)
            caller = Caller((address[0], address[1]), str(task_id) if task_id else None)
            try:
                await self._reply(handler(request, caller), stream)
            except GRPCError:
                raise
            # A broken handler must fail the test and not be retried by the client as a passing fault.
            except Exception as error:
                self._failures.append(f"{name}: {traceback.format_exc()}")
                raise GRPCError(Status.FAILED_PRECONDITION, f"{name} broke: {error!r}") from error

        return serve

    async def _reply(self, answer: Any, stream: grpclib.server.Stream[Any, Any]) -> None:
        if not inspect.isasyncgen(answer):
            await stream.send_message(await answer)
            return
        async with aclosing(cast(AsyncIterator[Any], answer)) as replies:  # type: ignore[type-var]
            async for reply in replies:
                await stream.send_message(reply)
