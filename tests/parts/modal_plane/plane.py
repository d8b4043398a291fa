"""The control plane for tests: start it, give it secrets and volumes, read the requests it received."""

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from grpclib.server import Server

from modal_plane.apps import AppHandlers
from modal_plane.blobs import Blobs
from modal_plane.calls import Calls
from modal_plane.client import Client, Done, bare_python, client_environment
from modal_plane.containers import Containers
from modal_plane.dicts import DictHandlers
from modal_plane.functions import FunctionHandlers
from modal_plane.objects import ObjectHandlers
from modal_plane.servicer import Servicer
from modal_plane.state import App, Call, FunctionSpec, Image, State
from modal_plane.volumes import Volume, VolumeHandlers

CONNECTIONS = Path(__file__).parent / "connections"

T = TypeVar("T")


class ControlPlane:
    """A Modal on loopback, whose containers have `grace` seconds from an interrupt to the kill.

    The app may override `container_env`.
    """

    def __init__(
        self, folder: Path, container_env: Mapping[str, str] | None = None, grace: float = 30
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self._connections = self._folder / "connections"
        self._python = self._folder / "client" / "bin" / "python"
        self._container_env = dict(container_env or {})
        self._grace = grace
        self._state = State(self._folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._clients: list[Client] = []
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._serve())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.kill()
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert kind is not None or not self._state.failures, "\n".join(self._state.failures)

    def modal(
        self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 120
    ) -> Done:
        """Run `modal ARGUMENTS` to its end, with `env` over this process's environment."""
        return self.start(*arguments, cwd=cwd, env=env).wait(seconds)

    def start(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Client:
        """Start `modal ARGUMENTS` and let it run."""
        environment = self._with_addresses(client_environment(env or {})) | {
            "MODAL_TOKEN_ID": "ak-loopback",
            "MODAL_TOKEN_SECRET": "as-loopback",
            "MODAL_CONFIG_PATH": str(self._folder / "no-modal.toml"),
        }
        output = self._folder / f"client-{len(self._clients)}"
        if not self._python.exists():
            bare_python(self._python.parent.parent)
        self._clients.append(Client(arguments, cwd, environment, output, self._python))
        return self._clients[-1]

    @property
    def apps(self) -> list[App]:
        return list(self._state.apps.values())

    @property
    def app(self) -> App:
        return self.apps[-1]

    @property
    def functions(self) -> dict[str, FunctionSpec]:
        return {name: self._functions.spec(function) for name, function in self.app.functions.items()}

    @property
    def calls(self) -> list[Call]:
        """All calls, in the order in which they came in: one for each input."""
        return list(self._state.calls)

    def volume(self, name: str) -> Volume:
        return self._state.volume(name)

    @property
    def secrets(self) -> dict[str, dict[str, str]]:
        """The named secrets that exist. Changes count from the next request on."""
        return self._state.secrets

    @property
    def images_built(self) -> list[Image]:
        """The image steps that were new, in order: a known step is not built a second time."""
        return list(self._state.built)

    @property
    def mounted_files(self) -> dict[str, bytes]:
        """Container path to content of all local files that the last app's functions get."""
        files = {path: sha256 for spec in self.functions.values() for path, sha256 in spec.files.items()}
        return {path: self._state.contents.read(sha256) for path, sha256 in files.items()}

    @property
    def requests(self) -> list[str]:
        return list(self._state.requests)

    @property
    def left_machine(self) -> list[str]:
        """Addresses and names elsewhere that a client, container or child connected to or looked up."""
        seen = self._connections.read_text().split() if self._connections.exists() else []
        return sorted(host for host in set(seen) if not _is_here(host))

    def answer(self, function: str, answer: Callable[..., Any]) -> None:
        """Answer calls of a function by `answer(*args, **kwargs)`, in this process, without a container."""
        self._calls.answers[function] = answer

    def answer_no_more(self, function: str) -> None:
        del self._calls.answers[function]

    def preempt(self, call: Call) -> None:
        """Take the call's container away as Modal does: interrupt, kill after the grace, a new one."""
        self._run(self._containers.running(call).end(self._grace))

    def kill(self, call: Call) -> None:
        """Kill the call's container, as the kernel does when memory is short."""
        container = self._containers.running(call)
        self._loop.call_soon_threadsafe(container.kill)
        self._run(container.gone.wait())

    def wait_for(self, condition: Callable[[], T], what: str, seconds: float = 60) -> T:
        """The first true value of the condition. A TimeoutError says `what` was waited for."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:g} s")
            time.sleep(0.02)
        return value

    async def _serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        state = self._state
        blobs = Blobs(state.contents, lambda volume, path: state.volume_of(volume).place(path))
        await blobs.start()
        self._containers = Containers(state, self._with_addresses(self._container_env), self._grace)
        self._functions = FunctionHandlers(state)
        self._calls = Calls(state, blobs, self._functions, self._containers)
        self._apps = AppHandlers(state, self._calls, self._containers)
        volumes = VolumeHandlers(state, blobs, self._containers)
        objects = ObjectHandlers(state)
        tables = (volumes, DictHandlers(state), objects, blobs)
        handlers = [self._apps, self._calls, self._containers, self._functions, *tables]
        self._blobs = blobs
        self._server = Server([Servicer(handlers, state.requests, state.failures)])
        await self._server.start(sock=listener)

    async def _close(self) -> None:
        # A test that ends early does not wait for what it left running.
        self._containers.grace = 0
        for app in self.apps:
            await self._apps.stop(app)
            await self._containers.all_gone(app)
        self._server.close()
        await self._server.wait_closed()
        await self._blobs.stop()

    def _with_addresses(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment with what leads a client or a container here and nowhere else."""
        path = [str(CONNECTIONS), environment.get("PYTHONPATH")]
        return {
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "MODAL_SERVER_URL": self.url,
            "MODAL_DISABLE_API_PROXY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "MODAL_PLANE_CONNECTIONS": str(self._connections),
        }

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _is_here(host: str) -> bool:
    """Whether an address or name belongs to this machine, so that one can listen there."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        version = ipaddress.ip_address(host.split("%")[0]).version
    except ValueError:
        return False
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as own:
        try:
            own.bind((host, 0))
        except OSError:
            return False
    return True
