"""Containers: processes of Modal's own entrypoint, and the handlers of what they ask.

A container takes one input. It reads from a file which function of which app it is, fetches the input,
imports the app's file by its name, runs the function, and sends the output; when no input follows, it commits
its volumes and ends. All of that is Modal's code, which runs here in a folder with the app's mounted files,
with an environment of its own: nothing of the client's environment reaches it, as nothing of a laptop's does
at Modal.
"""

import asyncio
import codecs
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2

from modal_plane.functions import layout
from modal_plane.servicer import TASK_HEADER, Caller
from modal_plane.state import ENVIRONMENT, App, Call, Function, State, new_id
from modal_plane.volumes import Commit

KEPT = ("PATH", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
"""What a container has of this machine's environment: what a process needs to start here."""


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt."""

    status: str
    """success, failure, timeout or terminated; crash and preempted are without an output."""
    result: api_pb2.GenericResult
    data_format: "api_pb2.DataFormat.ValueType" = api_pb2.DATA_FORMAT_UNSPECIFIED


def failed(status: str, text: str) -> Outcome:
    """An outcome that the server itself reports."""
    kind = {
        "timeout": api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT,
        "terminated": api_pb2.GenericResult.GENERIC_STATUS_TERMINATED,
    }.get(status, api_pb2.GenericResult.GENERIC_STATUS_FAILURE)
    return Outcome(status, api_pb2.GenericResult(status=kind, exception=text))


@dataclass
class Job:
    """A call's input on its way to its output."""

    call: Call
    function: Function
    index: int
    input: api_pb2.FunctionInput
    outcome: Outcome | None = None
    task: asyncio.Task[None] | None = None


@dataclass
class Container:
    """A process that runs one attempt."""

    id: str
    job: Job
    root: Path
    process: asyncio.subprocess.Process | None = None
    interrupted: bool = False
    fetched: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: asyncio.Future[Outcome] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self, outcome: Outcome) -> None:
        """The first outcome counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def kill(self) -> None:
        """End it and what it started in its process group, at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self, grace: float) -> None:
        """Interrupt it, and kill it when it is still there after `grace` seconds."""
        self.interrupted = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.gone.wait(), grace)
        self.kill()
        await self.gone.wait()


class Containers:
    """Starts containers and answers them.

    Args:
        state: The tables.
        environment: Environment variables of every container.
        grace: Seconds that a container has from the interrupt to the kill.
    """

    def __init__(self, state: State, environment: Mapping[str, str], grace: float) -> None:
        self.grace = grace
        self._state = state
        self._environment = environment
        self._alive: dict[str, Container] = {}
        self._supervisors: set[asyncio.Task[None]] = set()

    async def execute(self, job: Job) -> Outcome:
        """One attempt in a new container: returns when it has sent its output or ended without one."""
        starting = asyncio.create_task(self._start(job))
        try:
            container = await asyncio.shield(starting)
            fetching = asyncio.create_task(container.fetched.wait())
            either: set[asyncio.Future[Any]] = {fetching, container.outcome}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            fetching.cancel()
            seconds = job.call.spec.timeout
            done, _ = await asyncio.wait({container.outcome}, timeout=seconds)
            if not done:
                text = f"Task's current input {job.call.id} hit its timeout of {seconds}s"
                container.settle(failed("timeout", text))
                container.kill()
                await container.gone.wait()
            return container.outcome.result()
        except asyncio.CancelledError:
            await (await starting).end(self.grace)
            raise

    async def all_gone(self, app: App) -> None:
        """Wait until none of the app's containers is left."""
        for container in [*self._alive.values()]:
            if container.job.function.app is app:
                await container.gone.wait()

    def running(self, call: Call) -> Container:
        """The container that runs the call.

        Raises:
            LookupError: None does.
        """
        for container in self._alive.values():
            if container.job.call is call and not container.outcome.done():
                return container
        raise LookupError(f"no container runs {call.function} ({call.status})")

    def event(self, caller: Caller) -> Commit:
        """Who commits or reloads."""
        container = self._container(caller)
        call = container.job.call
        return Commit(call.function, call.id, container.outcome.done() or container.interrupted)

    def call_of(self, caller: Caller) -> Call | None:
        """The call in whose container a request was made."""
        container = self._alive.get(caller.task_id or "")
        return container.job.call if container else None

    async def ContainerHello(self, request: Empty, caller: Caller) -> Empty:
        return Empty()

    async def ContainerHeartbeat(
        self, request: api_pb2.ContainerHeartbeatRequest, caller: Caller
    ) -> api_pb2.ContainerHeartbeatResponse:
        return api_pb2.ContainerHeartbeatResponse()

    async def FunctionGetInputs(
        self, request: api_pb2.FunctionGetInputsRequest, caller: Caller
    ) -> api_pb2.FunctionGetInputsResponse:
        container = self._container(caller)
        if container.fetched.is_set():
            end = api_pb2.FunctionGetInputsItem(kill_switch=True)
            return api_pb2.FunctionGetInputsResponse(inputs=[end])
        container.fetched.set()
        job = container.job
        item = api_pb2.FunctionGetInputsItem(
            input_id=job.call.id,
            input=job.input,
            function_call_id=job.call.function_call_id,
            function_call_invocation_type=(
                api_pb2.FUNCTION_CALL_INVOCATION_TYPE_ASYNC
                if job.call.spawned
                else api_pb2.FUNCTION_CALL_INVOCATION_TYPE_SYNC
            ),
            retry_count=job.call.attempts - 1,
        )
        return api_pb2.FunctionGetInputsResponse(inputs=[item])

    async def FunctionPutOutputs(self, request: api_pb2.FunctionPutOutputsRequest, caller: Caller) -> Empty:
        container = self._container(caller)
        statuses = {
            api_pb2.GenericResult.GENERIC_STATUS_SUCCESS: "success",
            api_pb2.GenericResult.GENERIC_STATUS_TERMINATED: "terminated",
        }
        for output in request.outputs:
            status = statuses.get(output.result.status, "failure")
            container.settle(Outcome(status, output.result, output.data_format))
        return Empty()

    async def TaskResult(self, request: api_pb2.TaskResultRequest, caller: Caller) -> Empty:
        # The app's file could not be imported, or the container could not be set up from it.
        self._container(caller).settle(Outcome("failure", request.result))
        return Empty()

    def _container(self, caller: Caller) -> Container:
        container = self._alive.get(caller.task_id or "")
        if container is None:
            raise GRPCError(Status.FAILED_PRECONDITION, f"{caller.task_id} is not a running container")
        return container

    async def _start(self, job: Job) -> Container:
        root = self._free_root()
        container = Container(new_id("ta"), job, root)
        self._alive[container.id] = container
        for mounted in job.call.spec.volumes.values():
            self._state.volume(mounted.name).mount(job.call.function, container.id)
        self._fill(root, {**job.call.spec.image.copied, **job.call.spec.files})
        arguments = self._arguments(container, root.with_suffix(".arguments"))
        workdir = root / job.call.spec.image.workdir.lstrip("/")
        workdir.mkdir(parents=True, exist_ok=True)
        container.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "modal._container_entrypoint",
            cwd=workdir,
            env=self._process_environment(container, arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        supervisor = asyncio.create_task(self._supervise(container, container.process))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return container

    async def _supervise(self, container: Container, process: asyncio.subprocess.Process) -> None:
        """Wait for a container's end, then settle its open input."""
        pumps = [
            asyncio.create_task(self._pump(container, stream, descriptor))
            for stream, descriptor in (
                (process.stdout, api_pb2.FILE_DESCRIPTOR_STDOUT),
                (process.stderr, api_pb2.FILE_DESCRIPTOR_STDERR),
            )
            if stream is not None
        ]
        code = await process.wait()
        container.kill()
        # A process that has left the group can still hold the pipes.
        _, open_pumps = await asyncio.wait(pumps, timeout=5)
        for pump in open_pumps:
            pump.cancel()
        for mounted in container.job.call.spec.volumes.values():
            self._state.volume(mounted.name).mounted_by.discard(container.id)
        status = "preempted" if container.interrupted else "crash"
        container.settle(failed(status, f"Runner failed with exit code: {code}"))
        del self._alive[container.id]
        container.gone.set()

    async def _pump(
        self,
        container: Container,
        stream: asyncio.StreamReader,
        descriptor: "api_pb2.FileDescriptor.ValueType",
    ) -> None:
        """Pass what it prints on to the app's log."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        call, function = container.job.call, container.job.function
        while chunk := await stream.read(2**16):
            text = decoder.decode(chunk)
            call.logs += text
            item = api_pb2.TaskLogs(
                data=text,
                timestamp=time.time(),
                timestamp_ns=time.time_ns(),
                file_descriptor=descriptor,
                function_call_id=call.function_call_id,
                input_id=call.id,
            )
            function.app.log.add(
                api_pb2.TaskLogsBatch(task_id=container.id, function_id=function.id, items=[item])
            )

    def _free_root(self) -> Path:
        """A folder for a container's files: the first free one, so that paths are reused."""
        taken = {container.root for container in self._alive.values()}
        folder = self._state.folder / "containers"
        number = 0
        while folder / str(number) in taken:
            number += 1
        return folder / str(number)

    def _fill(self, root: Path, files: dict[str, str]) -> None:
        """Replace the folder's contents by the files."""
        shutil.rmtree(root, ignore_errors=True)
        (root / "root").mkdir(parents=True)
        for path, sha256 in files.items():
            place = root / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._state.contents.path(sha256), place)

    def _arguments(self, container: Container, path: Path) -> Path:
        """The file by which the entrypoint knows what to run."""
        function = container.job.function
        definition = function.definitions[0]
        arguments = api_pb2.ContainerArguments(
            task_id=container.id,
            function_id=function.id,
            app_id=function.app.id,
            function_def=definition,
            environment_name=ENVIRONMENT,
            app_layout=layout(self._state, function.app, definition),
        )
        path.write_bytes(arguments.SerializeToString())
        return path

    def _process_environment(self, container: Container, arguments: Path) -> dict[str, str]:
        spec, root = container.job.call.spec, container.root
        folders = {"/root": root / "root"}
        mounts = {}
        for path, mounted in spec.volumes.items():
            folders[path] = self._state.volume(mounted.name).folder / (mounted.sub_path or "").lstrip("/")
            folders[path].mkdir(parents=True, exist_ok=True)
            mounts[mount_variable(path)] = str(folders[path])
        given = dict(spec.image.environment)
        for secret in spec.secrets:
            given |= secret.values
        given = {name: _here(value, folders) for name, value in given.items()}
        python_path = [str(root / "root"), given.pop("PYTHONPATH", ""), self._environment["PYTHONPATH"]]
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        return {
            **environment,
            "HOME": str(root / "root"),
            "PYTHONUNBUFFERED": "1",
            **self._environment,
            **given,
            **mounts,
            "PYTHONPATH": os.pathsep.join(folder for folder in python_path if folder),
            "DRZERO_CONTAINER_ROOT": str(root),
            "MODAL_PLANE_PID": str(os.getpid()),
            "MODAL_IS_REMOTE": "1",
            "MODAL_TASK_ID": container.id,
            "MODAL_IMAGE_ID": spec.image.id,
            "MODAL_ENVIRONMENT": ENVIRONMENT,
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(arguments),
            "MODAL_OVERRIDE_HEADERS": f"{TASK_HEADER}:{container.id}",
        }


def _here(value: str, folders: Mapping[str, Path]) -> str:
    """The value with each of its paths in the container, between colons, replaced by its path here."""
    parts = value.split(":")
    for number, part in enumerate(parts):
        for path, folder in folders.items():
            if part == path or part.startswith(f"{path}/"):
                parts[number] = f"{folder}{part[len(path) :]}"
    return ":".join(parts)


def mount_variable(path: str) -> str:
    """The environment variable that has the folder of a mount path: `/corpus` is DRZERO_MOUNT_CORPUS."""
    return "DRZERO_MOUNT_" + re.sub(r"\W+", "_", path.strip("/")).upper()
