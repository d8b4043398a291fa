"""A real server that goes wrong on request: `python tests/faults/service.py FAULT MODULE ARGUMENT …`.

SIGUSR1 begins the fault: `block-loop` makes a call in the event loop's thread that never returns,
`errors` makes every answer a 500, `garbage` every answer of /retrieve nonsense.
"""

import runpy
import signal
import sys
import time

from starlette.requests import Request
from starlette.responses import Response

FAULT, MODULE = sys.argv[1], sys.argv[2]
begun = False


def rebuild_index():
    """A call that never returns."""
    time.sleep(100_000)


def begin(signum, frame):
    global begun
    begun = True
    if FAULT == "block-loop":
        rebuild_index()


async def faulty(app, scope, receive, send):
    """In front of the real app."""
    if begun and scope["type"] == "http" and FAULT in ("errors", "garbage"):
        path = Request(scope).url.path
        if FAULT == "errors":
            await Response("scripted", status_code=500)(scope, receive, send)
            return
        if path == "/retrieve":
            await Response('{"result": "lorem ipsum"}')(scope, receive, send)
            return
    await app(scope, receive, send)


def main():
    import uvicorn

    # The real server is built by its own module; only what uvicorn is given is wrapped.
    config = uvicorn.Config

    class Wrapped(config):
        def __init__(self, app, **settings):
            async def outer(scope, receive, send):
                await faulty(app, scope, receive, send)

            super().__init__(outer, **settings)

    uvicorn.Config = Wrapped
    signal.signal(signal.SIGUSR1, begin)
    sys.argv = sys.argv[2:]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
