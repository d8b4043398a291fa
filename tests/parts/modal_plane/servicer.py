"""Passes each request of Modal's protocol to the handler with its name.

A handler is an async method such as `async def VolumeCommit(self, request)` that returns the reply's fields,
or an async generator of replies. Requests without a handler are refused by name, and not retried.
"""

import inspect
import traceback
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import grpclib.const
import grpclib.server
from grpclib import GRPCError, Status
from modal_proto.api_grpc import ModalClientBase

TASK_HEADER = "x-plane-task"
"""Header in which a container sends its id. Modal knows it from the socket of each."""

Reply = dict[str, Any]
"""The fields of a reply. The protocol has its type."""
EMPTY = ("ClientHello", "AppHeartbeat", "AppGetByDeploymentName", "ContainerHello", "ContainerHeartbeat")
"""Requests with an empty reply. Each deployment is the first of its name."""


@dataclass(frozen=True)
class Caller:
    """Who sent a request: the connection's address, and the container's id, empty for a client."""

    peer: tuple[str, int]
    task_id: str


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Who sent the request that a handler works on."""


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
        self._handlers: dict[str, Callable[[Any], Any]] = {}
        for handler in handlers:
            for name, method in inspect.getmembers(handler, inspect.ismethod):
                if name[0].isupper():
                    assert name not in self._handlers, f"two handlers of {name}"
                    self._handlers[name] = method

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """What grpclib asks a servicer for: the protocol's table with our function in each row."""
        protocol = ModalClientBase.__mapping__(cast(ModalClientBase, _Names()))
        return {
            path: row._replace(func=self._method(str(row.func), row.reply_type))
            for path, row in protocol.items()
        }

    def _method(
        self, name: str, reply_type: Callable[..., Any]
    ) -> Callable[[grpclib.server.Stream[Any, Any]], Any]:
        async def serve(stream: grpclib.server.Stream[Any, Any]) -> None:
            request = await stream.recv_message()
            self._requests.append(name)
            if name in EMPTY:
                await stream.send_message(reply_type())
                return
            handler = self._handlers.get(name)
            if handler is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the loopback control plane has no handler of {name}")
            task_id = stream.metadata.get(TASK_HEADER) if stream.metadata else None
            address = stream.peer.addr() or ("", 0)
            CALLER.set(Caller((address[0], address[1]), str(task_id or "")))
            try:
                answer = handler(request)
                if not inspect.isasyncgen(answer):
                    await stream.send_message(reply_type(**await answer))
                    return
                async with aclosing(cast(AsyncIterator[Any], answer)) as replies:  # type: ignore[type-var]
                    async for reply in replies:
                        await stream.send_message(reply)
            except GRPCError:
                raise
            # A broken handler must fail the test and not be retried by the client as a passing fault.
            except Exception as error:
                self._failures.append(f"{name}: {traceback.format_exc()}")
                raise GRPCError(Status.FAILED_PRECONDITION, f"{name} broke: {error!r}") from error

        return serve
